"""Rows in bounded memory: the last ones whole, and all of them in sums.

Note [A file that outlives its writer]. Where there is a folder, the memory is a file's, mapped: what was
written is there even if the process is killed, and others can read it meanwhile. A row counts once it is
whole, because the number of rows is written after it.

The file is a sequence of 64-bit numbers in the machine's order:

    magic, version, columns, capacity of rows, rows written, capacity of sums, sums used, steps a sum
    sums, each of so many steps; if they are full, each takes in its neighbour
    rows, the oldest overwritten first

Note [Reserved bit by bit]. To write to a page that the disk has no room for would kill the process, so pages
are reserved before; as rows come, because many recordings stay short. Where there is no more room, the rows
that fit are written over from the first one on.
"""

import enum
import mmap
import os
import weakref
from array import array
from pathlib import Path

from paceline.recording.rows import VERSION, Sum, add

MAGIC = int.from_bytes(b"PACELINE", "little") >> 1
_BYTES_OF_ROWS = 4 << 20
_FEWEST_ROWS = 16
_SUMS = 2048
_AT_ONCE = 64 << 10


class Head(enum.IntEnum):
    """What a file begins with."""

    MAGIC = 0
    VERSION = enum.auto()
    COLUMNS = enum.auto()
    CAPACITY = enum.auto()
    ROWS = enum.auto()
    SUM_CAPACITY = enum.auto()
    SUMS = enum.auto()
    STEPS_A_SUM = enum.auto()


class Ring:
    """Takes rows in.

    Args:
        columns: how many numbers a row has.
        path: where to keep it; memory of its own if None.
    """

    def __init__(self, columns: int, path: Path | None) -> None:
        self._columns = columns
        self._capacity = max(_FEWEST_ROWS, _BYTES_OF_ROWS // (8 * columns))
        self._rows_at = len(Head) + _SUMS * len(Sum)
        self._file = -1 if path is None else self._open(path)
        self._reserved = self._nbytes if path is None else 0
        if path is not None:
            self._reserve(8 * (self._rows_at + columns))
            os.truncate(self._file, self._nbytes)
        self._memory = mmap.mmap(self._file, self._nbytes)
        self._cells = memoryview(self._memory).cast("q")
        self._cells[: len(Head)] = array("q", [MAGIC, VERSION, columns, self._capacity, 0, _SUMS, 0, 1])
        self._rows = 0
        self._sums = 0
        self._steps_a_sum = 1
        self._last: list[int] = []

    def append(self, row: list[int], sums: list[int]) -> None:
        """Take in a row, and its part in the sums."""
        start = self._start()
        if 8 * (start + self._columns) > self._reserved:
            try:
                self._reserve(8 * (start + self._columns))
            except OSError:
                self._stay_as_long()
                start = self._start()
        self._cells[start : start + self._columns] = array("q", row)
        self._add(sums)
        self._rows += 1
        self._cells[Head.ROWS] = self._rows

    def _open(self, path: Path) -> int:
        """A new file, whoever still reads an older one."""
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        weakref.finalize(self, os.close, file)
        return file

    @property
    def _nbytes(self) -> int:
        return 8 * (self._rows_at + self._capacity * self._columns)

    def _start(self) -> int:
        return self._rows_at + self._rows % self._capacity * self._columns

    def _reserve(self, nbytes: int) -> None:
        """Have room on the disk for so much, and some more."""
        end = min(self._nbytes, -(-nbytes // _AT_ONCE) * _AT_ONCE)
        os.posix_fallocate(self._file, self._reserved, end - self._reserved)
        self._reserved = end

    def _stay_as_long(self) -> None:
        """Hold no more rows than there are."""
        self._capacity = self._rows
        self._cells[Head.CAPACITY] = self._capacity
        os.truncate(self._file, self._nbytes)

    def content(self) -> bytes:
        """All of it, as a file has it."""
        return self._memory[: self._nbytes]

    def _add(self, sums: list[int]) -> None:
        if self._sums and self._last[Sum.STEPS] < self._steps_a_sum:
            add(self._last, sums)
            self._put(self._sums - 1, self._last)
            return
        if self._sums == _SUMS:
            self._join_neighbours()
        self._last = sums
        self._put(self._sums, sums)
        self._sums += 1
        self._cells[Head.SUMS] = self._sums

    def _join_neighbours(self) -> None:
        for place in range(_SUMS // 2):
            both, second = self._get(2 * place), self._get(2 * place + 1)
            add(both, second)
            self._put(place, both)
        self._sums = _SUMS // 2
        self._steps_a_sum *= 2
        self._cells[Head.SUMS] = self._sums
        self._cells[Head.STEPS_A_SUM] = self._steps_a_sum

    def _get(self, place: int) -> list[int]:
        start = len(Head) + place * len(Sum)
        return self._cells[start : start + len(Sum)].tolist()

    def _put(self, place: int, sums: list[int]) -> None:
        start = len(Head) + place * len(Sum)
        self._cells[start : start + len(Sum)] = array("q", sums)
