"""The header and the rows of the table of the hook "auto", from the figures of benchmarks/auto_hook.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.tools.bench.measure import Timing

HeaderAndRows = tuple[Sequence[str], Sequence[Sequence[str]]]


def by_rate(entry: Mapping[str, Any]) -> HeaderAndRows:
    """Each model at each rate: the best fixed hook, what auto took, and how they compare."""
    header = ("step of", "link", "best fixed hook", "auto took", "auto / best fixed", "target")
    return header, [_row(result) for result in entry["results"]]


def _row(result: Mapping[str, Any]) -> Sequence[str]:
    case, spreads = result["case"], result["spreads"]
    [figure] = result["figures"].values()
    low, high = figure["quartiles"]
    return (
        result["what"].removeprefix("step of ").rpartition(" at ")[0],
        case["rate"],
        f"{case['best']}: {_time(spreads[case['best']])}",
        f"{case['chosen']}: {_time(spreads['auto'])}",
        f"{figure['value']:.2f} ({low:.2f} to {high:.2f})",
        f"at most {figure['target']:.2f}{'' if figure['met'] else ': **missed**'}",
    )


def _time(spread: Mapping[str, Any]) -> str:
    return str(Timing(spread["median"], spread["low"], spread["high"]))
