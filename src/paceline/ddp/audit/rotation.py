"""Which bytes of a replica are looked at in which step: everything within 16 steps, and as much in each."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

PARTS = 16
# Tensors up to this size are looked at whole, many at a time.
SMALL_BYTES = 64 * 1024
# What a look costs, in bytes that could be read meanwhile: measured, rounded, and the same on every rank.
_PER_SMALL, _PER_SMALL_BYTE = 8 * 1024, 2
_PER_PIECE = 256 * 1024
# So that a small model is looked at in a few of the steps, each of which costs something by itself.
_PER_PART = 2 * 1024 * 1024
_LEAST_PIECE = 256 * 1024
# So that the bytes of a piece are whole words.
_ALIGNMENT = 64


class Piece(NamedTuple):
    """Some bytes of a tensor."""

    tensor: int
    start: int
    stop: int


def plan_rotation(sizes: Sequence[int]) -> list[list[Piece]]:
    """Deal the bytes of tensors out to parts that cost about the same; each byte is in one part.

    Args:
        sizes: the bytes of each tensor.
    """
    parts = _Parts((sum(map(_cost, sizes)) + PARTS * _PER_PART) / PARTS)
    for tensor, size in enumerate(sizes):
        if size <= SMALL_BYTES:
            parts.add(Piece(tensor, 0, size))
            continue
        start = 0
        while start < size:
            stop = _end_of_piece(start, size, parts.room_for_bytes())
            parts.add(Piece(tensor, start, stop))
            start = stop
    return parts.pieces


class _Parts:
    def __init__(self, share: float) -> None:
        self.pieces: list[list[Piece]] = [[]]
        self._share = share
        self._room = share

    def add(self, piece: Piece) -> None:
        if self._room <= 0:
            self._begin_next()
        self.pieces[-1].append(piece)
        self._room -= _cost(piece.stop - piece.start)

    def room_for_bytes(self) -> float:
        """How many bytes of a large tensor fit; begins another part if a piece would be too short."""
        if self._room < _PER_PIECE + _LEAST_PIECE:
            self._begin_next()
        return self._room - _PER_PIECE

    def _begin_next(self) -> None:
        if len(self.pieces) < PARTS:
            self.pieces.append([])
            self._room += self._share
        if len(self.pieces) == PARTS:
            self._room = inf  # the last part takes what is left


def _cost(size: int) -> int:
    return _PER_SMALL + _PER_SMALL_BYTE * size if size <= SMALL_BYTES else _PER_PIECE + size


def _end_of_piece(start: int, size: int, room: float) -> int:
    """Where to cut a tensor so that a piece fits the room, and what is left of it is not too short."""
    if size - start <= room + _LEAST_PIECE:
        return size
    return start + int(max(room, _LEAST_PIECE)) // _ALIGNMENT * _ALIGNMENT
