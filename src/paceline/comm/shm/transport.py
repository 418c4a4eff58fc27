"""What a group does through shared memory: all ranks of it, or those of each host among themselves."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.across import Across
from paceline.comm.pending import Pending
from paceline.comm.shm import neighbours
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import Launched
from paceline.comm.shm.collectives import Broadcast, ReduceAlone, ReduceInPlace, adds_up_alone, as_bytes
from paceline.comm.shm.neighbours import Gatherer, Neighbours
from paceline.comm.shm.parts import Run, SpreadParts, SumParts

# Up to so many bytes one rank of a host carries everything.
_UNCUT_BYTES = 32 << 10
# Bytes from which a tensor is broadcast by itself.
_LARGE = 1 << 18
# Who shares memory is found out once a process group.
_known: "weakref.WeakKeyDictionary[Any, Neighbours | None]" = weakref.WeakKeyDictionary()


def neighbours_in(process_group: Any, group: Gatherer) -> Neighbours | None:
    """Who shares memory in a process group; asked by all of its ranks at once."""
    if process_group not in _known:
        _known[process_group] = neighbours.find(group)
    return _known[process_group]


class SharedMemory:
    """Collectives in shared memory, and between hosts of what is added up there.

    Args:
        channel: among the ranks of this host.
        near: who they are, and who is on the other hosts.
        across: this rank's counterparts on the other hosts; None if it has none.

    Attributes:
        hosts: how many hosts there are.
        couriers: how many ranks of each host have counterparts.
        rank: this rank's number on its host.
    """

    def __init__(self, channel: Channel, near: Neighbours, across: Across | None) -> None:
        self.hosts = len(near.hosts)
        self.couriers = near.couriers
        self.rank = channel.rank
        self._channel = channel
        self._near = near
        self._across = across

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor can go this way."""
        return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor that need not be copied when it is reduced; None if there is no room for it."""
        return self._channel.arena.empty(numel, dtype)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to add up a tensor over the ranks, in place."""
        if self.hosts == 1 and adds_up_alone(self._channel, tensor.nbytes):
            return self.all_reduce_inside(tensor)
        channel = self._channel
        reduce = ReduceInPlace(
            channel,
            tensor,
            Tensor.add_,
            "sum",
            carry=None if self._across is None else self._across.all_reduce,
            # What is small is not cut: each part would be a message.
            couriers=1 if self.hosts > 1 and tensor.nbytes <= _UNCUT_BYTES else self._slices,
        )
        return SharedPending(channel, channel.launch(reduce), tensor)

    @property
    def _slices(self) -> int:
        return self._channel.size if self.hosts == 1 else self.couriers

    def all_reduce_inside(self, tensor: Tensor) -> Pending:
        """Begin to add up a small tensor over the ranks of this host, in place."""
        alone = ReduceAlone(self._channel, tensor, Tensor.add_, "sum")
        return SharedPending(self._channel, self._channel.launch(alone), tensor)

    def sum_parts(self, tensor: Tensor, part: Tensor, runs: Sequence[Run], *, factor: float) -> Pending:
        """Begin to add up this rank's runs of the tensors of all ranks of this host, times a factor."""
        sums = SumParts(self._channel, tensor, part, runs, factor)
        return SharedPending(self._channel, self._channel.launch(sums), part)

    def spread_parts(self, tensor: Tensor, part: Tensor, runs: Sequence[Run]) -> Pending:
        """Begin to write this rank's runs into the tensors of all ranks of this host."""
        spread = SpreadParts(self._channel, tensor, part, runs)
        return SharedPending(self._channel, self._channel.launch(spread), tensor)

    def broadcast(self, tensors: Sequence[Tensor], *, source: int, bytes_at_once: int) -> None:
        """Make tensors equal to those of one rank: inside its host, to each other host, inside those."""
        [home] = [number for number, ranks in enumerate(self._near.hosts) if source in ranks]
        own = self._near.ranks
        if source in own:
            self._broadcast_inside(tensors, own.index(source))
        if self._across is not None and self.rank == 0:
            self._across.broadcast(tensors, host=home, bytes_at_once=bytes_at_once)
        if source not in own:
            self._broadcast_inside(tensors, 0)

    def _broadcast_inside(self, tensors: Sequence[Tensor], source: int) -> None:
        small = []
        for tensor in tensors:
            if tensor.nbytes < _LARGE or not tensor.is_contiguous():
                small.append(tensor)
            else:
                self._channel.run(Broadcast(self._channel, as_bytes(tensor), root=source))
        if small:
            self._broadcast_together(small, source)

    def _broadcast_together(self, tensors: Sequence[Tensor], source: int) -> None:
        flat = torch.cat([as_bytes(tensor.contiguous()) for tensor in tensors])
        self._channel.run(Broadcast(self._channel, flat, root=source))
        if self._channel.rank != source:
            parts = flat.split([tensor.nbytes for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                _set_bytes(tensor, part)

    def make_progress(self) -> None:
        """Do what can be done without waiting for anyone."""
        if self._channel.in_flight:
            with contextlib.suppress(Exception):  # who waits for it is told
                self._channel.advance()

    def release_staging(self) -> None:
        """Have no more memory than what lives there."""
        self._channel.release_staging()

    def finish_in_background(self) -> None:
        """Do this rank's part of what is in flight in a thread, for the others' sake."""
        self._channel.finish_in_background()


def _set_bytes(tensor: Tensor, data: Tensor) -> None:
    if tensor.is_contiguous():
        as_bytes(tensor).copy_(data)
    else:  # a clone begins where any type may
        tensor.copy_(data.clone().view(tensor.dtype).view(tensor.shape))


class SharedPending:
    """A reduction in shared memory."""

    def __init__(self, channel: Channel, launched: Launched, tensor: Tensor) -> None:
        self._channel = channel
        self._launched: Launched | None = launched
        self._tensor = tensor

    def wait(self, unusual: Callable[[], None]) -> Tensor:
        """Wait until the tensor holds the result; returns it."""
        if self._launched is not None:
            self._channel.wait(self._launched, unusual)
            self._launched = None  # it has views of the tensor, which may be taken for somebody else's
        return self._tensor

    def done(self) -> bool:
        """Whether the tensor holds the result."""
        if self._launched is None:
            return True
        self._channel.advance()
        return self._channel.over(self._launched)
