"""The header and the rows of the table of losses and bytes, from the figures of benchmarks/outer.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.tools.bench.measure import Size, with_quartiles

HeaderAndRows = tuple[Sequence[str], Sequence[Sequence[str]]]


def losses(entry: Mapping[str, Any]) -> HeaderAndRows:
    """What trainings end with, and what they send."""
    loss, sent = entry["results"]
    sizes = [_kilobytes(spread) for spread in sent["spreads"].values()]
    header = ("", "exact averages", "outer loop", "compared", "target")
    return header, [
        (
            loss["what"],
            _range(loss["figures"]["exact averages"]),
            _range(loss["figures"]["outer loop"]),
            f"outer / exact: {_range(loss['figures']['outer / exact'])}",
            _target(loss["figures"]["outer / exact"]),
        ),
        (
            sent["what"],
            *sizes,
            f"exact / outer: {sent['figures']['exact / outer']['value']:.0f}",
            ", aim ".join(map(_target, sent["figures"].values())),
        ),
    ]


def _kilobytes(spread: Mapping[str, Any]) -> str:
    return with_quartiles(Size(spread["median"], spread["low"], spread["high"]), "KB", 1e-3)


def _range(figure: Mapping[str, Any]) -> str:
    least, most = figure["quartiles"]
    return f"{figure['value']:.3f} ({least:.3f} to {most:.3f})"


def _target(figure: Mapping[str, Any]) -> str:
    missed = "" if figure["met"] else ": **missed**"
    return f"{'at most' if figure['at_most'] else 'at least'} {figure['target']:g}{missed}"
