"""Collectives of tensors that live in shared memory, where each rank works on its slice of every tensor.

A tensor that does not live there is copied to staging buffers and back, chunk by chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.comm.pending import Pending
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import Collective, Launched, Until
from paceline.comm.shm.collectives import ReduceFunction, Scaling, chunk_count, combine_neighbours
from paceline.comm.shm.segment import CHUNK_BYTES

# A slice is reduced in blocks, so that what is read again is still in the core's cache: so many bytes of all
# ranks' tensors together.
CACHED_BYTES = 1 << 20
# A block begins at a multiple of this many bytes: of any element's size.
_BLOCK_UNIT = 64
# Begins to combine a tensor with those of other hosts, in place.
ReduceBetweenHosts = Callable[[Tensor], Pending]
# The first element, and the one behind the last.
Slice: TypeAlias = tuple[int, int]


@lru_cache(4096)  # writing it takes longer than signalling
def _in_place_text(name: str, numel: int, dtype: torch.dtype) -> str:
    return f"all_reduce {name} in place {numel} {dtype}"


class TwoShotAllReduce(Collective):
    """Combines tensors: each rank reduces one slice, and then writes it into the tensors of all ranks.

    Args:
        channel: the ranks of this host.
        tensor: contiguous; holds the result in the end.
        op: combines one tensor into another.
        name: the name of the op.
        between_hosts: combines with other hosts, if there are any.
        slices: the number of ranks that have a slice and combine it with other hosts; None if there are none,
            and all ranks have one.
        scaling: what becomes of the result, if anything; only on one host.
    """

    until = Until.OVER

    def __init__(
        self,
        channel: Channel,
        tensor: Tensor,
        op: ReduceFunction,
        name: str,
        *,
        between_hosts: ReduceBetweenHosts | None = None,
        slices: int | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self._scaling = scaling
        self._flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        self._dtype = tensor.dtype
        self._op = op
        self._between_hosts = between_hosts
        self._rank = channel.rank
        self._size = channel.size
        self._slices = slices or channel.size
        self.has_slices = slices is None
        self._chunk_numel = CHUNK_BYTES // tensor.itemsize
        self.text = _in_place_text(name, tensor.numel(), tensor.dtype)
        self.chunks = chunk_count(tensor.numel(), self._chunk_numel)
        self.span = channel.arena.span_of(tensor)

    def nbytes(self, chunk: int, rank: int) -> int:  # noqa: ARG002  # the same on all ranks
        """The length of the chunk."""
        numel = min(self._chunk_numel, self._flat.numel() - chunk * self._chunk_numel)
        return numel * self._flat.itemsize

    def copy_in(self, chunk: int, views: Launched) -> None:
        """Copy the chunk to the staging buffer."""
        self._staged(chunk, views).copy_(self._chunk(chunk))

    def exchange(self, chunk: int, views: Launched) -> Pending | None:
        """Combine this rank's slice of all tensors."""
        if self._rank >= self._slices:
            return None
        result = self._combine(chunk, views, self._rank)[0]
        return None if self._between_hosts is None else self._between_hosts(result)

    def reduce_slice(self, chunk: int, views: Launched, rank: int) -> None:
        """Combine a rank's slice of all tensors, and write the result into all of them."""
        start, length = self._bytes_of_slice(chunk, rank)
        for at, nbytes in self._blocks(start, length):
            terms = [views.at(chunk, each, nbytes, self._dtype, at) for each in range(self._size)]
            combine_neighbours(terms, self._op)
            result, *others = terms
            if self._scaling is not None:
                self._scaling.apply(result, chunk * self._chunk_numel + at // self._dtype.itemsize)
            for other in others:
                other.copy_(result)

    def _blocks(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """Cut bytes into blocks that fit into the cache: where each begins, and its length."""
        block = max(1, CACHED_BYTES // self._size // _BLOCK_UNIT) * _BLOCK_UNIT
        for at in range(start, start + length, block):
            yield at, min(block, start + length - at)

    def distribute(self, chunk: int, views: Launched) -> None:
        """Write the result into the tensors of all ranks."""
        if not self.has_slices and self._rank < self._slices:
            result, *others = self._views_of_slice(chunk, views, self._rank)
            for other in others:
                other.copy_(result)

    def copy_out(self, chunk: int, views: Launched) -> None:
        """Copy the chunk from the staging buffer."""
        self._chunk(chunk).copy_(self._staged(chunk, views))

    def _staged(self, chunk: int, views: Launched) -> Tensor:
        return views.at(chunk, self._rank, self.nbytes(chunk, self._rank), self._dtype)

    def _chunk(self, chunk: int) -> Tensor:
        return self._flat[chunk * self._chunk_numel : (chunk + 1) * self._chunk_numel]

    def _combine(self, chunk: int, views: Launched, rank: int) -> list[Tensor]:
        """Combine a rank's slice of all tensors; the first one has the result."""
        slices = self._views_of_slice(chunk, views, rank)
        combine_neighbours(slices, self._op)
        return slices

    def _views_of_slice(self, chunk: int, views: Launched, rank: int) -> list[Tensor]:
        """A rank's slice in the tensors of all ranks, in their order."""
        start, length = self._bytes_of_slice(chunk, rank)
        return [views.at(chunk, each, length, self._dtype, start) for each in range(self._size)]

    def _bytes_of_slice(self, chunk: int, rank: int) -> tuple[int, int]:
        """Where a rank's slice begins in a chunk, and its length, in bytes."""
        nbytes, width = self.nbytes(chunk, rank), self._dtype.itemsize
        share = -(-nbytes // width // self._slices) * width
        start = min(nbytes, rank * share)
        return start, min(nbytes, start + share) - start


class _SliceCollective(Collective):
    """What ReduceScatterSlices and AllGatherSlices have in common.

    Args:
        channel: the ranks of this host.
        text: what it is.
        tensor: flat, of the same length on every rank.
        part: this rank's slices, one after the other.
        slices: where they are in the tensor; slices of different ranks do not overlap.
    """

    def __init__(
        self, channel: Channel, text: str, tensor: Tensor, part: Tensor, slices: Sequence[Slice]
    ) -> None:
        self._tensor = tensor
        self._part = part
        self._slices = slices
        self._rank = channel.rank
        self._size = channel.size
        self._chunk_numel = CHUNK_BYTES // tensor.itemsize
        self.text = f"{text} {tensor.numel()} {tensor.dtype}"
        self.chunks = chunk_count(tensor.numel(), self._chunk_numel)
        self.span = channel.arena.span_of(tensor)

    def nbytes(self, chunk: int, rank: int) -> int:  # noqa: ARG002  # the same on all ranks
        """The length of the chunk."""
        return self._chunk(chunk).nbytes

    def _chunk(self, chunk: int) -> Tensor:
        return self._tensor[chunk * self._chunk_numel : (chunk + 1) * self._chunk_numel]

    def _slices_in(self, chunk: int) -> Iterator[tuple[slice, Tensor]]:
        """This rank's slices as far as they are in a chunk: where in it, and their elements of ``part``."""
        first, last = chunk * self._chunk_numel, (chunk + 1) * self._chunk_numel
        before = 0
        for start, end in self._slices:
            low, high = max(start, first), min(end, last)
            if low < high:
                yield (
                    slice(low - first, high - first),
                    self._part[before + low - start : before + high - start],
                )
            before += end - start

    def _typed(self, data: Tensor) -> Tensor:
        return data.view(self._tensor.dtype)


class ReduceScatterSlices(_SliceCollective):
    """Each rank adds up its slices of all ranks' tensors, which stay as they are.

    Args:
        channel: the ranks of this host.
        tensor: what is added up.
        part: holds the sums in the end.
        slices: where this rank's slices are in the tensor.
        factor: what each tensor is multiplied by before it is added, so that low precision does not overflow.
    """

    def __init__(
        self, channel: Channel, tensor: Tensor, part: Tensor, slices: Sequence[Slice], factor: float
    ) -> None:
        super().__init__(channel, "reduce_scatter of slices", tensor, part, slices)
        self._factor = factor

    def copy_in(self, chunk: int, views: Launched) -> None:
        """Copy the chunk to the staging buffer."""
        self._typed(views.bytes_of(chunk, self._rank)).copy_(self._chunk(chunk))

    def exchange(self, chunk: int, views: Launched) -> None:
        """Add up in the order of the ranks."""
        for where, part in self._slices_in(chunk):
            torch.mul(self._typed(views.bytes_of(chunk, 0))[where], self._factor, out=part)
            for rank in range(1, self._size):
                part.add_(self._typed(views.bytes_of(chunk, rank))[where], alpha=self._factor)


class AllGatherSlices(_SliceCollective):
    """Each rank writes its slices into the tensors of all ranks."""

    until = Until.OVER

    def __init__(self, channel: Channel, tensor: Tensor, part: Tensor, slices: Sequence[Slice]) -> None:
        super().__init__(channel, "all_gather of slices", tensor, part, slices)

    def exchange(self, chunk: int, views: Launched) -> None:
        """Write this rank's slices."""
        for where, part in self._slices_in(chunk):
            for rank in range(self._size):
                self._typed(views.bytes_of(chunk, rank))[where].copy_(part)

    def copy_out(self, chunk: int, views: Launched) -> None:
        """Copy the chunk from the staging buffer."""
        self._chunk(chunk).copy_(self._typed(views.bytes_of(chunk, self._rank)))
