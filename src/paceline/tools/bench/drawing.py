"""What was measured, as a picture."""

from collections.abc import Mapping, Sequence

from paceline.tools.bench import bars, lines
from paceline.tools.bench.collectives import COLLECTIVES, SIDES, Case, Seconds, shown_size
from paceline.tools.bench.measure import timing
from paceline.tools.bench.sides import ALONE, Side
from paceline.tools.bench.steps import Measured
from paceline.tools.bench.svg import Section

# As in the lines of collectives: torch on gloo, torch on our backend, paceline, and neither.
COLOURS = {str(Side("torch")): 0, str(Side("torch", "backend")): 1, str(Side("paceline")): 2, str(ALONE): 3}


def of_steps(measured: Sequence[Measured]) -> Section:
    """A model's step on each side, beside each other."""
    groups = [
        bars.Group(f"step of {each.what}", {side: timing(values) for side, values in each.seconds.of.items()})
        for each in measured
    ]
    return bars.section(groups, COLOURS, columns=2)


def of_collectives(measured: Mapping[Case, Seconds], *, columns: int) -> Section:
    """Each side's time against the size: a panel for each collective, one above another, and world."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    order = list(COLLECTIVES)
    for case, seconds in sorted(measured.items(), key=lambda item: order.index(item[0].collective)):
        drawn = panels.setdefault(f"{case.collective}, {case.world} ranks", {})
        for side, values in seconds.items():
            drawn.setdefault(side, []).append((case.size, timing(values).median))
    return lines.section(
        [lines.Panel(title, drawn) for title, drawn in panels.items()],
        SIDES,
        x=("size of a rank's tensor", lambda size: shown_size(int(size))),
        y=("time of a call", shown_seconds),
        columns=columns,
    )


def shown_seconds(seconds: float) -> str:
    """A power of ten of seconds, as an axis shows it."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999:
            return f"{seconds * scale:g} {unit}"
    return f"{seconds:g} s"
