"""Lines on logarithmic axes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain

from paceline.tools.bench.svg import COLOURS, Section, spaced

Points = Sequence[tuple[float, float]]

# Sizes in pixels: a panel's plotted area, and the space around it.
WIDTH, HEIGHT = 350, 240
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 34, 46
LEGEND = 24
MARK = 4.0
# Lines are told apart by colour, and without it by the shapes of their marks.
SHAPES = ("circle", "square", "diamond", "cross")


@dataclass(frozen=True)
class Panel:
    """One of several pictures beside each other: a line for each name."""

    title: str
    lines: Mapping[str, Points]


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis: what it shows, where its labels are, and where in the picture a value lies."""

    label: str
    ticks: Mapping[float, str]
    low: float
    high: float

    def share(self, value: float) -> float:
        """Where a value lies between the axis's ends, from 0 to 1."""
        return math.log(value / self.low) / math.log(self.high / self.low)


def section(
    panels: Sequence[Panel],
    names: Sequence[str],
    *,
    x: tuple[str, Callable[[float], str]],
    y: tuple[str, Callable[[float], str]],
    columns: int,
) -> Section:
    """Draw the panels on the same axes, so many in a row; an axis is its label and how its values read.

    The names are those that a line may have; a name's colour is by its place among them.
    """
    points = [point for panel in panels for line in panel.lines.values() for point in line]
    across, up = _values_axis(*x, [a for a, _ in points]), _decades_axis(*y, [b for _, b in points])
    rows = math.ceil(len(panels) / columns)
    width = columns * (LEFT + WIDTH + RIGHT)
    drawn = (_panel(panel, number, columns, names, across, up) for number, panel in enumerate(panels))
    legend = _legend({name: names.index(name) for panel in panels for name in panel.lines}, width)
    return Section([*legend, *chain.from_iterable(drawn)], width, LEGEND + rows * (TOP + HEIGHT + BOTTOM))


def _values_axis(label: str, text: Callable[[float], str], values: Sequence[float]) -> Axis:
    """An axis with a label at each of the values, which are few."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low / 2, high * 2
    return Axis(label, {value: text(value) for value in sorted(set(values))}, low, high)


def _decades_axis(label: str, text: Callable[[float], str], values: Sequence[float]) -> Axis:
    """An axis from one power of ten to another, with a label at each."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(last, first + 1)
    return Axis(label, {10.0**n: text(10.0**n) for n in range(first, last + 1)}, 10.0**first, 10.0**last)


def _panel(
    panel: Panel, number: int, columns: int, names: Sequence[str], across: Axis, up: Axis
) -> Iterator[str]:
    row, column = divmod(number, columns)
    left, top = column * (LEFT + WIDTH + RIGHT) + LEFT, LEGEND + row * (TOP + HEIGHT + BOTTOM) + TOP
    yield f'<g transform="translate({left} {top})">'
    yield f'<text x="{WIDTH / 2}" y="-10" class="panel">{escape(panel.title)}</text>'
    for value, text in up.ticks.items():
        y = HEIGHT * (1 - up.share(value))
        yield f'<path d="M0 {y:.1f}H{WIDTH}" class="grid"/>'
        yield f'<text x="-6" y="{y + 4:.1f}" class="up">{escape(text)}</text>'
    for value, text in across.ticks.items():
        x = WIDTH * across.share(value)
        yield f'<path d="M{x:.1f} 0V{HEIGHT}" class="grid"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT + 16}" class="tick">{escape(text)}</text>'
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT + 34}" class="across">{escape(across.label)}</text>'
    turn = f"translate(-60 {HEIGHT / 2}) rotate(-90)"
    yield f'<text transform="{turn}" class="across">{escape(up.label)}</text>'
    for name, line in panel.lines.items():
        places = [(WIDTH * across.share(a), HEIGHT * (1 - up.share(b))) for a, b in sorted(line)]
        yield from _line(places, names.index(name))
    yield "</g>"


def _legend(names: Mapping[str, int], width: float) -> Iterator[str]:
    for name, index, x in spaced(names, width):
        yield from _line([(x, 4), (x + 12, 4), (x + 24, 4)], index, marked=slice(1, 2))
        yield f'<text x="{x + 30}" y="8" class="name">{escape(name)}</text>'


def _line(places: Points, index: int, *, marked: slice = slice(None)) -> Iterator[str]:
    index %= len(COLOURS)
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<path d="M{path}" class="line c{index}"/>'
    for x, y in places[marked]:
        yield f'<path d="{_mark(SHAPES[index], x, y)}" class="mark c{index}"/>'


def _mark(shape: str, x: float, y: float) -> str:
    r = MARK
    match shape:
        case "circle":
            return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z"
        case "square":
            return f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}Z"
        case "diamond":
            return f"M{x:.1f} {y - r - 1:.1f}l{r + 1} {r + 1}l{-r - 1} {r + 1}l{-r - 1} {-r - 1}Z"
        case _:
            return f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}"
