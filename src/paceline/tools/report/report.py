"""The page: one file with everything in it, which a browser opens from the disk."""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.recording.reader import read
from paceline.recording.rows import BucketColumn, Column
from paceline.tools.report.analysis import Findings, analyse
from paceline.tools.report.packing import COLUMNS, rows, sums, text, tick
from paceline.tools.report.parts import Part
from paceline.tools.report.runs import Section, Track, sections

# Of all tracks together: more would make the page larger than a browser opens at once.
_MOST_NUMBERS = 3_500_000
_MOST_RANKS = 64
_SCRIPTS = ("data.js", "words.js", "timeline.js", "plots.js", "tables.js", "page.js")


def recorded(folder: Path) -> list[tuple[Section, Findings]]:
    """What a folder's recordings say, a wrapper each.

    Raises:
        RecordingError: there is nothing, or something that cannot be read.
    """
    return [(section, analyse(section)) for section in sections(read(folder))]


def page(found: Sequence[tuple[Section, Findings]]) -> str:
    """The page of these findings."""
    share = _MOST_NUMBERS // max(1, len(found))
    contents, columns = [], []
    for section, findings in found:
        shown = _shown(section, findings)
        last = max(1, share // (len(shown) * (COLUMNS + len(BucketColumn) * len(section.buckets))))
        unit, start = tick(shown), min(_first_begin(track, last) for track in shown)
        contents.append(_content(section, findings, shown, last) | {"tick_ms": unit / 1e6})
        for track in shown:
            columns += [*rows(track, last, start=start, unit=unit), *sums(track)]
    data = {"parts": [str(part) for part in Part], "sections": contents}
    return _fill(
        {
            "title": html.escape(
                f"{contents[0]['module']}: paceline report".encode("ascii", "replace").decode()
            ),
            "style": _file("page.css"),
            "findings": _json(data),
            "numbers": text(columns),
            "script": "\n".join(map(_file, _SCRIPTS)),
        }
    )


def _shown(section: Section, findings: Findings) -> list[Track]:
    """Not more ranks than one can look at; those that are late, and the first of the others."""
    late = {each.rank for each in findings.late}
    first = sorted(section.tracks, key=lambda track: (track.rank not in late, track.rank))[:_MOST_RANKS]
    return sorted(first, key=lambda track: track.rank)


def _first_begin(track: Track, last: int) -> int:
    return track[Column.BEGIN][max(0, len(track) - last)]


def _content(section: Section, findings: Findings, shown: Sequence[Track], last: int) -> dict[str, Any]:
    return {
        **asdict(findings),
        "tracks": [
            {"rank": track.rank, "rows": min(last, len(track)), "sums": len(track.sums)} for track in shown
        ],
        "slots": [str(name) for name in section.about["slots"]],
    }


def _fill(parts: dict[str, str]) -> str:
    """Put parts in their places; what a part contains is not looked at again."""
    first, *rest = _file("template.html").split("{{")
    filled = [first]
    for piece in rest:
        name, after = piece.split("}}", 1)
        filled += [parts[name], after]
    return "".join(filled)


def _file(name: str) -> str:
    return resources.files("paceline.tools.report").joinpath("page", name).read_text("utf-8")


def _json(data: Any) -> str:
    """As it may stand inside a script: no name can end it."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
