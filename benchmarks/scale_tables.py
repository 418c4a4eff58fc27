"""The header and the rows of the tables of scale, from the figures that benchmarks/scale.py writes."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.tools.bench.measure import Size, Timing, with_quartiles

Figures = Mapping[str, Any]
HeaderAndRows = tuple[Sequence[str], Sequence[Sequence[str]]]

TIMES = ("first wrap", "second wrap", "step", "CPU per rank and step", "report")
SIZES = ("memory per rank", "recording per rank", "page")
HOST_SIDES = ("plain averages", "outer loop")


def times(entry: Figures) -> HeaderAndRows:
    """What takes how long, with each number of ranks on one host."""
    return _by_ranks(entry, TIMES)


def sizes(entry: Figures) -> HeaderAndRows:
    """What takes how many bytes, with each number of ranks on one host."""
    return _by_ranks(entry, SIZES)


def _by_ranks(entry: Figures, sides: Sequence[str]) -> HeaderAndRows:
    found = [each for each in entry["results"] if each["case"]["quantity"] == "ranks"]
    rows = [(str(each["case"]["ranks"]), *(_shown(each, side) for side in sides)) for each in found]
    return ("ranks", *sides), rows


def hosts(entry: Figures) -> HeaderAndRows:
    """What a step takes and sends with several hosts of two ranks."""
    found = [each for each in entry["results"] if "hosts" in each["case"]]
    rows = [(each["what"], *(_shown(each, side) for side in HOST_SIDES)) for each in found]
    return ("what", *HOST_SIDES), rows


def _shown(result: Figures, side: str) -> str:
    """A median with its quartiles; sizes in KB, because most are small."""
    values = dict(result["spreads"][side])
    if values.pop("unit") == "s":
        return str(Timing(**values))
    return with_quartiles(Size(**values), "KB", 1e-3)


def busy(entry: Figures) -> str:
    """How busy the machine was before the run."""
    return f"Load average of the machine before the run: {entry['load']:g}."
