"""Reads recordings back."""

import json
import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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


def forget(folder: Path) -> None:
    """Remove what ranks have recorded in a folder, and nothing else."""
    for path in folder.glob("rank*.json"):
        if _NAME.fullmatch(path.name):
            path.unlink()
            path.with_suffix(".rows").unlink(missing_ok=True)


def latest(folder: Path, *, rows: int) -> list[Chapter]:
    """Of each rank and wrapper the plan in force: its last rows, without sums; quick, and while they run."""
    newest: dict[tuple[str, str], tuple[int, Path]] = {}
    for path in folder.glob("rank*.json"):
        if found := _NAME.fullmatch(path.name):
            rank, wrapper, plan = found.groups()
            newest[rank, wrapper] = max(newest.get((rank, wrapper), (-1, path)), (int(plan), path))
    return [read_chapter(path, rows=rows) for _, path in newest.values()]


def read_chapter(path: Path, *, rows: int | None = None) -> Chapter:
    """One of them, by the path of its description; or only its last rows."""
    try:
        about = json.loads(path.read_text())
        version = about["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordingError(f"this is not what a rank has written ({path}: {error})") from error
    if version != VERSION:
        raise RecordingError(
            f"the recording is of another version of paceline (its: {version}, this one reads: {VERSION}, "
            f"file: {path})"
        )
    data = path.with_suffix(".rows")
    try:
        with data.open("rb") as file:
            return _chapter(about, _Cells(file), rows)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise RecordingError(f"the recording is damaged ({data}: {error})") from error


class _Cells:
    """The numbers in a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes = os.fstat(file.fileno()).st_size

    def __getitem__(self, part: slice) -> list[int]:
        cells = array("q")
        start, end = 8 * part.start, 8 * part.stop
        content = os.pread(self._file.fileno(), end - start, start)
        if len(content) < end - start:
            raise ValueError(f"it is cut off after {self.nbytes} bytes")
        cells.frombytes(content)
        return cells.tolist()


def _chapter(about: dict[str, Any], cells: _Cells, most: int | None) -> Chapter:
    for name in ("rank", "wrapper", "plan"):
        int(about[name])
    head = cells[0 : len(Head)]
    if head[Head.MAGIC] != MAGIC or head[Head.VERSION] != VERSION:
        raise ValueError("it does not begin as it should")
    columns, capacity, written = head[Head.COLUMNS], head[Head.CAPACITY], head[Head.ROWS]
    rows_at = len(Head) + head[Head.SUM_CAPACITY] * len(Sum)
    wanted = 8 * (rows_at + capacity * columns)
    if columns != width(len(about["buckets"])) or cells.nbytes != wanted:
        raise ValueError(f"it is cut off, or of another plan ({cells.nbytes} bytes)")
    if not 0 <= head[Head.SUMS] <= head[Head.SUM_CAPACITY] or written < 0:
        raise ValueError("it does not begin as it should")
    first = max(0, written - (capacity if most is None else min(most, capacity)))
    rows = _cut(cells, rows_at, columns, [number % capacity for number in range(first, written)])
    sums = _cut(cells, len(Head), len(Sum), range(head[Head.SUMS] if most is None else 0))
    return Chapter(about, rows, sums, written)


def _cut(cells: _Cells, start: int, width: int, places: Sequence[int]) -> list[list[int]]:
    """The pieces of a part of the file at these places, which run on or begin anew once."""
    if not places:
        return []
    wrap = places.index(0) if 0 in places else 0
    pieces = []
    for run in (places[:wrap], places[wrap:]):
        if run:
            flat = cells[start + run[0] * width : start + (run[-1] + 1) * width]
            pieces += [flat[at : at + width] for at in range(0, len(flat), width)]
    return pieces
