"""The collectives of a group that go through shared memory, and between hosts if it has several."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.host_leaders import HostLeaders
from paceline.comm.pending import OnSlow, Pending
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import Launched
from paceline.comm.shm.collectives import BroadcastBytes, OneShotReduce, Scaling, as_bytes, prefers_one_shot
from paceline.comm.shm.in_place import AllGatherSlices, ReduceScatterSlices, Slice, TwoShotAllReduce
from paceline.comm.shm.local_ranks import Gatherer, HostMemory, LocalRanks, find_local_ranks
from paceline.comm.shm.reduce_parts import ReduceParts, TensorParts

# Up to this many bytes one host leader reduces everything: each slice would be a message.
_ONE_LEADER_BYTES = 32 << 10
# From this many bytes on a tensor is broadcast by itself.
_LARGE_BYTES = 1 << 18
# Ranks find out who shares memory once per process group.
_known: "weakref.WeakKeyDictionary[Any, LocalRanks | None]" = weakref.WeakKeyDictionary()


def local_ranks_of(process_group: Any, group: Gatherer) -> LocalRanks | None:
    """The ranks that share memory with this one; all ranks of the process group call this at once."""
    if process_group not in _known:
        _known[process_group] = find_local_ranks(group)
    return _known[process_group]


class SharedMemoryTransport:
    """Collectives in shared memory, and between hosts of what was reduced there.

    Args:
        channel: the ranks of this host.
        local_ranks: the same ranks, and those of the other hosts.
        leaders: the host leaders of this rank's number; None if this rank is no host leader.

    Attributes:
        hosts: the number of hosts.
        leaders: the number of host leaders per host.
        rank: this rank's number on its host.
        ranks: the ranks of this host, by their numbers in the group.
    """

    def __init__(self, channel: Channel, local_ranks: LocalRanks, leaders: HostLeaders | None) -> None:
        self.hosts = len(local_ranks.hosts)
        self.leaders = local_ranks.leaders
        self.rank = channel.rank
        self.ranks = list(local_ranks.ranks)
        self._channel = channel
        self._local_ranks = local_ranks
        self._leaders = leaders

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor can go through shared memory."""
        return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor that need not be copied when it is reduced; None if there is no memory left."""
        return self._channel.arena.empty(numel, dtype)

    def all_reduce(self, tensor: Tensor, scaling: Scaling | None = None) -> Pending:
        """Begin to add up a tensor over the ranks, in place; the sum can be scaled if there is one host."""
        channel = self._channel
        if self.hosts == 1 and prefers_one_shot(channel, tensor.nbytes):
            return self.all_reduce_on_host(tensor, scaling)
        reduce = TwoShotAllReduce(
            channel,
            tensor,
            Tensor.add_,
            "sum",
            between_hosts=None if self._leaders is None else self._leaders.all_reduce,
            slices=self._slices(tensor.nbytes),
            scaling=scaling,
        )
        return SharedMemoryPending(channel, channel.launch(reduce), tensor)

    def _slices(self, nbytes: int) -> int | None:
        if self.hosts == 1:
            return None
        return 1 if nbytes <= _ONE_LEADER_BYTES else self.leaders

    def all_reduce_on_host(self, tensor: Tensor, scaling: Scaling | None = None) -> Pending:
        """Begin to add up a small tensor over the ranks of this host, in place."""
        reduce = OneShotReduce(self._channel, tensor, Tensor.add_, "sum", scaling=scaling)
        return SharedMemoryPending(self._channel, self._channel.launch(reduce), tensor)

    def reduce_scatter_slices(
        self, tensor: Tensor, part: Tensor, slices: Sequence[Slice], *, factor: float
    ) -> Pending:
        """Begin to add up this rank's slices of the tensors of all ranks of this host, times a factor."""
        reduce = ReduceScatterSlices(self._channel, tensor, part, slices, factor)
        return SharedMemoryPending(self._channel, self._channel.launch(reduce), part)

    def all_gather_slices(self, tensor: Tensor, part: Tensor, slices: Sequence[Slice]) -> Pending:
        """Begin to write this rank's slices into the tensors of all ranks of this host."""
        gather = AllGatherSlices(self._channel, tensor, part, slices)
        return SharedMemoryPending(self._channel, self._channel.launch(gather), tensor)

    def reduce_parts(self, tensor: Tensor, parts: TensorParts) -> Pending:
        """Begin to add up a flat tensor over the ranks; each rank gets the sum of its own elements only."""
        reduce = ReduceParts(
            self._channel,
            tensor,
            parts,
            between_hosts=None if self._leaders is None else self._leaders.all_reduce,
            leaders=None if self.hosts == 1 else self.leaders,
        )
        return SharedMemoryPending(self._channel, self._channel.launch(reduce), tensor)

    def open_memory(self, group: Gatherer, nbytes: int) -> HostMemory:
        """Memory that the ranks of each host have once; every rank of the group calls this at once."""
        return self._local_ranks.open_memory(group, nbytes)

    def address_of(self, tensor: Tensor) -> int | None:
        """Where ranks of this host find a tensor that was made by ``empty``, for ``read``."""
        span = self._channel.arena.span_of(tensor)
        return None if span is None else span.offset

    def read(self, address: int, nbytes: int) -> Tensor:
        """A copy of bytes that a rank of this host has at an address."""
        return self._local_ranks.read(address, nbytes)

    def broadcast(self, tensors: Sequence[Tensor], *, source: int, bytes_at_once: int) -> None:
        """Make tensors equal to those of one rank: on its host, between hosts, on the other hosts."""
        [host] = [number for number, ranks in enumerate(self._local_ranks.hosts) if source in ranks]
        own = self._local_ranks.ranks
        if source in own:
            self.broadcast_on_host(tensors, own.index(source))
        if self._leaders is not None and self.rank == 0:
            self._leaders.broadcast(tensors, host=host, bytes_at_once=bytes_at_once)
        if source not in own:
            self.broadcast_on_host(tensors, 0)

    def broadcast_on_host(self, tensors: Sequence[Tensor], source: int) -> None:
        """Make tensors equal to those of one rank of this host, by its number there."""
        small = []
        for tensor in tensors:
            is_large = tensor.nbytes >= _LARGE_BYTES or len(tensors) == 1
            if is_large and tensor.is_contiguous():
                self._channel.run(BroadcastBytes(self._channel, as_bytes(tensor), root=source))
            else:
                small.append(tensor)
        if small:
            self._broadcast_together(small, source)

    def _broadcast_together(self, tensors: Sequence[Tensor], source: int) -> None:
        flat = torch.cat([as_bytes(tensor.contiguous()) for tensor in tensors])
        self._channel.run(BroadcastBytes(self._channel, flat, root=source))
        if self._channel.rank != source:
            parts = flat.split([tensor.nbytes for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                _set_bytes(tensor, part)

    def make_progress(self) -> None:
        """Do what can be done without waiting for anyone."""
        if self._channel.in_flight:
            with contextlib.suppress(Exception):  # the next wait raises it
                self._channel.advance()

    def release_staging(self) -> None:
        """Release the memory of the staging buffers; waits for what is in flight."""
        self._channel.release_staging()

    def finish_in_background(self) -> None:
        """Let a thread do this rank's part of what is in flight, because other ranks need it."""
        self._channel.finish_in_background()


def _set_bytes(tensor: Tensor, data: Tensor) -> None:
    if tensor.is_contiguous():
        as_bytes(tensor).copy_(data)
    else:  # a clone is aligned for any type
        tensor.copy_(data.clone().view(tensor.dtype).view(tensor.shape))


class SharedMemoryPending:
    """A collective in shared memory."""

    def __init__(self, channel: Channel, launched: Launched, tensor: Tensor) -> None:
        self._channel = channel
        self._launched: Launched | None = launched
        self._tensor = tensor

    def wait(self, on_slow: OnSlow) -> Tensor:
        """Wait until the tensor holds the result; returns it."""
        if self._launched is not None:
            self._channel.wait(self._launched, on_slow)
            # It has views of the tensor, and others count those to see whether somebody holds it.
            self._launched = None
        return self._tensor

    def change(self, change: Callable[[], None]) -> bool:
        """Change the tensor before any rank reads it; False if all ranks have come: it is too late."""
        return self._launched is not None and self._channel.change(self._launched, change)

    def give_up(self) -> bool:
        """Have every rank fail, because some are late; False if all ranks have come."""
        return self._launched is not None and self._channel.give_up(self._launched)

    def done(self) -> bool:
        """Whether the tensor holds the result."""
        if self._launched is None:
            return True
        self._channel.advance()
        return self._channel.is_over(self._launched)
