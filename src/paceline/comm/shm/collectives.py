"""What each rank does in the collectives whose data is copied to shared memory and read there by other ranks.

Note [One order]. Every element of a sum is added up by one rank, or by each rank in the same way: neighbours
first, so that four ranks give (0 + 1) + (2 + 3). So all ranks have the same bits, in every run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import Collective, Launched, Until
from paceline.errors import CollectiveError, ShapeError

# Combines the second tensor into the first; the order in which two are given must not matter.
ReduceFunction = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the first elements of a sum are multiplied by."""

    numel: int
    factor: float

    def apply(self, result: Tensor, start: int) -> None:
        """Multiply part of a sum, which begins at this element."""
        if start < self.numel:
            result[: self.numel - start].mul_(self.factor)


def combine_neighbours(tensors: Sequence[Tensor], op: ReduceFunction) -> None:
    """Combine all into the first one, neighbours first; only tensors at even places are written to."""
    step = 1
    while step < len(tensors):
        for left in range(0, len(tensors) - step, 2 * step):
            op(tensors[left], tensors[left + step])
        step *= 2


# Up to this many bytes of the other ranks, each rank adds up everything by itself: see OneShotReduce.
_ONE_SHOT_BYTES = 128 << 10
# Staged chunks are shorter than chunks in place, so that ranks read one while the next is being copied.
STAGED_CHUNK_BYTES = 1 << 20
_TABLE_DTYPE = torch.int64


@dataclass(frozen=True, slots=True)
class _StagedPlan:
    """What can be known of a collective that goes through staging buffers before there is any data.

    Attributes:
        text: what it is.
        length: the number of elements, or bytes, that go to a rank or come from it.
        width: the size of one of them in bytes.
        parts: the number of parts of that length that a rank copies in.
        chunk_length: the number of elements of a part in each chunk but the last.
        chunks: the number of chunks.
        chunk_bytes: the length of each chunk, with all its parts.
    """

    text: str
    length: int
    width: int
    parts: int
    chunk_length: int
    chunks: int
    chunk_bytes: list[int]


