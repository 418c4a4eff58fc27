"""Rows in bounded memory: the last steps in detail, and sums over all steps.

Note [A file that outlives its writer]. With a folder, the memory is a mapped file: what was written survives
even if the process is killed, and other processes can read it meanwhile. The number of rows is written after
each row, so a reader never takes a half-written row for a whole one.

The file is a sequence of 64-bit numbers in the machine's byte order:

    header: as ``Header`` lists it
    sums: each of a block of steps; when they are full, neighbours are added together
    rows: when they are full, the oldest is overwritten

Note [Disk space is reserved in pieces]. Writing to a mapped page for which the disk has no space would kill
the process, so disk space is reserved before it is written to. It is reserved as rows come, because many
recordings stay short. When the disk is full, the rows that fitted become the whole ring.
"""

import enum
import mmap
import os
import weakref
from array import array
from pathlib import Path

from paceline.recording.files import new_file
from paceline.recording.rows import VERSION, SumColumn, add_sums

MAGIC = int.from_bytes(b"PACELINE", "little") >> 1
_BYTES_OF_ROWS = 4 << 20
_FEWEST_ROWS = 16
_SUMS = 2048
_RESERVED_AT_ONCE = 64 << 10


class Header(enum.IntEnum):
    """The numbers that a file begins with."""

    MAGIC = 0
    VERSION = enum.auto()
    COLUMNS = enum.auto()
    CAPACITY = enum.auto()
    ROWS = enum.auto()
    SUM_CAPACITY = enum.auto()
    SUMS = enum.auto()
    STEPS_PER_SUM = enum.auto()


class RingBuffer:
    """Stores rows of equal width.

    Args:
        columns: how many numbers a row has.
        path: the file to map; None for memory of this process.
    """

    def __init__(self, columns: int, path: Path | None) -> None:
        self._columns = columns
        self._capacity = max(_FEWEST_ROWS, _BYTES_OF_ROWS // (8 * columns))
        self._rows_at = len(Header) + _SUMS * len(SumColumn)
        self._rows = 0
        self._sums = 0
        self._steps_per_sum = 1
        self._last_sum: list[int] = []
        self._file = -1
        self._reserved = 0
        if path is None:
            self._reserved = self._nbytes
            self._map()
        else:
            # A new file, because another process may still have an older one of that name mapped.
            with new_file(path) as file:
                self._map_file(file)

    def append(self, row: list[int], sums: list[int]) -> None:
        """Store a row, and add what it contributes to the sums."""
        start = self._next_row()
        if 8 * (start + self._columns) > self._reserved:
            try:
                self._reserve(8 * (start + self._columns))
            except OSError:
                self._stop_growing()
                start = self._next_row()
        self._cells[start : start + self._columns] = array("q", row)
        self._add_to_sums(sums)
        self._rows += 1
        self._cells[Header.ROWS] = self._rows

    def content(self) -> bytes:
        """The bytes that a file of it has."""
        return self._memory[: self._nbytes]

    def _map_file(self, file: int) -> None:
        self._file = os.dup(file)
        weakref.finalize(self, os.close, self._file)
        self._reserve(8 * (self._rows_at + self._columns))
        os.truncate(self._file, self._nbytes)
        self._map()

    def _map(self) -> None:
        self._memory = mmap.mmap(self._file, self._nbytes)
        self._cells = memoryview(self._memory).cast("q")
        header = [MAGIC, VERSION, self._columns, self._capacity, 0, _SUMS, 0, 1]
        self._cells[: len(Header)] = array("q", header)

    @property
    def _nbytes(self) -> int:
        return 8 * (self._rows_at + self._capacity * self._columns)

    def _next_row(self) -> int:
        return self._rows_at + self._rows % self._capacity * self._columns

    def _reserve(self, nbytes: int) -> None:
        """Reserve disk space for that many bytes, rounded up."""
        end = min(self._nbytes, -(-nbytes // _RESERVED_AT_ONCE) * _RESERVED_AT_ONCE)
        os.posix_fallocate(self._file, self._reserved, end - self._reserved)
        self._reserved = end

    def _stop_growing(self) -> None:
        """Reduce the capacity to the rows that are there; the next row overwrites the oldest."""
        self._capacity = self._rows
        self._cells[Header.CAPACITY] = self._capacity
        os.truncate(self._file, self._nbytes)

    def _add_to_sums(self, sums: list[int]) -> None:
        if self._sums and self._last_sum[SumColumn.STEPS] < self._steps_per_sum:
            add_sums(self._last_sum, sums)
            self._put_sum(self._sums - 1, self._last_sum)
            return
        if self._sums == _SUMS:
            self._halve_sums()
        self._last_sum = sums
        self._put_sum(self._sums, sums)
        self._sums += 1
        self._cells[Header.SUMS] = self._sums

    def _halve_sums(self) -> None:
        """Add neighbours together, so that each sum covers twice as many steps."""
        for index in range(_SUMS // 2):
            both, second = self._get_sum(2 * index), self._get_sum(2 * index + 1)
            add_sums(both, second)
            self._put_sum(index, both)
        self._sums = _SUMS // 2
        self._steps_per_sum *= 2
        self._cells[Header.SUMS] = self._sums
        self._cells[Header.STEPS_PER_SUM] = self._steps_per_sum

    def _get_sum(self, index: int) -> list[int]:
        start = len(Header) + index * len(SumColumn)
        return self._cells[start : start + len(SumColumn)].tolist()

    def _put_sum(self, index: int, sums: list[int]) -> None:
        start = len(Header) + index * len(SumColumn)
        self._cells[start : start + len(SumColumn)] = array("q", sums)
