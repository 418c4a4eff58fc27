"""The header and the rows of the tables of healing, from the figures that benchmarks/heal.py writes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# For how long ranks may stand still, apart from one step: half of the times, and 19 of 20 times.
MEDIAN_SECONDS = 1.0
P95_SECONDS = 3.0

Figures = Mapping[str, Any]
HeaderAndRows = tuple[Sequence[str], Sequence[Sequence[str]]]

NAMES = {
    "paceline": "`paceline run --heal`",
    "torchrun": "torchrun, a snapshot every {snapshot_every} steps",
    "torchft": "torchft",
}


def stalls(entry: Figures) -> HeaderAndRows:
    """For how long ranks stood still after a kill, with each launcher."""
    header = (
        "launcher", "ranks", "killed", "kills", "a step", "stall, median", "95 %", "longest",
        "no step on any rank, median", "steps done again",
    )  # fmt: skip
    return header, [row for side in _sides(entry) for row in _rows(side, entry)]


def _sides(entry: Figures) -> list[str]:
    return [side for side in NAMES if side in entry["sides"]]


def _rows(side: str, entry: Figures) -> Iterator[Sequence[str]]:
    found = entry["sides"][side]
    name = NAMES[side].format_map(entry)
    for row in found["rows"]:
        yield name, str(row["world"]), row["kind"], *_cells(row)
    if len(found["rows"]) > 1:
        yield name, "all", "all", *_cells(found["all"])


def _cells(row: Figures) -> Sequence[str]:
    kills = str(row["kills"])
    if row["healed"] < row["kills"]:
        kills += f", **{row['kills'] - row['healed']} not healed**"
    again = "" if row["again"] is None else f"{row['again']:.1f}"
    return kills, *(_seconds(row[name]) for name in ("step", "median", "p95", "most", "pause")), again


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def ends(entry: Figures) -> HeaderAndRows:
    """How the runs with each launcher ended."""
    header = ("launcher", "kills", "runs", "as they should", "samples that did not count", "what was wrong")
    rows = []
    for side in _sides(entry):
        found = entry["sides"][side]
        wrong = "; ".join(f"{what} ({count})" for what, count in found["wrong"].items())
        lost = "" if found["lost"] is None else f"{100 * found['lost']:.1f} %"
        counts = (str(each) for each in (found["all"]["kills"], found["runs"], found["right"]))
        rows.append((NAMES[side].format_map(entry), *counts, lost, wrong))
    return header, rows


def phases(entry: Figures) -> HeaderAndRows:
    """What the killed ranks were doing."""
    sides = _sides(entry)
    names = dict.fromkeys(name for side in sides for name in entry["sides"][side]["phases"])
    rows = [(name, *(str(entry["sides"][side]["phases"].get(name, 0)) for side in sides)) for name in names]
    return ("killed in", *(NAMES[side].format_map(entry) for side in sides)), rows


def aims(entry: Figures) -> list[str]:
    """Whether paceline's stalls were as short as they should be."""
    found = entry["sides"].get("paceline", {}).get("all")
    if not found or found["median"] is None:
        return []
    figures = (
        ("median stall less a step", found["median less a step"], MEDIAN_SECONDS),
        ("95 % of stalls", found["p95"], P95_SECONDS),
    )
    return [
        f"{name}: {_seconds(value)} (aim: below {aim:g} s{'' if value < aim else ', **missed**'})"
        for name, value, aim in figures
    ]
