"""What each rank notes for the others of a collective that it launches: what it is, and where its part is.

A note is written before the rank says that the first piece is here, and read after that was heard. One more
is kept for why a rank broke off, and is written before that is said.
"""

import ctypes
import struct
from typing import NamedTuple

# So many collectives can be in flight.
NOTES = 256
_NOTE = struct.Struct("<qq112s")


class Note(NamedTuple):
    """A rank's note.

    Attributes:
        offset: where in the segment its part begins, or its areas do.
        area: in which of its areas the first piece is, counted on from the channel's beginning; IN_PLACE if
            its part is one stretch.
        text: what it takes the collective for.
    """

    offset: int
    area: int
    text: bytes


IN_PLACE = -1


class Notes:
    """The notes of all ranks.

    Args:
        address: where they are.
        size: how many ranks there are.
    """

    def __init__(self, address: int, size: int) -> None:
        self._memory = (ctypes.c_ubyte * notes_bytes(size)).from_address(address)

    def write(self, rank: int, number: int, note: Note) -> None:
        """Leave a rank's note on the collective of a number."""
        _NOTE.pack_into(self._memory, _place(rank, number), *note)

    def read(self, rank: int, number: int) -> Note:
        """A rank's note on the collective of a number."""
        return Note(*_NOTE.unpack_from(self._memory, _place(rank, number)))

    def write_why(self, rank: int, why: str) -> None:
        """Leave word of why a rank broke off."""
        _NOTE.pack_into(self._memory, _why_place(rank), 0, 0, as_text(why))

    def read_why(self, rank: int) -> str:
        """Why a rank broke off."""
        return as_words(_NOTE.unpack_from(self._memory, _why_place(rank))[2])


def notes_bytes(size: int) -> int:
    """How much memory the notes of so many ranks take."""
    return _place(size, 0)


def as_text(text: str) -> bytes:
    """Words as they are noted."""
    return text.encode()[:112].ljust(112, b"\0")


def as_words(text: bytes) -> str:
    """The opposite."""
    return text.rstrip(b"\0").decode(errors="replace")


def _place(rank: int, number: int) -> int:
    return (rank * (NOTES + 1) + number % NOTES) * _NOTE.size


def _why_place(rank: int) -> int:
    return (rank * (NOTES + 1) + NOTES) * _NOTE.size
