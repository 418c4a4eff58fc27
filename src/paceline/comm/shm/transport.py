"""What a group does through shared memory: all ranks of it, or those of each host among themselves."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.pending import Pending
from paceline.comm.shm import neighbours
from paceline.comm.shm.channel import Channel, Launched
from paceline.comm.shm.collectives import ALONE_BYTES, Broadcast, Carry, ReduceAlone, ReduceInPlace, as_bytes
from paceline.comm.shm.neighbours import Gatherer, Neighbours

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
    """Collectives in shared memory.

    Args:
        channel: among the ranks of this host.
        carry: combines what this host's ranks have with other hosts; None if there are none.
        carriers: how many ranks of each host take part in that.
    """

    def __init__(self, channel: Channel, *, carry: Carry | None, carriers: int) -> None:
        self._channel = channel
        self._carry = carry
        self._carriers = carriers

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor can go this way."""
        return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor that need not be copied when it is reduced; None if there is no room for it."""
        return self._channel.arena.empty(numel, dtype)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to add up a tensor over the ranks, in place."""
        channel = self._channel
        if self._carry is None and tensor.nbytes <= ALONE_BYTES:
            alone = ReduceAlone(channel, tensor, Tensor.add_, "sum")
            return SharedPending(channel, channel.launch(alone), tensor)
        reduce = ReduceInPlace(
            channel, tensor, Tensor.add_, "sum", carry=self._carry, carriers=self._carriers
        )
        return SharedPending(channel, channel.launch(reduce), tensor)

    def broadcast(self, tensors: Sequence[Tensor], *, source: int) -> None:
        """Make tensors equal to those of one rank of this host."""
        small = [tensor for tensor in tensors if tensor.nbytes < _LARGE or not tensor.is_contiguous()]
        for tensor in (tensor for tensor in tensors if not any(tensor is other for other in small)):
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

    def finish_behind(self) -> None:
        """Do this rank's part of what is in flight in a thread, for the others' sake."""
        self._channel.finish_behind()


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
