"""An exchange in which no rank knows how much the others send to each other."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import Areas, Collective
from paceline.errors import CollectiveError, ShapeError

_NUMBER = torch.int64


class UnevenAllToAll(Collective):
    """Every rank's bytes for every rank, of any length each.

    Each rank puts all of it into a block of its own, with a table of where each part ends in front. So it
    goes in one piece, and nothing has to be agreed upon before.

    Args:
        channel: among whom.
        outputs: what comes from each rank.
        inputs: what goes to each rank.
    """

    text = "all_to_all with split sizes"
    awaits_done = True  # the block is read until then

    def __init__(self, channel: Channel, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._rank = channel.rank
        self._outputs = outputs
        self._head = (channel.size + 1) * _NUMBER.itemsize
        ends = list(accumulate((part.numel() for part in inputs), initial=self._head))
        self._nbytes = [self._head] * channel.size
        self._nbytes[self._rank] = ends[-1]
        block = channel.arena.empty(ends[-1], torch.uint8)
        if block is None:
            raise CollectiveError(f"no shared memory is left for an all_to_all (bytes: {ends[-1]})")
        block[: self._head].view(_NUMBER).copy_(torch.tensor(ends))
        for part, start in zip(inputs, ends, strict=False):
            block[start : start + part.numel()].copy_(part)
        self._block = block  # given back when this is gone
        self.place = channel.arena.place_of(block)

    def nbytes(self, piece: int, rank: int) -> int:  # noqa: ARG002  # there is but one
        """How long a rank's block is, as far as is known: of the others' first only the table."""
        return self._nbytes[rank]

    def meet(self, piece: int, areas: Areas) -> None:  # noqa: ARG002  # there is but one
        """Look up where this rank's parts are, and copy them."""
        for rank, output in enumerate(self._outputs):
            start, end = areas[rank][: self._head].view(_NUMBER)[self._rank : self._rank + 2].tolist()
            if end - start != output.numel():
                raise ShapeError(
                    f"split sizes do not fit: rank {rank} sends {end - start} bytes to rank {self._rank}, "
                    f"which awaits {output.numel()}"
                )
            self._nbytes[rank] = end
            output.copy_(areas[rank][start:end])
