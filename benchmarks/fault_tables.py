"""The header and the rows of the tables of faults, from the figures that benchmarks/faults.py writes."""

from collections.abc import Mapping, Sequence
from typing import Any

SOON_SECONDS = 10.0

Figures = Mapping[str, Any]
HeaderAndRows = tuple[Sequence[str], Sequence[Sequence[str]]]


def by_world(entry: Figures, wrapper: str, transport: str) -> HeaderAndRows:
    """What came of each fault, with each number of ranks."""
    found = {
        (each["fault"], each["world"]): each
        for each in entry["cells"]
        if (each["wrapper"], each["transport"]) == (wrapper, transport)
    }
    worlds = sorted({world for _, world in found})
    rows = [
        (what, *(outcome(found.get((fault, world)), deadline=entry["deadline"]) for world in worlds))
        for fault, what in entry["faults"].items()
        if any((fault, world) in found for world in worlds)
    ]
    return ("fault", *(f"{world} ranks" for world in worlds)), rows


def summary(entry: Figures) -> HeaderAndRows:
    """How many runs were as they should be, with each wrapper on each transport."""
    header = (
        "wrapper, transport",
        "runs",
        f"told in {SOON_SECONDS:g} s",
        "with the place",
        "ended or going on",
    )
    sides: dict[str, list[Figures]] = {}
    for cell in entry["cells"]:
        sides.setdefault(f"{cell['wrapper']}, {cell['transport']}", []).append(cell)
    rows = [
        (
            side,
            str(len(cells)),
            str(sum(is_told_soon(each) for each in cells)),
            str(sum(is_told_soon(each) and each["named"] is not False for each in cells)),
            str(sum(each["sound"] for each in cells)),
        )
        for side, cells in sides.items()
    ]
    return header, rows


def outcome(cell: Figures | None, *, deadline: float) -> str:
    """What came of one fault: when told, whether the place was named, and how all ended."""
    if cell is None:
        return ""
    words = [_when(cell, deadline)]
    if cell["told"] is not None and cell["named"] is not None:
        words.append(cell["where"] if cell["named"] else f"no {cell['where']}")
    if cell["misled"]:
        words.append("**others blamed**")
    after = cell["after"] if cell["sound"] else f"**{cell['after']}**"
    return f"{', '.join(words)}; {after}"


def _when(cell: Figures, deadline: float) -> str:
    """When all were told; a run in which nothing hangs is over before the deadline."""
    if cell["told"] is not None:
        return f"{cell['told']:.1f} s"
    if cell["told_ranks"]:
        return f"**told on {cell['told_ranks']} of {cell['ranks']} ranks**"
    return f"**not told in {deadline:g} s**" if cell["after"] == "hang" else "**not told**"


def is_told_soon(cell: Figures) -> bool:
    """Whether every rank was told soon, and none was told wrong."""
    return cell["told"] is not None and cell["told"] < SOON_SECONDS and not cell["misled"]
