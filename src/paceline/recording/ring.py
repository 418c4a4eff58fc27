"""Rows in bounded memory: the last ones whole, and all of them in sums.

Note [A file that outlives its writer]. Where there is a folder, the memory is a file's, mapped: what was
written is there even if the process is killed, and others can read it meanwhile. A row counts once it is
whole, because the number of rows is written after it.

The file is a sequence of 64-bit numbers in the machine's order:

    magic, version, columns, capacity of rows, rows written, capacity of sums, sums used, steps a sum
    rows, the oldest overwritten first
    sums, each of so many steps; if they are full, each takes in its neighbour
"""

import enum
import mmap
import os
from array import array
from pathlib import Path

from paceline.recording.rows import VERSION, Sum, add

MAGIC = int.from_bytes(b"PACELINE", "little") >> 1
_BYTES_OF_ROWS = 4 << 20
_FEWEST_ROWS = 16
_SUMS = 2048


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
        self._sums_at = len(Head) + self._capacity * columns
        self._memory = _memory(8 * (self._sums_at + _SUMS * len(Sum)), path)
        self._cells = memoryview(self._memory).cast("q")
        self._cells[: len(Head)] = array("q", [MAGIC, VERSION, columns, self._capacity, 0, _SUMS, 0, 1])
        self._rows = 0
        self._sums = 0
        self._steps_a_sum = 1
        self._last: list[int] = []

    def append(self, row: list[int], sums: list[int]) -> None:
        """Take in a row, and its part in the sums."""
        start = len(Head) + self._rows % self._capacity * self._columns
        self._cells[start : start + self._columns] = array("q", row)
        self._add(sums)
        self._rows += 1
        self._cells[Head.ROWS] = self._rows

    def content(self) -> bytes:
        """All of it, as a file has it."""
        return bytes(self._memory)

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
        start = self._sums_at + place * len(Sum)
        return self._cells[start : start + len(Sum)].tolist()

    def _put(self, place: int, sums: list[int]) -> None:
        start = self._sums_at + place * len(Sum)
        self._cells[start : start + len(Sum)] = array("q", sums)


def _memory(nbytes: int, path: Path | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, nbytes)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        # Now, because to write to a page that the disk has no room for would kill the process.
        os.posix_fallocate(file, 0, nbytes)
        return mmap.mmap(file, nbytes)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
