"""Bars that begin at zero, a group for each thing that is compared."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain

from paceline.tools.bench.measure import Timing
from paceline.tools.bench.svg import Section
from paceline.tools.formatting import milliseconds

# Sizes in pixels: the longest bar, beside it the space for names and for figures, a bar's height and others.
WIDTH, LEFT, RIGHT = 220, 132, 78
BAR, GAP, TOP, BOTTOM = 16, 6, 34, 18


@dataclass(frozen=True)
class Group:
    """Bars that are compared with each other, by name. Where the first one ends is marked in all."""

    title: str
    bars: Mapping[str, Timing]


def section(groups: Sequence[Group], colours: Mapping[str, int], *, columns: int) -> Section:
    """Draw the groups, each in its own scale, so many in a row; colours are by name."""
    tallest = max(len(group.bars) for group in groups)
    height = TOP + tallest * (BAR + GAP) + BOTTOM
    drawn = (_group(group, number, columns, height, colours) for number, group in enumerate(groups))
    rows = math.ceil(len(groups) / columns)
    width = min(columns, len(groups)) * (LEFT + WIDTH + RIGHT)
    return Section(list(chain.from_iterable(drawn)), width, rows * height)


def _group(
    group: Group, number: int, columns: int, height: float, colours: Mapping[str, int]
) -> Iterator[str]:
    row, column = divmod(number, columns)
    longest = max(bar.high for bar in group.bars.values())
    scale = WIDTH / longest
    yield f'<g transform="translate({column * (LEFT + WIDTH + RIGHT) + LEFT} {row * height + TOP})">'
    yield f'<text x="{(WIDTH + RIGHT - LEFT) / 2}" y="-12" class="panel">{escape(group.title)}</text>'
    for place, (name, bar) in enumerate(group.bars.items()):
        yield from _bar(name, bar, place * (BAR + GAP), scale, colours[name])
    first = next(iter(group.bars.values())).median * scale
    bottom = len(group.bars) * (BAR + GAP) - GAP
    yield f'<path d="M{first:.1f} 0V{bottom}" class="whisker" stroke-dasharray="3 3"/>'
    yield "</g>"


def _bar(name: str, bar: Timing, y: float, scale: float, colour: int) -> Iterator[str]:
    middle, figure = y + BAR / 2, milliseconds(bar.median * 1e3)
    yield f'<text x="-8" y="{middle + 4}" class="up">{escape(name)}</text>'
    yield f'<rect x="0" y="{y}" width="{bar.median * scale:.1f}" height="{BAR}" class="bar c{colour}"/>'
    yield f'<path d="M{bar.low * scale:.1f} {middle}H{bar.high * scale:.1f}" class="whisker"/>'
    yield f'<text x="{WIDTH + 8}" y="{middle + 4}" class="name">{escape(figure)}</text>'
