"""Reads recordings back."""

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecordingError
from paceline.recording.ring import MAGIC, Head
from paceline.recording.rows import VERSION, Sum, width

_NAME = re.compile(r"rank(\d+)-wrapper(\d+)-plan(\d+)\.json")


@dataclass(frozen=True)
class Chapter:
    """The rows of one plan of one wrapper on one rank.

    Attributes:
        about: what is in the file beside them: the keys are those of ``recording.chapter``'s About and Plan,
            and ``plan``, ``unit``, ``host``, ``boot``, ``pid``, ``epoch``.
        rows: the last steps, oldest first; see ``Column`` and ``BucketColumn``.
        sums: all steps, so many together; see ``Sum``.
        written: how many rows there were in all.
    """

    about: dict[str, Any]
    rows: Sequence[Sequence[int]]
    sums: Sequence[Sequence[int]]
    written: int

    @property
    def rank(self) -> int:
        """Of the process."""
        return int(self.about["rank"])

    @property
    def wrapper(self) -> int:
        """Its number in the process."""
        return int(self.about["wrapper"])

    @property
    def plan(self) -> int:
        """Its number among the wrapper's."""
        return int(self.about["plan"])


def read(folder: Path) -> list[Chapter]:
    """What the ranks have recorded in a folder, by rank, wrapper and plan.

    Raises:
        RecordingError: there is nothing, or something that cannot be read.
    """
    if not folder.is_dir():
        raise RecordingError(f"there is no such folder ({folder})")
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    if not found:
        raise RecordingError(
            f"there is no recording in the folder ({folder}); record one with `paceline run --record "
            f"{folder} script.py`, or with PACELINE_RECORD={folder} in the environment of the ranks"
        )
    chapters = [read_chapter(path) for path in found]
    return sorted(chapters, key=lambda each: (each.rank, each.wrapper, each.plan))


def read_chapter(path: Path) -> Chapter:
    """One of them, by the path of its description."""
    try:
        about = json.loads(path.read_text())
        version = about["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordingError(f"this is not what a rank has written ({path}: {error})") from error
    if version != VERSION:
        raise RecordingError(
            f"the recording is of another version of paceline (its: {version}, this one reads: {VERSION}, "
            f"file: {path})"
        )
    rows = path.with_suffix(".rows")
    try:
        return _chapter(about, rows)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise RecordingError(f"the recording is damaged ({rows}: {error})") from error


def _chapter(about: dict[str, Any], path: Path) -> Chapter:
    cells = array("q")
    content = path.read_bytes()
    if len(content) % cells.itemsize or len(content) < len(Head) * cells.itemsize:
        raise ValueError(f"it is cut off after {len(content)} bytes")
    cells.frombytes(content)
    head = cells[: len(Head)]
    if head[Head.MAGIC] != MAGIC or head[Head.VERSION] != VERSION:
        raise ValueError("it does not begin as it should")
    columns, capacity, written = head[Head.COLUMNS], head[Head.CAPACITY], head[Head.ROWS]
    sums_at = len(Head) + capacity * columns
    if columns != width(len(about["buckets"])) or len(cells) != sums_at + head[Head.SUM_CAPACITY] * len(Sum):
        raise ValueError(f"it is cut off, or of another plan ({len(content)} bytes)")
    rows = [
        cells[start : start + columns].tolist()
        for number in range(max(0, written - capacity), written)
        for start in [len(Head) + number % capacity * columns]
    ]
    sums = [
        cells[start : start + len(Sum)].tolist()
        for start in range(sums_at, sums_at + head[Head.SUMS] * len(Sum), len(Sum))
    ]
    return Chapter(about, rows, sums, written)
