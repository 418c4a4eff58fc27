"""What each rank does in each collective, piece by piece.

Note [One order]. Every element of a sum is added up by one rank, or by each rank in the order of the ranks,
so that all ranks have the same bits, in every run.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.pending import Pending
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import PIECE_BYTES, Areas, Collective

# Combines the second tensor into the first; in which order two are given must not matter.
Op = Callable[[Tensor, Tensor], object]
# Begins to combine a tensor with those of other hosts, in place.
Carry = Callable[[Tensor], Pending]

# Up to so many bytes of the others' every rank adds up everything by itself: that is one word less to wait
# for.
_ALONE_BYTES = 128 << 10
# What is copied in and out goes in smaller pieces than what is in place: a rank is to read one while the next
# is being copied.
COPIED_BYTES = 1 << 20


class ReduceInPlace(Collective):
    """Combines tensors that live in shared memory: each rank a slice of all, which it gives to all.

    A tensor that does not live there is copied, piece by piece, there and back.

    Args:
        channel: among whom.
        tensor: contiguous; holds the result in the end.
        op: combines one into another.
        name: what the op is called.
        carry: combines with other hosts, if there are any.
        couriers: how many ranks have a slice; all if None.
    """

    awaits_done = True

    def __init__(
        self,
        channel: Channel,
        tensor: Tensor,
        op: Op,
        name: str,
        *,
        carry: Carry | None = None,
        couriers: int | None = None,
    ) -> None:
        self._flat = tensor.view(-1)
        self._op = op
        self._carry = carry
        self._rank = channel.rank
        self._size = channel.size
        self._couriers = couriers or channel.size
        self._step = PIECE_BYTES // tensor.itemsize
        self.text = f"all_reduce {name} in place {tensor.numel()} {tensor.dtype}"
        self.pieces = _pieces(tensor.numel(), self._step)
        self.place = channel.arena.place_of(tensor)

    def nbytes(self, piece: int, rank: int) -> int:  # noqa: ARG002  # all have the same
        """The piece of the tensor."""
        return min(self._step, self._flat.numel() - piece * self._step) * self._flat.itemsize

    def put(self, piece: int, areas: Areas) -> None:
        """Copy in."""
        areas.of(self._rank, self._flat.dtype).copy_(self._part(piece))

    def meet(self, piece: int, areas: Areas) -> Pending | None:
        """Combine a slice of all into this rank's."""
        if self._rank >= self._couriers:
            return None
        mine, *others = self._slices(piece, areas)
        for theirs in others:
            self._op(mine, theirs)
        return None if self._carry is None else self._carry(mine)

    def spread(self, piece: int, areas: Areas) -> None:
        """Give everyone the result."""
        if self._rank < self._couriers:
            mine, *others = self._slices(piece, areas)
            for theirs in others:
                theirs.copy_(mine)

    def end(self, piece: int, areas: Areas) -> None:
        """Copy out."""
        self._part(piece).copy_(areas.of(self._rank, self._flat.dtype))

    def _part(self, piece: int) -> Tensor:
        return self._flat[piece * self._step : (piece + 1) * self._step]

    def _slices(self, piece: int, areas: Areas) -> list[Tensor]:
        """This rank's slice of its own part, and of the others'."""
        length = self.nbytes(piece, self._rank) // self._flat.itemsize
        share = -(-length // self._couriers)
        cut = min(length, self._rank * share), min(length, (self._rank + 1) * share)
        ranks = [self._rank, *(rank for rank in range(self._size) if rank != self._rank)]
        return [areas.of(rank, self._flat.dtype, cut) for rank in ranks]


class _Copied(Collective):
    """Common to what is copied into shared memory by one rank or by all, and read by one or by all.

    Args:
        channel: among whom.
        text: what it is.
        length: how many elements, or bytes, go to or come from a rank.
        width: how many bytes one of them has.
        parts: how many parts of that length a rank copies in.
        sources: the ranks that copy anything in; all if None.
    """

    def __init__(
        self,
        channel: Channel,
        text: str,
        length: int,
        *,
        width: int = 1,
        parts: int = 1,
        sources: Sequence[int] | None = None,
    ) -> None:
        self.text = text
        self._rank = channel.rank
        self._size = channel.size
        self._length = length
        self._width = width
        self._parts = parts
        self._sources = sources
        self._step = max(1, COPIED_BYTES // parts // width)
        self.pieces = _pieces(length, self._step)

    def nbytes(self, piece: int, rank: int) -> int:
        """The piece of each part."""
        if self._sources is not None and rank not in self._sources:
            return 0
        return self._count(piece) * self._width * self._parts

    def _count(self, piece: int) -> int:
        return min(self._step, self._length - piece * self._step)

    def _cut(self, flat: Tensor, piece: int) -> Tensor:
        if self.pieces == 1:
            return flat
        return flat[piece * self._step : (piece + 1) * self._step]

    def _part(self, area: Tensor, part: int, piece: int) -> Tensor:
        """One of the parts of an area."""
        nbytes = self._count(piece) * self._width
        return area[part * nbytes : (part + 1) * nbytes]


class ReduceAlone(_Copied):
    """Every rank, or one, combines everything by itself.

    Args:
        channel: among whom.
        tensor: contiguous; holds the result in the end.
        op: combines one into another.
        name: what the op is called.
        root: the only rank that wants the result.
    """

    def __init__(
        self, channel: Channel, tensor: Tensor, op: Op, name: str, *, root: int | None = None
    ) -> None:
        kind = "all_reduce" if root is None else f"reduce to {root}"
        super().__init__(
            channel,
            f"{kind} {name} {tensor.numel()} {tensor.dtype}",
            tensor.numel(),
            width=tensor.itemsize,
        )
        self._flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        self._op = op
        self._wants = root in (None, channel.rank)

    def put(self, piece: int, areas: Areas) -> None:
        """Copy in."""
        areas.of(self._rank, self._flat.dtype).copy_(self._cut(self._flat, piece))

    def meet(self, piece: int, areas: Areas) -> None:
        """Combine all in the order of the ranks; of a sum, the first two may be swapped."""
        if not self._wants or not self._length:
            return
        result, dtype = self._cut(self._flat, piece), self._flat.dtype
        others = [rank for rank in range(self._size) if rank != self._rank]
        # The last bit of a complex product depends on which comes first, and so does the larger of 0 and -0.
        if self._rank > (1 if self._op is Tensor.add_ else 0):
            result.copy_(areas.of(0, dtype))
            others = list(range(1, self._size))
        for rank in others:
            self._op(result, areas.of(rank, dtype))


class Broadcast(_Copied):
    """One rank's bytes for all."""

    def __init__(self, channel: Channel, data: Tensor, *, root: int) -> None:
        super().__init__(channel, f"broadcast from {root} {data.nbytes} bytes", data.nbytes, sources=[root])
        self._bytes = data
        self._root = root

    def put(self, piece: int, areas: Areas) -> None:
        """Copy in."""
        areas[self._rank].copy_(self._cut(self._bytes, piece))

    def meet(self, piece: int, areas: Areas) -> None:
        """Copy out."""
        if self._rank != self._root:
            self._cut(self._bytes, piece).copy_(areas[self._root])


class Gather(_Copied):
    """Every rank's bytes for all, or for one."""

    def __init__(
        self, channel: Channel, own: Tensor, everyone: Sequence[Tensor], *, root: int | None = None
    ) -> None:
        kind = "all_gather" if root is None else f"gather to {root}"
        super().__init__(channel, f"{kind} {own.nbytes} bytes", own.nbytes)
        self._own = own
        self._everyone = everyone

    def put(self, piece: int, areas: Areas) -> None:
        """Copy in."""
        areas[self._rank].copy_(self._cut(self._own, piece))

    def meet(self, piece: int, areas: Areas) -> None:
        """Copy out what is wanted here."""
        for rank, theirs in enumerate(self._everyone):
            self._cut(theirs, piece).copy_(areas[rank])


class Scatter(_Copied):
    """One rank's bytes, a part for each."""

    def __init__(self, channel: Channel, own: Tensor, everyone: Sequence[Tensor], *, root: int) -> None:
        super().__init__(
            channel,
            f"scatter from {root} {own.nbytes} bytes each",
            own.nbytes,
            parts=channel.size,
            sources=[root],
        )
        self._own = own
        self._everyone = everyone
        self._root = root

    def put(self, piece: int, areas: Areas) -> None:
        """Copy in."""
        area = areas[self._rank]
        for rank, theirs in enumerate(self._everyone):
            self._part(area, rank, piece).copy_(self._cut(theirs, piece))

    def meet(self, piece: int, areas: Areas) -> None:
        """Copy out."""
        self._cut(self._own, piece).copy_(self._part(areas[self._root], self._rank, piece))


class ReduceScatter(_Copied):
    """Combines every rank's parts; each rank gets one."""

    def __init__(self, channel: Channel, output: Tensor, inputs: Sequence[Tensor], op: Op, name: str) -> None:
        super().__init__(
            channel,
            f"reduce_scatter {name} {output.numel()} {output.dtype} each",
            output.numel(),
            width=output.itemsize,
            parts=channel.size,
        )
        self._output = output
        self._inputs = inputs
        self._op = op

    def put(self, piece: int, areas: Areas) -> None:
        """Copy in."""
        area = areas[self._rank]
        for rank, part in enumerate(self._inputs):
            self._typed(area, rank, piece).copy_(self._cut(part, piece))

    def meet(self, piece: int, areas: Areas) -> None:
        """Combine this rank's parts in the order of the ranks."""
        result = self._cut(self._output, piece)
        result.copy_(self._typed(areas[0], self._rank, piece))
        for rank in range(1, self._size):
            self._op(result, self._typed(areas[rank], self._rank, piece))

    def _typed(self, area: Tensor, part: int, piece: int) -> Tensor:
        return self._part(area, part, piece).view(self._output.dtype)


class AllToAll(_Copied):
    """Every rank's bytes for every rank.

    Args:
        channel: among whom.
        outputs: what comes from each rank.
        inputs: what goes to each rank.
        longest: how long the longest input is, of all ranks.
    """

    def __init__(
        self, channel: Channel, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        super().__init__(channel, f"all_to_all {longest} bytes at most", longest, parts=channel.size)
        self._outputs = outputs
        self._inputs = inputs

    def put(self, piece: int, areas: Areas) -> None:
        """Copy in."""
        area = areas[self._rank]
        for rank, theirs in enumerate(self._inputs):
            part = self._cut(theirs, piece)
            self._part(area, rank, piece)[: part.numel()].copy_(part)

    def meet(self, piece: int, areas: Areas) -> None:
        """Copy out."""
        for rank, theirs in enumerate(self._outputs):
            part = self._cut(theirs, piece)
            part.copy_(self._part(areas[rank], self._rank, piece)[: part.numel()])


class Barrier(_Copied):
    """Nothing, but all at once."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, "barrier", 0)


def adds_up_alone(channel: Channel, nbytes: int) -> bool:
    """Whether each rank had better combine everything by itself."""
    return nbytes * (channel.size - 1) <= _ALONE_BYTES


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, as a flat view."""
    flat = tensor.view(-1)
    if flat.numel() < 2:  # counts as contiguous with any stride, but not when it is viewed as bytes
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def _pieces(length: int, step: int) -> int:
    return max(1, -(-length // step))