# Making one takes longer than copying some kilobytes, and the same ones come again in every step.
@lru_cache(4096)
def _plan(text: str, length: int, width: int = 1, parts: int = 1) -> _StagedPlan:
    chunk_length = max(1, STAGED_CHUNK_BYTES // parts // width)
    chunks = chunk_count(length, chunk_length)
    numels = [min(chunk_length, length - chunk * chunk_length) for chunk in range(chunks)]
    chunk_bytes = [numel * width * parts for numel in numels]
    return _StagedPlan(text, length, width, parts, chunk_length, chunks, chunk_bytes)


@lru_cache(4096)
def _reduce_plan(name: str, numel: int, dtype: torch.dtype, root: int | None) -> _StagedPlan:
    kind = "all_reduce" if root is None else f"reduce to {root}"
    return _plan(f"{kind} {name} {numel} {dtype}", numel, dtype.itemsize)


class _Staged(Collective):
    """A collective in which one rank or all ranks copy to staging buffers, and one rank or all ranks read.

    Args:
        channel: the ranks of this host.
        plan: what is copied.
        sources: the ranks that copy anything in; all if None.
    """

    def __init__(self, channel: Channel, plan: _StagedPlan, *, sources: Sequence[int] | None = None) -> None:
        self.text = plan.text
        self.chunks = plan.chunks
        self._plan = plan
        self._rank = channel.rank
        self._size = channel.size
        self._sources = sources

    def nbytes(self, chunk: int, rank: int) -> int:
        """The length of the chunk, with all its parts."""
        if self._sources is not None and rank not in self._sources:
            return 0
        return self._plan.chunk_bytes[chunk]

    def _chunk_of(self, flat: Tensor, chunk: int) -> Tensor:
        if self.chunks == 1:
            return flat
        length = self._plan.chunk_length
        return flat[chunk * length : (chunk + 1) * length]

    def _part(self, data: Tensor, part: int, chunk: int) -> Tensor:
        """One of the parts of a rank's chunk."""
        nbytes = self._plan.chunk_bytes[chunk] // self._plan.parts
        return data[part * nbytes : (part + 1) * nbytes]


class OneShotReduce(_Staged):
    """Every rank, or the root, combines everything by itself.

    That reads more than TwoShotAllReduce but needs one signal less, so it is faster for small tensors.

    Args:
        channel: the ranks of this host.
        tensor: contiguous; holds the result in the end.
        op: combines one tensor into another.
        name: the name of the op.
        root: the only rank that wants the result.
        scaling: what becomes of the result, if anything.
    """

    def __init__(
        self,
        channel: Channel,
        tensor: Tensor,
        op: ReduceFunction,
        name: str,
        *,
        root: int | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__(channel, _reduce_plan(name, tensor.numel(), tensor.dtype, root))
        self._scaling = scaling
        self._flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        self._dtype = tensor.dtype
        self._op = op
        self._wants = root is None or root == channel.rank

    def copy_in(self, chunk: int, views: Launched) -> None:
        """Copy to the staging buffer."""
        nbytes = self._plan.chunk_bytes[chunk]
        views.at(chunk, self._rank, nbytes, self._dtype).copy_(self._chunk_of(self._flat, chunk))

    def exchange(self, chunk: int, views: Launched) -> None:
        """Combine all, neighbours first; the two terms of a sum may be swapped."""
        nbytes = self._plan.chunk_bytes[chunk]
        if not self._wants or not nbytes:
            return
        result = self._chunk_of(self._flat, chunk)
        # The last bit of a complex product depends on the order, and so does the larger one of 0 and -0.
        if self._rank > (1 if self._op is Tensor.add_ else 0):
            result.copy_(views.at(chunk, 0, nbytes, self._dtype))
            first, skipped = 1, -1
        else:
            first, skipped = 0, self._rank
        others = [
            views.at(chunk, rank, nbytes, self._dtype) for rank in range(first, self._size) if rank != skipped
        ]
        # Other ranks read the same staging buffers.
        terms = [result, *(other.clone() if at % 2 else other for at, other in enumerate(others))]
        combine_neighbours(terms, self._op)
        if self._scaling is not None:
            self._scaling.apply(result, chunk * self._plan.chunk_length)


class BroadcastBytes(_Staged):
    """Gives all ranks the bytes of one."""

    def __init__(self, channel: Channel, data: Tensor, *, root: int) -> None:
        plan = _plan(f"broadcast from {root} {data.nbytes} bytes", data.nbytes)
        super().__init__(channel, plan, sources=[root])
        self._bytes = data
        self._root = root
        if self._rank == root:
            self.until = Until.READY  # nothing comes back

    def copy_in(self, chunk: int, views: Launched) -> None:
        """Copy to the staging buffer."""
        views.bytes_of(chunk, self._rank).copy_(self._chunk_of(self._bytes, chunk))

    def exchange(self, chunk: int, views: Launched) -> None:
        """Copy from the staging buffer."""
        if self._rank != self._root:
            self._chunk_of(self._bytes, chunk).copy_(views.bytes_of(chunk, self._root))


class Gather(_Staged):
    """Gives all ranks, or the root, the bytes of every rank."""

    def __init__(
        self, channel: Channel, own: Tensor, everyone: Sequence[Tensor], *, root: int | None = None
    ) -> None:
        kind = "all_gather" if root is None else f"gather to {root}"
        super().__init__(channel, _plan(f"{kind} {own.nbytes} bytes", own.nbytes))
        self._own = own
        self._everyone = everyone

    def copy_in(self, chunk: int, views: Launched) -> None:
        """Copy to the staging buffer."""
        views.bytes_of(chunk, self._rank).copy_(self._chunk_of(self._own, chunk))

    def exchange(self, chunk: int, views: Launched) -> None:
        """Copy what this rank wants from the staging buffers."""
        for rank, theirs in enumerate(self._everyone):
            self._chunk_of(theirs, chunk).copy_(views.bytes_of(chunk, rank))


class Scatter(_Staged):
    """Gives each rank a part of one rank's bytes."""

    def __init__(self, channel: Channel, own: Tensor, everyone: Sequence[Tensor], *, root: int) -> None:
        plan = _plan(f"scatter from {root} {own.nbytes} bytes each", own.nbytes, parts=channel.size)
        super().__init__(channel, plan, sources=[root])
        self._own = own
        self._everyone = everyone
        self._root = root

    def copy_in(self, chunk: int, views: Launched) -> None:
        """Copy to the staging buffer."""
        data = views.bytes_of(chunk, self._rank)
        for rank, theirs in enumerate(self._everyone):
            self._part(data, rank, chunk).copy_(self._chunk_of(theirs, chunk))

    def exchange(self, chunk: int, views: Launched) -> None:
        """Copy from the staging buffer."""
        self._chunk_of(self._own, chunk).copy_(
            self._part(views.bytes_of(chunk, self._root), self._rank, chunk)
        )


class ReduceScatter(_Staged):
    """Combines the parts of all ranks; each rank gets one."""

    def __init__(
        self, channel: Channel, output: Tensor, inputs: Sequence[Tensor], op: ReduceFunction, name: str
    ) -> None:
        text = f"reduce_scatter {name} {output.numel()} {output.dtype} each"
        super().__init__(channel, _plan(text, output.numel(), output.itemsize, channel.size))
        self._output = output
        self._inputs = inputs
        self._op = op

    def copy_in(self, chunk: int, views: Launched) -> None:
        """Copy to the staging buffer."""
        data = views.bytes_of(chunk, self._rank)
        for rank, part in enumerate(self._inputs):
            self._typed(data, rank, chunk).copy_(self._chunk_of(part, chunk))

    def exchange(self, chunk: int, views: Launched) -> None:
        """Combine this rank's parts in the order of the ranks."""
        result = self._chunk_of(self._output, chunk)
        result.copy_(self._typed(views.bytes_of(chunk, 0), self._rank, chunk))
        for rank in range(1, self._size):
            self._op(result, self._typed(views.bytes_of(chunk, rank), self._rank, chunk))

    def _typed(self, data: Tensor, part: int, chunk: int) -> Tensor:
        return self._part(data, part, chunk).view(self._output.dtype)


class AllToAll(_Staged):
    """Gives each rank a part of every rank's bytes.

    Args:
        channel: the ranks of this host.
        outputs: what comes from each rank.
        inputs: what goes to each rank.
        longest: the length of the longest input of all ranks.
    """

    def __init__(
        self, channel: Channel, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        super().__init__(channel, _plan(f"all_to_all {longest} bytes at most", longest, parts=channel.size))
        self._outputs = outputs
        self._inputs = inputs

    def copy_in(self, chunk: int, views: Launched) -> None:
        """Copy to the staging buffer."""
        data = views.bytes_of(chunk, self._rank)
        for rank, theirs in enumerate(self._inputs):
            part = self._chunk_of(theirs, chunk)
            self._part(data, rank, chunk)[: part.numel()].copy_(part)

    def exchange(self, chunk: int, views: Launched) -> None:
        """Copy from the staging buffer."""
        for rank, theirs in enumerate(self._outputs):
            part = self._chunk_of(theirs, chunk)
            part.copy_(self._part(views.bytes_of(chunk, rank), self._rank, chunk)[: part.numel()])


class UnevenAllToAll(Collective):
    """Gives each rank a part of every rank's bytes, of any length; no rank knows the lengths of the others.

    Each rank puts all its parts into one block of shared memory, behind a table of where each part ends. So
    it is one chunk, and ranks need not agree on anything before.

    Args:
        channel: the ranks of this host.
        outputs: what comes from each rank.
        inputs: what goes to each rank.
    """

    text = "all_to_all with split sizes"
    until = Until.OVER  # the block is read until then

    def __init__(self, channel: Channel, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._rank = channel.rank
        self._outputs = outputs
        self._table_bytes = (channel.size + 1) * _TABLE_DTYPE.itemsize
        ends = list(accumulate((part.numel() for part in inputs), initial=self._table_bytes))
        self._nbytes = [self._table_bytes] * channel.size
        self._nbytes[self._rank] = ends[-1]
        block = channel.arena.empty(ends[-1], torch.uint8)
        if block is None:
            raise CollectiveError(f"no shared memory is left for an all_to_all (bytes: {ends[-1]})")
        block[: self._table_bytes].view(_TABLE_DTYPE).copy_(torch.tensor(ends))
        for part, start in zip(inputs, ends, strict=False):
            block[start : start + part.numel()].copy_(part)
        self._block = block  # keeps the memory until the collective is gone
        self.span = channel.arena.span_of(block)

    def nbytes(self, chunk: int, rank: int) -> int:  # noqa: ARG002  # there is only one
        """The length of a rank's block; of the others' blocks only the table's until it has been read."""
        return self._nbytes[rank]

    def exchange(self, chunk: int, views: Launched) -> None:
        """Look up where this rank's parts are, and copy them."""
        for rank, output in enumerate(self._outputs):
            start, end = (
                views.bytes_of(chunk, rank)[: self._table_bytes]
                .view(_TABLE_DTYPE)[self._rank : self._rank + 2]
                .tolist()
            )
            if end - start != output.numel():
                raise ShapeError(
                    f"split sizes do not fit: rank {rank} sends {end - start} bytes to rank {self._rank}, "
                    f"which expects {output.numel()}"
                )
            self._nbytes[rank] = end
            output.copy_(views.bytes_of(chunk, rank)[start:end])


class Barrier(_Staged):
    """Waits for all ranks."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, _plan("barrier", 0))


def prefers_one_shot(channel: Channel, nbytes: int) -> bool:
    """Whether OneShotReduce is the faster way for tensors of that size."""
    return nbytes * (channel.size - 1) <= _ONE_SHOT_BYTES


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, as a flat view."""
    flat = tensor.view(-1)
    if flat.numel() < 2:  # contiguous with any stride, but a view as bytes needs stride 1
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def chunk_count(length: int, chunk_length: int) -> int:
    """The number of chunks, of which there is at least one."""
    return max(1, -(-length // chunk_length))
