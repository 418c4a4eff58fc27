"""One rank's part in one collective: what every kind has in common, and what is known once it is launched."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.pending import Pending
from paceline.comm.shm.arena import Place
from paceline.comm.shm.notes import IN_PLACE, Note
from paceline.comm.shm.segment import Segment

# The longest piece; a multiple of any element's size.
PIECE_BYTES = 4 << 20
# So many pieces can be in flight of what does not live in shared memory itself.
AREAS = 4
STAGING_BYTES = AREAS * PIECE_BYTES


class Collective(ABC):
    """One rank's part in one collective.

    Attributes:
        text: what it is, the same on every rank.
        pieces: in how many pieces it goes, the same on every rank.
        place: where this rank's part is in shared memory; None if it has to be copied there.
        awaits_done: whether it is over only when every rank is done.
    """

    text: str
    pieces: int = 1
    place: Place | None = None
    awaits_done: bool = False

    @abstractmethod
    def nbytes(self, piece: int, rank: int) -> int:
        """How long a rank's part of a piece is."""

    def put(self, piece: int, areas: "Areas") -> None:  # noqa: B027  # if there is nothing to copy
        """Copy this rank's part of a piece into shared memory."""

    def meet(self, piece: int, areas: "Areas") -> Pending | None:  # noqa: B027  # if there is nothing to take
        """All ranks are here: take what is theirs. Returns what has to come from other hosts first."""

    def spread(self, piece: int, areas: "Areas") -> None:  # noqa: B027  # if nobody else needs it
        """What came from other hosts is here too: give it to the others."""

    def end(self, piece: int, areas: "Areas") -> None:  # noqa: B027  # if it was done in place
        """Everybody is done."""


@dataclass(slots=True)
class Launched:
    """A collective that has been launched.

    Attributes:
        collective: what it is; None once this rank has no more to do in it, so that its tensors are let go.
        text: what it is, in words.
        awaits_done: whether it is over only when every rank is done.
        number: its number among the channel's collectives.
        first: the number of its first piece among all pieces.
        last: the number of the piece that follows its last one.
        notes: where each rank's part is; only this rank's before all are here.
    """

    collective: Collective | None
    text: str
    awaits_done: bool
    number: int
    first: int
    last: int
    notes: dict[int, Note]


class Areas:
    """Where the ranks' parts of one piece are."""

    def __init__(self, segment: Segment, launched: Launched, piece: int) -> None:
        self._segment = segment
        self._launched = launched
        self._piece = piece

    def __getitem__(self, rank: int) -> Tensor:
        """A rank's bytes of the piece."""
        return self.of(rank, torch.uint8)

    def of(self, rank: int, dtype: torch.dtype, cut: tuple[int, int] | None = None) -> Tensor:
        """A rank's elements of the piece, or those from one number up to another."""
        launched, piece = self._launched, self._piece
        assert launched.collective is not None
        note = launched.notes[rank]
        at = piece if note.area == IN_PLACE else (note.area + piece) % AREAS
        offset = note.offset + at * PIECE_BYTES
        if cut is None:
            return self._segment.at(offset, launched.collective.nbytes(piece, rank), dtype)
        start, end = cut
        return self._segment.at(offset + start * dtype.itemsize, (end - start) * dtype.itemsize, dtype)
