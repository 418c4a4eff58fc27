"""Pictures as SVG files that need nothing else and follow dark mode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

# Sizes in pixels: what is above and below all sections, and room for a note.
HEAD, LINE, LEAST_WIDTH = 40, 16, 640
# Told apart by colour. Each with its dark mode's.
COLOURS = (("#b04a12", "#f0915a"), ("#1f66b5", "#6fb0f5"), ("#12805c", "#4fcf9f"), ("#6d6d6d", "#a8a8a8"))


@dataclass(frozen=True)
class Section:
    """A part of a picture, drawn from its own upper left corner."""

    body: Sequence[str]
    width: float
    height: float


def write(path: Path, sections: Sequence[Section], *, title: str, note: str) -> None:
    """Put the sections below each other, between a title and a note."""
    width = max(LEAST_WIDTH, *(section.width for section in sections))
    body, y = [f'<text x="{width / 2}" y="24" class="title">{escape(title)}</text>'], float(HEAD)
    for section in sections:
        x = (width - section.width) / 2
        body += [f'<g transform="translate({x:.1f} {y:.1f})">', *section.body, "</g>"]
        y += section.height
    y += LINE
    body.append(f'<text x="{width / 2}" y="{y - 8:.1f}" class="note">{escape(note)}</text>')
    path.write_text(_document(body, width, y))


def spaced(names: Mapping[str, int], width: float) -> list[tuple[str, int, float]]:
    """The names of a legend in one line, in the middle: each with its colour, and where it begins."""
    spaces = {name: 48 + 7 * len(name) for name in names}
    x, placed = (width - sum(spaces.values())) / 2, []
    for name, colour in names.items():
        placed.append((name, colour, x))
        x += spaces[name]
    return placed


def _document(body: Sequence[str], width: float, height: float) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}">',
            f"<style>{_style(dark=False)}@media (prefers-color-scheme: dark){{{_style(dark=True)}}}</style>",
            '<rect width="100%" height="100%" class="back"/>',
            *body,
            "</svg>\n",
        ]
    )


def _style(*, dark: bool) -> str:
    back, ink, grid = ("#15181c", "#e4e6e8", "#3a3f45") if dark else ("#ffffff", "#1d2126", "#d9dde1")
    colours = "".join(
        f".c{index}{{stroke:{pair[dark]}}}.mark.c{index},.bar.c{index}{{fill:{pair[dark]}}}"
        for index, pair in enumerate(COLOURS)
    )
    return (
        f".back{{fill:{back}}}text{{fill:{ink};font:12px sans-serif;text-anchor:middle}}"
        ".title{font-size:16px;font-weight:bold}.panel{font-size:13px;font-weight:bold}"
        ".tick{font-size:11px}.name{text-anchor:start}.up{text-anchor:end}.note{font-size:11px}"
        f".whisker{{stroke:{ink};stroke-width:1.5;fill:none}}"
        f".grid{{stroke:{grid};stroke-width:1}}.line{{fill:none;stroke-width:2}}.mark{{stroke-width:2}}{colours}"
    )
