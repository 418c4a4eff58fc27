"""Adds up tensors of which each rank of a host needs its own elements only."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.comm.pending import Pending
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import Launched
from paceline.comm.shm.collectives import combine_neighbours
from paceline.comm.shm.in_place import ReduceBetweenHosts, Slice, TwoShotAllReduce


@dataclass(frozen=True)
class TensorParts:
    """Which rank of a host gets which elements of a sum; the same on all ranks.

    Attributes:
        numel: the number of elements that some rank gets; those behind them go to all ranks.
        runs: the elements that each rank gets. A rank that has none is left out at the end.
    """

    numel: int
    runs: Sequence[Sequence[Slice]]
    _found: dict[tuple[int, int], list[Slice]] = field(default_factory=dict, compare=False)

    def in_chunk(self, chunk: int, numel: int, rank: int) -> list[Slice]:
        """A rank's elements in a chunk: first and last of each run, from the chunk's beginning on."""
        if (chunk, rank) not in self._found:
            first, last = chunk * numel, (chunk + 1) * numel
            runs = self.runs[rank] if rank < len(self.runs) else ()
            cut = [(max(start, first) - first, min(end, last) - first) for start, end in runs]
            self._found[chunk, rank] = [(start, end) for start, end in cut if start < end]
        return self._found[chunk, rank]


class ReduceParts(TwoShotAllReduce):
    """Adds up tensors: in the end each rank's tensor has the sum of the rank's own elements.

    What is behind the elements that belong to ranks goes to all of them. The other elements have no meaning
    any more.

    Args:
        channel: the ranks of this host.
        tensor: flat; in the end this rank's elements hold the sum.
        parts: which rank gets which elements.
        between_hosts: combines with other hosts, if there are any.
        leaders: the number of ranks that combine with other hosts; None if there are none.
    """

    def __init__(
        self,
        channel: Channel,
        tensor: Tensor,
        parts: TensorParts,
        *,
        between_hosts: ReduceBetweenHosts | None = None,
        leaders: int | None = None,
    ) -> None:
        super().__init__(
            channel, tensor, Tensor.add_, "sum of parts", between_hosts=between_hosts, slices=leaders
        )
        self._parts = parts
        # By chunk, what this rank combines with other hosts: where it is here, and the tensor that is sent.
        self._sent: dict[int, tuple[list[Tensor], Tensor]] = {}

    def exchange(self, chunk: int, views: Launched) -> Pending | None:
        """Add up this rank's elements, and begin to combine them with those of other hosts."""
        sums = self._add_up(chunk, views, self._rank)
        if self._between_hosts is None or not sums:
            return None
        sent = sums[0] if len(sums) == 1 else torch.cat(sums)
        self._sent[chunk] = sums, sent
        return self._between_hosts(sent)

    def reduce_slice(self, chunk: int, views: Launched, rank: int) -> None:
        """Add up a rank's elements of all tensors."""
        self._add_up(chunk, views, rank)
        self._spread_rest(chunk, views, rank)

    def distribute(self, chunk: int, views: Launched) -> None:
        """Put what other hosts have added in place."""
        if self.has_slices:
            return
        sums, sent = self._sent.pop(chunk, ([], None))
        if sent is not None and len(sums) > 1:
            for own, total in zip(sums, sent.split([each.numel() for each in sums]), strict=True):
                own.copy_(total)
        self._spread_rest(chunk, views, self._rank)

    def _add_up(self, chunk: int, views: Launched, rank: int) -> list[Tensor]:
        """Add up a rank's elements, and the rest if it is the first rank; returns the sums, in its tensor."""
        sums = []
        width = self._dtype.itemsize
        for start, end in self._parts.in_chunk(chunk, self._chunk_numel, rank):
            for at, nbytes in self._blocks(start * width, (end - start) * width):
                terms = [views.at(chunk, each, nbytes, self._dtype, at) for each in range(self._size)]
                _add_into(terms, rank)
            sums.append(views.at(chunk, rank, (end - start) * width, self._dtype, start * width))
        if rank == 0 and (rest := self._rest(chunk)) is not None:
            terms = self._terms(chunk, views, rest)
            combine_neighbours(terms, Tensor.add_)
            sums.append(terms[0])
        return sums

    def _spread_rest(self, chunk: int, views: Launched, rank: int) -> None:
        if rank == 0 and (rest := self._rest(chunk)) is not None:
            first, *others = self._terms(chunk, views, rest)
            for other in others:
                other.copy_(first)

    def _rest(self, chunk: int) -> Slice | None:
        """The elements of a chunk that go to all ranks."""
        first = chunk * self._chunk_numel
        last = min(first + self._chunk_numel, self._flat.numel())
        start = max(first, self._parts.numel)
        return (start - first, last - first) if start < last else None

    def _terms(self, chunk: int, views: Launched, run: Slice) -> list[Tensor]:
        """The same elements of the tensors of all ranks."""
        width = self._dtype.itemsize
        start, end = run
        return [
            views.at(chunk, rank, (end - start) * width, self._dtype, start * width)
            for rank in range(self._size)
        ]


def _add_into(terms: list[Tensor], target: int) -> None:
    """Add up as ``combine_neighbours`` does, but write the sum to one of the terms; any may be written to."""
    if len(terms) == 1:
        return
    half = 1
    while 2 * half < len(terms):
        half *= 2
    left, right = terms[:half], terms[half:]
    combine_neighbours(left, Tensor.add_)
    combine_neighbours(right, Tensor.add_)
    torch.add(left[0], right[0], out=terms[target])
