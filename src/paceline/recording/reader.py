"""Reads recordings: the files that the ranks of a run have written into a folder."""

import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecordingError
from paceline.recording.audit_file import audit_files
from paceline.recording.description import check_description, parse_description
from paceline.recording.files import open_file, read_file
from paceline.recording.healings import healings_file
from paceline.recording.ledger import ledger_files
from paceline.recording.recorder import PLANS_PER_GENERATION
from paceline.recording.ring_buffer import MAGIC, Header
from paceline.recording.rows import VERSION, SumColumn, row_width

# With few digits, because a number of thousands of digits cannot be converted.
_NAME = re.compile(r"rank(\d{1,18})-wrapper(\d{1,18})-plan(\d{1,18})\.json", re.ASCII)


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
    paths = _descriptions(folder)
    if not paths:
        raise RecordingError(
            f"there is no recording in the folder ({folder}); record one with `paceline run --record "
            f"{folder} script.py`, or with PACELINE_RECORD={folder} in the environment of the ranks"
        )
    recordings = [read_plan(path) for path in paths]
    return sorted(recordings, key=lambda each: (each.rank, each.wrapper, each.plan))


def delete_recording(folder: Path) -> None:
    """Delete what ranks have recorded in a folder, and no other files."""
    if not folder.is_dir():
        return
    descriptions = _descriptions(folder)
    rows = [path.with_suffix(".rows") for path in descriptions]
    of_processes = [*audit_files(folder), *ledger_files(folder)]
    for path in (*descriptions, *rows, *of_processes, healings_file(folder)):
        if path.is_symlink() or not path.is_dir():  # of a link, the link itself is deleted
            path.unlink(missing_ok=True)


def read_latest(folder: Path, *, rows: int, of_all: int = 0) -> list[PlanRecording]:
    """Of each rank and wrapper, the last rows of the current plan, without sums; quick, for use in a run.

    Ranks that are no more in the run, since its last generation began, are left out.

    Args:
        folder: where the recordings are.
        rows: how many rows of each.
        of_all: more than that, if these are not more than so many rows together.
    """
    newest: dict[tuple[int, int], tuple[int, Path]] = {}
    for path in _descriptions(folder):
        rank, wrapper, plan = _numbers(path)
        newest[rank, wrapper] = max(newest.get((rank, wrapper), (-1, path)), (plan, path))
    rows = max(rows, of_all // max(1, len(newest)))
    generation = max((plan // PLANS_PER_GENERATION for plan, _ in newest.values()), default=0)
    return [
        read_plan(path, rows=rows)
        for plan, path in newest.values()
        if plan // PLANS_PER_GENERATION == generation
    ]


def _descriptions(folder: Path) -> list[Path]:
    """The paths of the descriptions in a folder; none if it is no folder."""
    try:
        return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RecordingError(f"the folder cannot be read ({folder}: {error})") from error


def _numbers(path: Path) -> tuple[int, int, int]:
    """The rank, the wrapper and the plan that a description's name tells."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    rank, wrapper, plan = map(int, match.groups())
    return rank, wrapper, plan


def read_plan(path: Path, *, rows: int | None = None) -> PlanRecording:
    """The recording of one plan, or its last rows only.

    Args:
        path: the path of its description.
        rows: at most how many rows; None for all rows, and the sums.

    Raises:
        RecordingError: the description or the rows cannot be read, whatever is in the files.
    """
    description = _read_description(path)
    data = path.with_suffix(".rows")
    try:
        file = open_file(data)
        try:
            return _parse(description, _Cells(file), rows)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise RecordingError(f"the recording is damaged ({data}: {error})") from error


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description = parse_description(read_file(path))
    except (OSError, ValueError) as error:
        raise RecordingError(f"the file is not the description of a recording ({path}: {error})") from error
    if description["version"] != VERSION:
        raise RecordingError(
            f"the recording was written by another version of paceline (recording's format: "
            f"{description['version']}, format that this version reads: {VERSION}, file: {path})"
        )
    try:
        check_description(description)
        if tuple(description[name] for name in ("rank", "wrapper", "plan")) != _numbers(path):
            raise ValueError("it is of another rank, wrapper or plan than its name says")
    except ValueError as error:
        raise RecordingError(f"the recording is damaged ({path}: {error})") from error
    return description


class _Cells:
    """The 64-bit numbers of a file, of which only the slices asked for are read."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.nbytes = os.fstat(file).st_size

    def __getitem__(self, cells: slice) -> list[int]:
        numbers = array("q")
        start, end = 8 * cells.start, 8 * cells.stop
        content = os.pread(self._file, end - start, start)
        if len(content) < end - start:
            raise ValueError(f"truncated after {self.nbytes} bytes")
        numbers.frombytes(content)
        return numbers.tolist()


def _parse(description: dict[str, Any], cells: _Cells, most: int | None) -> PlanRecording:
    header = cells[0 : len(Header)]
    if header[Header.MAGIC] != MAGIC or header[Header.VERSION] != VERSION:
        raise ValueError("bad header")
    columns, capacity, written = header[Header.COLUMNS], header[Header.CAPACITY], header[Header.ROWS]
    sums, sum_capacity = header[Header.SUMS], header[Header.SUM_CAPACITY]
    if not 0 <= sums <= sum_capacity or capacity <= 0 or written < 0:
        raise ValueError("bad header")
    rows_at = len(Header) + sum_capacity * len(SumColumn)
    expected = 8 * (rows_at + capacity * columns)
    if columns != row_width(len(description["buckets"])) or cells.nbytes != expected:
        raise ValueError(f"truncated, or of another plan ({cells.nbytes} bytes)")
    first = max(0, written - (capacity if most is None else min(most, capacity)))
    rows = _records(cells, rows_at, columns, [number % capacity for number in range(first, written)])
    blocks = _records(cells, len(Header), len(SumColumn), range(sums if most is None else 0))
    return PlanRecording(description, rows, blocks, written)


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
