"""Our view of one process group."""

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

from paceline.comm.across import Across, open_across
from paceline.comm.peer_notes import PeerNotes
from paceline.comm.pending import Pending, SegmentsPending, WorkPending
from paceline.comm.shm.neighbours import Neighbours
from paceline.comm.shm.transport import SharedMemory, neighbours_in
from paceline.errors import OptionError, WrapError

# Long messages of bytes travel in segments. Sent whole in both directions at once, acknowledgements wait
# behind the other direction's data: 2.6 MB over 100 Mbit/s took 320 ms, and in segments 220, as long as the
# wire needs.
_SEGMENT_BYTES = 256 * 1024
# Wrappers on one group tell each other apart by the order in which they were made, the same on every rank.
_members: dict[str, "itertools.count[int]"] = {}


class Group:
    """One process group: rank, size, backend, and the collectives that data parallelism needs.

    Args:
        process_group: a group of torch.distributed.

    Attributes:
        shared: the shared memory that reductions go through, if they do.
    """

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.name: str = process_group.group_name
        self.shared: SharedMemory | None = None
        self._near: Neighbours | None = None
        self._sum = c10d.AllreduceOptions()
        self._sum.reduceOp = distributed.ReduceOp.SUM  # type: ignore[assignment]
        number = next(_members.setdefault(self.name, itertools.count()))
        self.peer_notes = PeerNotes(process_group.get_group_store(), number, rank=self.rank, size=self.size)

    @property
    def backend(self) -> str:
        """The backend's name, such as gloo or nccl."""
        return str(distributed.get_backend(self.process_group))

    @property
    def gloo_threads(self) -> int:
        """How many threads gloo works with."""
        return int(self._options._threads)

    @property
    def _options(self) -> Any:
        device = torch.device(self.process_group._device_types[0])
        return self.process_group._get_backend(device).options

    @property
    def global_ranks(self) -> list[int]:
        """The members' ranks in the default group."""
        return distributed.get_process_group_ranks(self.process_group)

    @property
    def world(self) -> int:
        """How many processes there are in all."""
        return distributed.get_world_size()

    @property
    def timeout(self) -> timedelta:
        """How long ranks wait for each other."""
        timeout: timedelta = self._options._timeout
        return timeout

    def share_memory(self, *, nbytes: int) -> None:
        """Reduce in shared memory from now on, where ranks share any; every rank calls this at once.

        Args:
            nbytes: how much shared memory each rank will need.
        """
        if self.size == 1 or (near := neighbours_in(self.process_group, self)) is None:
            return
        channel = near.open(self, nbytes=nbytes, timeout=self.timeout.total_seconds())
        if channel is not None:
            counterparts = self._counterparts(near)
            across = None if counterparts is None else Across(self._open(counterparts), counterparts)
            self.shared = SharedMemory(channel, near, across)
            self._near = near

    def open_leader_group(self) -> "Group | None":
        """A new group of this rank's counterparts, one on each host, which all do this at once.

        None if there are none: on one host, or if not every host has so many ranks.
        """
        counterparts = None if self._near is None else self._counterparts(self._near)
        return None if counterparts is None else Group(self._open(counterparts))

    def _counterparts(self, near: Neighbours) -> list[int] | None:
        if len(near.hosts) == 1 or near.rank >= near.couriers:
            return None
        return [host[near.rank] for host in near.hosts]

    def _open(self, ranks: Sequence[int]) -> Any:
        return open_across([self.global_ranks[rank] for rank in ranks], timeout=self.timeout)

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is to be reduced: shared memory if there is any."""
        shared = None
        if self.shared is not None and device.type == "cpu":
            shared = self.shared.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device) if shared is None else shared

    def make_progress(self) -> None:
        """Do what can be done without waiting for anyone, if other hosts wait for it."""
        if self.shared is not None and self.shared.hosts > 1:
            self.shared.make_progress()

    def release_staging(self) -> None:
        """Keep no memory that is not needed in every step; waits for what is in flight."""
        if self.shared is not None:
            self.shared.release_staging()

    def finish_in_background(self) -> None:
        """Have this rank's part of what is in flight done, though nobody here will wait for it."""
        if self.shared is not None:
            self.shared.finish_in_background()

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to add up a tensor over the ranks, in place."""
        if self.shared is not None and self.shared.takes(tensor):
            return self.shared.all_reduce(tensor)
        return WorkPending(self.process_group.allreduce([tensor], self._sum), tensor)

    def all_reduce_future(self, tensor: Tensor) -> "torch.futures.Future[list[Tensor]]":
        """The same, with a future of the list of the one tensor."""
        future: torch.futures.Future[list[Tensor]] = self.process_group.allreduce(
            [tensor], self._sum
        ).get_future()
        return future

    def all_gather(self, row: Tensor) -> Pending:
        """Begin to fetch every rank's row, a tensor of one row, in the order of the ranks."""
        return SegmentsPending([self._gather(segment) for segment in row.split(_SEGMENT_BYTES, dim=1)])

    def _gather(self, row: Tensor) -> Pending:
        rows = row.new_empty((self.size, row.shape[1]))
        return WorkPending(self.process_group._allgather_base(rows, row.contiguous()), rows)

    def all_to_all(self, rows: Tensor) -> Pending:
        """Begin to send row i to rank i; the result has the rows that came, in the order of the ranks."""
        return SegmentsPending([self._spread(segment) for segment in rows.split(_SEGMENT_BYTES, dim=1)])

    def _spread(self, rows: Tensor) -> Pending:
        rows = rows.contiguous()
        received = torch.empty_like(rows)
        return WorkPending(self.process_group.alltoall_base(received, rows, [], []), received)

    def broadcast(self, tensors: Sequence[Tensor], *, source: int, bytes_at_once: int) -> None:
        """Make tensors equal to those of one rank, many in one message."""
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        if tensors and self.shared is not None and on_cpu:
            self.shared.broadcast(tensors, source=source, bytes_at_once=bytes_at_once)
        elif tensors:
            distributed._broadcast_coalesced(  # type: ignore[attr-defined]
                self.process_group, list(tensors), bytes_at_once, source
            )

    def gather_bytes(self, own: bytes, device: torch.device) -> list[bytes]:
        """Every rank's bytes, of the same length on all."""
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(everyone, mine, group=self.process_group)
        return [bytes(theirs.tolist()) for theirs in everyone]

    def gather_objects(self, own: object) -> list[Any]:
        """Every rank's object."""
        everyone: list[Any] = [None] * self.size
        distributed.all_gather_object(everyone, own, group=self.process_group)
        return everyone

    def gather_objects_to(self, own: object, *, to: int) -> list[Any] | None:
        """Every rank's object, on one rank of the group; None on the others."""
        everyone: list[Any] | None = [None] * self.size if self.rank == to else None
        distributed.gather_object(own, everyone, group=self.process_group, group_dst=to)
        return everyone


def default_process_group() -> Any:
    """The group that init_process_group made; torch's error if there is none."""
    return c10d._get_default_group()


def is_default(process_group: Any) -> bool:
    """Whether this is the group that init_process_group made."""
    return distributed.is_initialized() and process_group == c10d._get_default_group()


def choose(process_group: Any, device_mesh: Any) -> Any:
    """The group that was asked for, by itself or as a mesh of one dimension; the default group if none."""
    if process_group is not None and device_mesh is not None:
        raise WrapError("Cannot specify both process_group and device_mesh arguments.")
    if process_group is not None and not belongs_to(process_group):
        raise OptionError("this rank is not in the process group that it is to average with")
    if device_mesh is None:
        return default_process_group() if process_group is None else process_group
    if device_mesh.ndim != 1:
        raise WrapError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)


def belongs_to(process_group: Any) -> bool:
    """Whether this process is a member of the group."""
    return not c10d._rank_not_in_group(process_group)


def is_grad_bucket_type(annotation: object) -> bool:
    """Whether an annotation names torch's own bucket type."""
    return annotation is distributed.GradBucket  # type: ignore[attr-defined]


def first_bucket_bytes() -> int:
    """What torch lets the first bucket hold."""
    return int(distributed._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]
