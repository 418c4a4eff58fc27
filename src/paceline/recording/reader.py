"""Reads recordings: the files that the ranks of a run have written into a folder."""

import json
import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import RecordingError
from paceline.recording.ring_buffer import MAGIC, Header
from paceline.recording.rows import VERSION, SumColumn, row_width

_NAME = re.compile(r"rank(\d+)-wrapper(\d+)-plan(\d+)\.json")


@dataclass(frozen=True)
class PlanRecording:
    """The rows of one bucket plan of one wrapper on one rank.

    Attributes:
        description: the JSON file beside the rows. Its keys are the fields of ``WrapperDescription`` and
            ``PlanDescription``, and ``plan``, ``unit``, ``host``, ``boot``, ``pid``, ``epoch``.
        rows: the last steps, oldest first; see ``StepColumn`` and ``BucketColumn``.
        sums: sums over blocks of all steps; see ``SumColumn``.
        written: how many steps the plan had in all.
    """

    description: dict[str, Any]
    rows: Sequence[Sequence[int]]
    sums: Sequence[Sequence[int]]
    written: int

    @property
    def rank(self) -> int:
        """The global rank of the process."""
        return int(self.description["rank"])

    @property
    def wrapper(self) -> int:
        """The number of the wrapper in the process."""
        return int(self.description["wrapper"])

    @property
    def plan(self) -> int:
        """The number of the plan among the wrapper's plans."""
        return int(self.description["plan"])


def read_recording(folder: Path) -> list[PlanRecording]:
    """All that the ranks have recorded in a folder, sorted by rank, wrapper and plan.

    Raises:
        RecordingError: there is no recording, or it cannot be read.
    """
    if not folder.is_dir():
        raise RecordingError(f"there is no such folder ({folder})")
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    if not paths:
        raise RecordingError(
            f"there is no recording in the folder ({folder}); record one with `paceline run --record "
            f"{folder} script.py`, or with PACELINE_RECORD={folder} in the environment of the ranks"
        )
    recordings = [read_plan(path) for path in paths]
    return sorted(recordings, key=lambda each: (each.rank, each.wrapper, each.plan))


def delete_recording(folder: Path) -> None:
    """Delete what ranks have recorded in a folder, and no other files."""
    for path in folder.glob("rank*.json"):
        if _NAME.fullmatch(path.name):
            path.unlink()
            path.with_suffix(".rows").unlink(missing_ok=True)


def read_latest(folder: Path, *, rows: int) -> list[PlanRecording]:
    """Of each rank and wrapper, the last rows of the current plan, without sums; quick, for use in a run."""
    newest: dict[tuple[str, str], tuple[int, Path]] = {}
    for path in folder.glob("rank*.json"):
        if match := _NAME.fullmatch(path.name):
            rank, wrapper, plan = match.groups()
            newest[rank, wrapper] = max(newest.get((rank, wrapper), (-1, path)), (int(plan), path))
    return [read_plan(path, rows=rows) for _, path in newest.values()]


def read_plan(path: Path, *, rows: int | None = None) -> PlanRecording:
    """The recording of one plan, or its last rows only.

    Args:
        path: the path of its description.
        rows: at most how many rows; None for all rows, and the sums.
    """
    try:
        description = json.loads(path.read_text())
        version = description["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordingError(f"the file is not the description of a recording ({path}: {error})") from error
    if version != VERSION:
        raise RecordingError(
            f"the recording was written by another version of paceline (recording's format: {version}, "
            f"format that this version reads: {VERSION}, file: {path})"
        )
    data = path.with_suffix(".rows")
    try:
        with data.open("rb") as file:
            return _parse(description, _Cells(file), rows)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise RecordingError(f"the recording is damaged ({data}: {error})") from error


class _Cells:
    """The 64-bit numbers of a file, of which only the slices asked for are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes = os.fstat(file.fileno()).st_size

    def __getitem__(self, cells: slice) -> list[int]:
        numbers = array("q")
        start, end = 8 * cells.start, 8 * cells.stop
        content = os.pread(self._file.fileno(), end - start, start)
        if len(content) < end - start:
            raise ValueError(f"truncated after {self.nbytes} bytes")
        numbers.frombytes(content)
        return numbers.tolist()


def _parse(description: dict[str, Any], cells: _Cells, most: int | None) -> PlanRecording:
    for name in ("rank", "wrapper", "plan"):
        int(description[name])
    header = cells[0 : len(Header)]
    if header[Header.MAGIC] != MAGIC or header[Header.VERSION] != VERSION:
        raise ValueError("bad header")
    columns, capacity, written = header[Header.COLUMNS], header[Header.CAPACITY], header[Header.ROWS]
    rows_at = len(Header) + header[Header.SUM_CAPACITY] * len(SumColumn)
    expected = 8 * (rows_at + capacity * columns)
    if columns != row_width(len(description["buckets"])) or cells.nbytes != expected:
        raise ValueError(f"truncated, or of another plan ({cells.nbytes} bytes)")
    if not 0 <= header[Header.SUMS] <= header[Header.SUM_CAPACITY] or written < 0:
        raise ValueError("bad header")
    first = max(0, written - (capacity if most is None else min(most, capacity)))
    rows = _records(cells, rows_at, columns, [number % capacity for number in range(first, written)])
    sums = _records(cells, len(Header), len(SumColumn), range(header[Header.SUMS] if most is None else 0))
    return PlanRecording(description, rows, sums, written)


def _records(cells: _Cells, start: int, width: int, indices: Sequence[int]) -> list[list[int]]:
    """Records of equal width, by their indices, which are consecutive but may wrap around to 0 once."""
    if not indices:
        return []
    wrap = indices.index(0) if 0 in indices else 0
    records = []
    for consecutive in (indices[:wrap], indices[wrap:]):
        if consecutive:
            flat = cells[start + consecutive[0] * width : start + (consecutive[-1] + 1) * width]
            records += [flat[at : at + width] for at in range(0, len(flat), width)]
    return records
