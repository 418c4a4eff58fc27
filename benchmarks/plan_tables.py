"""The header and the rows of the table of predicted steps, from the figures of benchmarks/plan.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.tools.bench.measure import Timing, format_seconds

HeaderAndRows = tuple[Sequence[str], Sequence[Sequence[str]]]


def errors(entry: Mapping[str, Any]) -> HeaderAndRows:
    """Each model at each rate with each hook: the prediction beside what was measured."""
    header = ("model", "link", "hook", "predicted", "measured", "error", "target")
    return header, [_row(result) for result in entry["results"]]


def _row(result: Mapping[str, Any]) -> Sequence[str]:
    case, measured, error = result["case"], result["spreads"]["measured"], result["figures"]["error"]
    held_out = ", held out" if "(held out)" in result["what"] else ""
    missed = "" if error["met"] else ": **missed**"
    return (
        result["what"].partition(f", {case['hook']} at ")[0],
        f"{case['rate']}{held_out}",
        case["hook"],
        format_seconds(result["spreads"]["predicted"]["median"]),
        str(Timing(measured["median"], measured["low"], measured["high"])),
        f"{error['value']:.0%}",
        f"at most {error['target']:.0%}{missed}",
    )
