"""Sums of which each rank of a host gets runs of its own, and spreads what became of them."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import PIECE_BYTES, Areas, Collective

# The first element, and the one behind the last.
Run: TypeAlias = tuple[int, int]


class _Parts(Collective):
    """Common to both.

    Args:
        channel: among whom.
        text: what it is.
        tensor: flat, of the same length on every rank.
        part: this rank's runs, one after the other.
        runs: where they are in the tensor; no rank has what another has.
    """

    def __init__(
        self, channel: Channel, text: str, tensor: Tensor, part: Tensor, runs: Sequence[Run]
    ) -> None:
        self._tensor = tensor
        self._part = part
        self._runs = runs
        self._rank = channel.rank
        self._size = channel.size
        self._step = PIECE_BYTES // tensor.itemsize
        self.text = f"{text} {tensor.numel()} {tensor.dtype}"
        self.pieces = max(1, -(-tensor.numel() // self._step))
        self.place = channel.arena.place_of(tensor)

    def nbytes(self, piece: int, rank: int) -> int:  # noqa: ARG002  # all have the same
        """The piece of the tensor."""
        return self._of_tensor(piece).nbytes

    def _of_tensor(self, piece: int) -> Tensor:
        return self._tensor[piece * self._step : (piece + 1) * self._step]

    def _pairs(self, piece: int) -> Iterator[tuple[slice, Tensor]]:
        """Where this rank's runs are in a piece, and in its part."""
        first, last = piece * self._step, (piece + 1) * self._step
        before = 0
        for start, end in self._runs:
            low, high = max(start, first), min(end, last)
            if low < high:
                yield (
                    slice(low - first, high - first),
                    self._part[before + low - start : before + high - start],
                )
            before += end - start

    def _typed(self, area: Tensor) -> Tensor:
        return area.view(self._tensor.dtype)


class SumParts(_Parts):
    """Each rank adds up its runs of all ranks' tensors, which are left as they are.

    Args:
        channel: among whom.
        tensor: what is added up.
        part: holds the sums in the end.
        runs: where they are in the tensor.
        factor: what is multiplied before it is added, lest low precision overflows.
    """

    def __init__(
        self, channel: Channel, tensor: Tensor, part: Tensor, runs: Sequence[Run], factor: float
    ) -> None:
        super().__init__(channel, "sum_parts", tensor, part, runs)
        self._factor = factor

    def put(self, piece: int, areas: Areas) -> None:
        """Copy in."""
        self._typed(areas[self._rank]).copy_(self._of_tensor(piece))

    def meet(self, piece: int, areas: Areas) -> None:
        """Add up in the order of the ranks."""
        for place, part in self._pairs(piece):
            torch.mul(self._typed(areas[0])[place], self._factor, out=part)
            for rank in range(1, self._size):
                part.add_(self._typed(areas[rank])[place], alpha=self._factor)


class SpreadParts(_Parts):
    """Each rank writes its runs into all ranks' tensors."""

    awaits_done = True

    def __init__(self, channel: Channel, tensor: Tensor, part: Tensor, runs: Sequence[Run]) -> None:
        super().__init__(channel, "spread_parts", tensor, part, runs)

    def meet(self, piece: int, areas: Areas) -> None:
        """Write."""
        for place, part in self._pairs(piece):
            for rank in range(self._size):
                self._typed(areas[rank])[place].copy_(part)

    def end(self, piece: int, areas: Areas) -> None:
        """Copy out."""
        self._of_tensor(piece).copy_(self._typed(areas[self._rank]))
