"""One rank's part in one collective: what all kinds have in common, its header, and its chunks in memory.

A collective goes in chunks. A chunk is either part of a tensor that lives in shared memory, or it is copied
to one of the rank's staging buffers.

Each rank writes a header for each collective that it launches: what it is, and where the rank's part is. It
writes it before it signals that the first chunk is ready, and others read it after they got that signal. One
more header per rank is for the reason why the rank failed, and is written before the rank signals that.
"""

import ctypes
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

import torch
from torch import Tensor

from paceline.comm.pending import Pending
from paceline.comm.shm.arena import Span
from paceline.comm.shm.segment import CHUNK_BYTES, Segment
from paceline.errors import CollectiveError

# Each rank has this many staging buffers per channel, each for one chunk.
STAGING_BUFFERS = 4
STAGING_BYTES = STAGING_BUFFERS * CHUNK_BYTES
# This many collectives can be in flight in a channel.
MAX_IN_FLIGHT = 256
IN_PLACE = -1
_HEADER = struct.Struct("<qq112s")


class Until(Enum):
    """How far a chunk must have come: see Note [Over and done] in stages.py."""

    READY = auto()
    HAS_RESULT = auto()
    OVER = auto()
    ALL_DONE = auto()


class Collective(ABC):
    """One rank's part in one collective.

    Attributes:
        text: what it is, the same on every rank.
        chunks: the number of its chunks, the same on every rank.
        span: where this rank's tensor is in shared memory; None if it has to be copied to staging buffers.
        until: how far its chunks must have come when a rank has waited for it.
        has_slices: whether ``reduce_slice`` is called instead of ``exchange``, by any rank for any slice; the
            same on every rank. See Note [Help] in claims.py.
    """

    text: str
    chunks: int = 1
    span: Span | None = None
    until: Until = Until.HAS_RESULT
    has_slices: bool = False

    @abstractmethod
    def nbytes(self, chunk: int, rank: int) -> int:
        """The length of a rank's part of a chunk."""

    def copy_in(self, chunk: int, views: "Launched") -> None:  # noqa: B027  # if there is nothing to copy
        """Copy this rank's part of a chunk to its staging buffer."""

    def exchange(self, chunk: int, views: "Launched") -> Pending | None:  # noqa: B027  # as above
        """All ranks are ready: read what they have. Returns the reduction between hosts, if it takes one."""

    def reduce_slice(self, chunk: int, views: "Launched", rank: int) -> None:  # noqa: B027  # as above
        """All ranks are ready: combine a rank's slice of all tensors, and write it to all of them."""

    def distribute(self, chunk: int, views: "Launched") -> None:  # noqa: B027  # as above
        """The reduction between hosts is over too: give its result to the other ranks of this host."""

    def copy_out(self, chunk: int, views: "Launched") -> None:  # noqa: B027  # as above
        """All ranks are done: copy the result from this rank's staging buffer."""


@dataclass(slots=True)
class Launched:
    """A collective that has been launched, and its chunks in the memory of all ranks.

    Attributes:
        segment: the memory.
        collective: the collective; None once this rank has nothing more to do in it, so that it lets go of
            its tensors.
        text: what it is.
        until: how far its chunks must have come when a rank has waited for it.
        number: its number among the channel's collectives.
        first: the number of its first chunk among all chunks of the channel.
        end: the number of the chunk that follows its last one.
        places: for each rank, where in the segment its tensor begins, or its staging buffers do, and which of
            these buffers has the first chunk, modulo their number, or IN_PLACE for none. Only this rank's
            place is known until all ranks are ready.
    """

    segment: Segment
    collective: Collective | None
    text: str
    until: Until
    number: int
    first: int
    end: int
    places: dict[int, tuple[int, int]]

    def bytes_of(self, chunk: int, rank: int) -> Tensor:
        """A rank's bytes of a chunk."""
        assert self.collective is not None
        return self.at(chunk, rank, self.collective.nbytes(chunk, rank), torch.uint8)

    def at(self, chunk: int, rank: int, nbytes: int, dtype: torch.dtype, start: int = 0) -> Tensor:
        """A rank's elements of a chunk, or some of them: so many bytes, from a byte of the chunk on."""
        offset, first_buffer = self.places[rank]
        if first_buffer != IN_PLACE:
            chunk = (first_buffer + chunk) % STAGING_BUFFERS
        try:
            return self.segment.at(offset + chunk * CHUNK_BYTES + start, nbytes, dtype)
        except OSError as error:  # what was not needed when the channel was made: see open_channel
            raise CollectiveError(
                f"the memory that ranks of one host share cannot be mapped here ({error}); if a limit on "
                'address space (ulimit -v) cannot be raised, use transport="c10d"'
            ) from error


class Headers:
    """The headers of all ranks, in shared memory.

    Args:
        address: where they are.
        size: the number of ranks.
    """

    def __init__(self, address: int, size: int) -> None:
        self._memory = memoryview((ctypes.c_ubyte * headers_bytes(size)).from_address(address)).cast("B")

    def write(self, rank: int, number: int, offset: int, first_buffer: int, text: str) -> None:
        """Write a rank's header of the collective of that number."""
        _HEADER.pack_into(
            self._memory, _offset(rank, number % MAX_IN_FLIGHT), offset, first_buffer, encoded(text)
        )

    def read(self, rank: int, number: int) -> tuple[int, int, bytes]:
        """A rank's header of the collective of that number: its place, and the text as it is written."""
        return _HEADER.unpack_from(self._memory, _offset(rank, number % MAX_IN_FLIGHT))

    def write_failure(self, rank: int, reason: str) -> None:
        """Write why a rank failed."""
        _HEADER.pack_into(self._memory, _offset(rank, MAX_IN_FLIGHT), 0, 0, encoded(reason))

    def read_failure(self, rank: int) -> str:
        """Why a rank failed."""
        return decoded(_HEADER.unpack_from(self._memory, _offset(rank, MAX_IN_FLIGHT))[2])


def headers_bytes(size: int) -> int:
    """How much memory the headers of that many ranks take."""
    return _offset(size, 0)


@lru_cache(1024)
def encoded(text: str) -> bytes:
    """Text as it is written in a header."""
    return text.encode()[:112].ljust(112, b"\0")


def decoded(text: bytes) -> str:
    """The text of a header."""
    return text.rstrip(b"\0").decode(errors="replace")


def _offset(rank: int, entry: int) -> int:
    return (rank * (MAX_IN_FLIGHT + 1) + entry) * _HEADER.size
