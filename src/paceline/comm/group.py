"""One process group, and the collectives on it that the rest of paceline uses."""

import ctypes
import functools
import pickle
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

from paceline import torch_private
from paceline.comm import python_groups
from paceline.comm.backend.process_group import PacelineGroup
from paceline.comm.host_leaders import HostLeaders
from paceline.comm.membership import own_membership
from paceline.comm.peer_notes import PeerNotes
from paceline.comm.pending import ChunksPending, NothingPending, OnSlow, Pending, ThenPending, WorkPending
from paceline.comm.shm.collectives import Scaling
from paceline.comm.shm.local_ranks import LocalRanks, host_id
from paceline.comm.shm.transport import SharedMemoryPending, SharedMemoryTransport, local_ranks_of
from paceline.errors import OptionError, StepError, WrapError
from paceline.recording.recorder import folder_from_environment
from paceline.watch.peers import Peers
from paceline.watch.rank_page import PageAddress
from paceline.watch.watcher import UNWATCHED, GroupWatch, watch_group

# Long messages of bytes are sent in chunks. When they are sent whole, in both directions at once,
# acknowledgements wait behind the other direction's data: 2.6 MB over 100 Mbit/s took 320 ms, and in chunks
# 220 ms, which is what the wire needs.
MESSAGE_CHUNK_BYTES = 256 * 1024
# How many names a rank has used in a process group, see Note [Names of wrappers]. Ranks may be threads of one
# process.
_names_used: "Counter[tuple[str, int, str]]" = Counter()
# How many groups of the same members were opened from a process group: the same number on each of them.
_opened: "weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]]" = weakref.WeakKeyDictionary()
# What this rank knows of the other ranks of each process group.
_peers: "weakref.WeakKeyDictionary[Any, Peers]" = weakref.WeakKeyDictionary()
_CPU = torch.device("cpu")


# Note [Names of wrappers]. Ranks find each other's notes by the name of the wrapper that they are about. One
# rank alone may copy a wrapper, or have made others before, so no rank may count for itself: while all ranks
# make a wrapper they agree on its number. A copy, which a rank makes by itself, is named after its original.


class Group:
    """One process group: rank, size, backend, and the collectives that data parallelism needs.

    Args:
        process_group: any ``torch.distributed.ProcessGroup``. Its name, store, timeout and backend are used
            if it has them; without a store, errors do not say which ranks are missing, nor why.
        ranks: its members' ranks in the default group, if a Group opened it, so that torch.distributed does
            not know it.

    Attributes:
        name: torch's name for the group, or one that only this process knows.
        may_change: whether its ranks may be others in each step, see ``python_groups.may_change``.
        shared: the shared memory that collectives go through; None if they go over the process group.
        host: the same ranks, for tensors in host memory, if this group is used for an accelerator's.
        wrapper: the name of the wrapper that uses it, the same on all ranks; empty until it has one.
        peer_notes: notes that ranks leave for each other when something goes wrong in the wrapper's step.
        group_notes: notes that are not about one wrapper alone.
    """

    def __init__(self, process_group: Any, *, ranks: Sequence[int] | None = None) -> None:
        self.process_group = process_group
        self._ranks = ranks
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.name = python_groups.name_of(process_group)
        self.may_change = python_groups.may_change(process_group)
        self.shared: SharedMemoryTransport | None = None
        self.host: Group | None = None
        self._read_timeout = functools.partial(torch_private.timeout_of, process_group)
        self._local_ranks: LocalRanks | None = None
        self._sum = c10d.AllreduceOptions()
        self._sum.reduceOp = distributed.ReduceOp.SUM  # type: ignore[assignment]
        self._store = process_group.get_group_store()
        self.group_notes = PeerNotes(self._store, self.name, rank=self.rank, size=self.size)
        self._use_name("")

    def agree_on_name(self, device: torch.device) -> None:
        """Name the wrapper that all ranks are making just now; every rank calls this at once.

        Args:
            device: where to send from.
        """
        key = self.name, self.rank, ""
        own = _names_used[key].to_bytes(8)
        everyone = self.gather_bytes(own, device) if self.size > 1 else [own]
        number = max(map(int.from_bytes, everyone))
        self._use_name(str(number))
        _names_used[key] = number + 1

    def name_copy(self, original: str) -> None:
        """Name a copy that this rank has made of a wrapper."""
        key = self.name, self.rank, original
        self._use_name(f"{original}-copy{_names_used[key]}")
        _names_used[key] += 1

    def _use_name(self, wrapper: str) -> None:
        self.wrapper = wrapper
        vars(self).pop("watch", None)  # ranks know it by the name
        self.peer_notes = PeerNotes(self._store, f"{self.name}/{wrapper}", rank=self.rank, size=self.size)

    @functools.cached_property
    def watch(self) -> GroupWatch:
        """Tells when this rank waits long for others, and for whom."""
        if self.size == 1 or self.may_change or not self._is_known or self._store is None:
            return UNWATCHED
        return watch_group(
            rank=self.global_rank,
            host=host_id(),
            folder=folder_from_environment(),
            make_peers=self._make_peers,
            wrapper=zlib.crc32(f"{self.name}/{self.wrapper}".encode()),
        )

    def _make_peers(self, own: PageAddress) -> Peers:
        if self.process_group not in _peers:
            _peers[self.process_group] = Peers(self._store, self.global_ranks, own)
        return _peers[self.process_group]

    @property
    def awaits_others(self) -> bool:
        """Whether this rank is alone only until it meets the others of a run that is healed."""
        membership = own_membership()
        return membership is not None and membership.roster is None

    def check_current(self) -> None:
        """Raise if the ranks of a run that is healed have gone on in another group."""
        if (membership := own_membership()) is not None:
            membership.check_current()

    @property
    def backend(self) -> str:
        """The backend's name, such as gloo; the class of a group that torch.distributed does not know."""
        if self._is_known:
            return str(distributed.get_backend(self.process_group))
        return type(self.process_group).__name__

    def count_ranks(self) -> int:
        """Ask a group whose ranks may change how many it has now; waits until they have met."""
        self.size = self.process_group.size()
        if not self.size:
            raise StepError(
                "the process group has no ranks yet; with torchft, start a quorum before backward, by "
                "manager.start_quorum() or by zero_grad() of its optimizer"
            )
        return self.size

    @property
    def gloo_threads(self) -> int:
        """The number of gloo's threads."""
        return torch_private.gloo_threads_of(self.process_group)

    @property
    def global_ranks(self) -> list[int]:
        """The members' ranks in the default group; in this group if torch.distributed does not know it."""
        if self._ranks is not None:
            return list(self._ranks)
        if self._is_known:
            return distributed.get_process_group_ranks(self.process_group)
        return list(range(max(self.size, 1)))

    @property
    def global_rank(self) -> int:
        """This rank as users know it."""
        return self.global_ranks[self.rank]

    def name_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Ranks of this group as users know them: their ranks in the default group."""
        known = self.global_ranks
        return [known[rank] for rank in ranks]

    @property
    def world(self) -> int:
        """The number of processes of the default group; of this one if torch.distributed does not know it."""
        return distributed.get_world_size() if self._is_known else max(self.size, 1)

    @property
    def _wants_calls(self) -> bool:
        """Whether somebody wrote the group's collectives in Python, to be called."""
        group = self.process_group
        return python_groups.is_in_python(group) and not isinstance(group, PacelineGroup)

    @property
    def _is_known(self) -> bool:
        """Whether torch.distributed made the group."""
        return torch_private.is_open(self.process_group)

    @property
    def timeout(self) -> timedelta:
        """How long ranks wait for each other."""
        return self._read_timeout()

    def share_memory(self, *, nbytes: int) -> None:
        """Reduce in shared memory from now on, where ranks share any; every rank calls this at once.

        Args:
            nbytes: how much shared memory each rank will need.
        """
        if self.size == 1 or not (self._is_known or self._ranks) or self._wants_calls:
            return
        if (local_ranks := local_ranks_of(self.process_group, self)) is None:
            return
        channel = local_ranks.open_channel(
            self, nbytes=nbytes, timeout=self.timeout.total_seconds(), names=self.global_ranks
        )
        if channel is not None:
            ranks = local_ranks.leader_ranks
            leaders = None if ranks is None else HostLeaders(self._open(ranks), self.name_ranks(ranks))
            self.shared = SharedMemoryTransport(channel, local_ranks, leaders)
            self._local_ranks = local_ranks

    def open_host_group(self, device: torch.device, *, share_memory: bool) -> None:
        """Open a group of the same ranks for tensors in host memory; every rank calls this at once.

        Args:
            device: where the tensors of this group's collectives are.
            share_memory: whether ranks of one host may use shared memory.
        """
        if self.size == 1 or not self._is_known or self.may_change:
            return
        host, problem = None, ""
        try:
            host = Group(self._open(range(self.size)), ranks=self.global_ranks)
        except RuntimeError as error:  # as when gloo finds no network
            problem = str(error)
        problems = self.gather_objects(problem, device)
        if host is None or any(problems):
            warnings.warn(
                "ranks tell each other about their steps on the device, and so wait for it in each step; "
                f"they cannot on the host: {next(filter(None, problems))}",
                stacklevel=2,
            )
            return
        self.host = host
        if share_memory:
            host.share_memory(nbytes=0)

    @property
    def may_tell_on_host(self) -> bool:
        """Whether ``all_reduce_on_host`` works though the group's other tensors are on an accelerator."""
        # One rank of a group that changes may be two in the next step, and the other has decided for itself.
        return (self.size == 1 and not self.may_change) or self.host is not None

    def open_leader_group(self) -> "Group | None":
        """A new group of the host leaders of this rank's number, one per host; all of them call this at once.

        None if this rank is no host leader, or if there is one host.
        """
        ranks = None if self._local_ranks is None else self._local_ranks.leader_ranks
        return None if ranks is None else Group(self._open(ranks), ranks=self.name_ranks(ranks))

    def open_for_messages(self, device: torch.device, *, name: str, timeout: timedelta) -> Any:
        """A process group of the same ranks for messages between two of them; every rank calls this at once.

        It is a new one where this one is gloo's: a message that is waited for in vain ends its process group.

        Args:
            device: where to send from.
            name: the same on all ranks, and never used before.
            timeout: how long to wait for the other ranks.
        """
        is_gloo = self._ranks is not None or self.backend == "gloo"
        if device.type != "cpu" or not is_gloo or self._wants_calls or self._store is None:
            return self.process_group
        store = distributed.PrefixStore(f"paceline/{name}", self._store)  # type: ignore[attr-defined]  # in no __all__ of torch
        return torch_private.open_gloo(store, rank=self.rank, size=self.size, timeout=timeout)

    def _open(self, ranks: Sequence[int]) -> Any:
        """Open a process group of some of the ranks, on gloo; only those ranks call this, all at once.

        It ends with whoever holds it.
        """
        if self._store is None:
            raise RuntimeError("the process group has no store where they could meet")
        members = tuple(ranks)
        opened = _opened.setdefault(self.process_group, Counter())
        opened[members] += 1
        name = f"paceline/{members}/{opened[members]}"
        return torch_private.open_gloo(
            distributed.PrefixStore(name, self._store),  # type: ignore[attr-defined]  # in no __all__ of torch
            rank=members.index(self.rank),
            size=len(members),
            timeout=self.timeout,
        )

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what will be reduced: shared memory if there is any."""
        shared = None
        if self.shared is not None and device.type == "cpu":
            shared = self.shared.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device) if shared is None else shared

    def make_progress(self) -> None:
        """Do what can be done without waiting, if there are other hosts, which wait for it."""
        if self.shared is not None and self.shared.hosts > 1:
            self.shared.make_progress()

    def release_staging(self) -> None:
        """Release memory that is not needed in every step; waits for what is in flight."""
        if self.shared is not None:
            self.shared.release_staging()

    def finish_in_background(self) -> None:
        """Do this rank's part of what is in flight, which nobody on this rank will wait for."""
        if self.shared is not None:
            self.shared.finish_in_background()
        if self.host is not None:
            self.host.finish_in_background()

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to add up a tensor over the ranks, in place."""
        if self.shared is not None and self.shared.takes(tensor):
            return self.shared.all_reduce(tensor)
        work = self.process_group.allreduce([tensor], self._sum)
        return WorkPending(work, tensor, self._read_timeout, drops_failures=self.may_change)

    @property
    def adds_neighbours_first(self) -> bool:
        """Whether ``all_reduce_scaled`` adds four ranks up as (0 + 1) + (2 + 3), and so on."""
        return self.size <= 2 or (self.shared is not None and self.shared.hosts == 1)

    def all_reduce_scaled(self, tensor: Tensor, scaling: Scaling) -> Pending:
        """Begin to add up a flat tensor over the ranks, in place, and multiply the sum's first elements."""
        if self.shared is not None and self.shared.hosts == 1 and self.shared.takes(tensor):
            return self.shared.all_reduce(tensor, scaling)
        summing = self.all_reduce(tensor) if self.size > 1 else NothingPending(tensor)
        return ThenPending(summing, lambda total: scaling.apply(total, 0))

    def change(self, pending: Pending, change: Callable[[], None]) -> bool:
        """Change what this rank has given to a reduction for which other ranks are late.

        Returns:
            False if all ranks have come, so that the reduction ends as it is. True also where nothing can be
            changed because no rank can end it: a process group that has timed out is closed.
        """
        return pending.change(change) if isinstance(pending, SharedMemoryPending) else True

    def give_up(self, pending: Pending) -> bool:
        """Have every rank fail in a reduction that others are late for; False if all ranks have come."""
        return pending.give_up() if isinstance(pending, SharedMemoryPending) else True

    def all_reduce_on_host(self, tensor: Tensor) -> Pending:
        """Begin to add up a tensor in host memory over the ranks, in place."""
        if self.host is not None:
            return self.host.all_reduce(tensor)
        return self.all_reduce(tensor) if self.size > 1 else NothingPending(tensor)

    def all_reduce_future(self, tensor: Tensor) -> "torch.futures.Future[list[Tensor]]":
        """As ``all_reduce``, but never in shared memory; the future has a list of the one tensor."""
        work = self.process_group.allreduce([tensor], self._sum)
        future: torch.futures.Future[list[Tensor]]
        try:
            future = work.get_future()
        except (NotImplementedError, RuntimeError):  # a work in Python need not have one
            future = torch.futures.Future()
            pending = WorkPending(work, tensor, self._read_timeout, drops_failures=self.may_change)
            future.set_result([pending.wait(lambda: None)])
        return future

    def all_gather(self, row: Tensor) -> Pending:
        """Begin to fetch every rank's row, a tensor of one row, in the order of the ranks."""
        return ChunksPending([self._gather_chunk(chunk) for chunk in row.split(MESSAGE_CHUNK_BYTES, dim=1)])

    def _gather_chunk(self, row: Tensor) -> Pending:
        rows = row.new_empty((self.size, row.shape[1]))
        if self._lacks("_allgather_base"):
            work = python_groups.all_gather(self.process_group, row.contiguous(), rows)
        else:
            work = self.process_group._allgather_base(rows, row.contiguous())
        return WorkPending(work, rows, self._read_timeout)

    def _lacks(self, method: str) -> bool:
        """Whether the group is written in Python and has no such method."""
        group = self.process_group
        return python_groups.is_in_python(group) and not python_groups.has_own(group, method)

    def all_to_all(self, rows: Tensor) -> Pending:
        """Begin to send row i to rank i; the result has the rows that came, in the order of the ranks."""
        chunks = rows.split(MESSAGE_CHUNK_BYTES, dim=1)
        return ChunksPending([self._exchange_chunk(chunk) for chunk in chunks])

    def _exchange_chunk(self, rows: Tensor) -> Pending:
        if self._lacks("alltoall_base"):
            return _OwnRows(self._gather_chunk(rows.reshape(1, -1)), self.rank, rows.shape)
        rows = rows.contiguous()
        received = torch.empty_like(rows)
        work = self.process_group.alltoall_base(received, rows, [], [])
        return WorkPending(work, received, self._read_timeout)

    def broadcast(self, tensors: Sequence[Tensor], *, source: int, bytes_at_once: int) -> None:
        """Make tensors equal to those of one rank, many in one message."""
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        if tensors and self.shared is not None and on_cpu:
            self.shared.broadcast(tensors, source=source, bytes_at_once=bytes_at_once)
        elif tensors and python_groups.is_in_python(self.process_group):
            python_groups.broadcast(self.process_group, tensors, source=source, bytes_at_once=bytes_at_once)
        elif tensors:
            torch_private.broadcast_coalesced(self.process_group, list(tensors), bytes_at_once, source)

    def gather_bytes(self, own: bytes, device: torch.device) -> list[bytes]:
        """Every rank's bytes, of the same length on all ranks."""
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
        everyone = self.all_gather(mine.view(1, -1)).wait(lambda: None).cpu().contiguous()
        joined = ctypes.string_at(everyone.data_ptr(), everyone.nbytes)
        return [joined[start : start + len(own)] for start in range(0, len(joined), len(own))]

    def gather_objects(self, own: object, device: torch.device = _CPU) -> list[Any]:
        """Every rank's object.

        Args:
            own: this rank's.
            device: where to send it from, if torch.distributed does not know the group and so its devices.
        """
        if self._is_known:
            everyone: list[Any] = [None] * self.size
            distributed.all_gather_object(everyone, own, group=self.process_group)
            return everyone
        mine = pickle.dumps(own)
        sizes = [int.from_bytes(theirs) for theirs in self.gather_bytes(len(mine).to_bytes(8), device)]
        texts = self.gather_bytes(mine.ljust(max(sizes), b"\0"), device)
        return [pickle.loads(text[:size]) for text, size in zip(texts, sizes, strict=True)]  # noqa: S301  # our own ranks'

    def gather_objects_to(self, own: object, *, to: int) -> list[Any] | None:
        """Every rank's object, on one rank of the group; None on the others."""
        if not self._is_known:
            gathered = self.gather_objects(own)
            return gathered if self.rank == to else None
        everyone: list[Any] | None = [None] * self.size if self.rank == to else None
        distributed.gather_object(own, everyone, group=self.process_group, group_dst=to)
        return everyone


class _OwnRows:
    """Of every rank's rows for everyone, those for this rank."""

    def __init__(self, gathered: Pending, rank: int, shape: torch.Size) -> None:
        self._gathered = gathered
        self._rank = rank
        self._shape = shape

    def wait(self, on_slow: OnSlow) -> Tensor:
        everyone: Tensor = self._gathered.wait(on_slow)
        return everyone.view(self._shape[0], *self._shape)[:, self._rank].contiguous()

    def done(self) -> bool:
        return self._gathered.done()


def default_process_group() -> Any:
    """The group that init_process_group made; raises torch's error if there is none."""
    return torch_private.default_process_group()


def is_default(process_group: Any) -> bool:
    """Whether this is the group that init_process_group made."""
    return distributed.is_initialized() and process_group == default_process_group()


def choose(process_group: Any, device_mesh: Any) -> Any:
    """The given group, or that of the given mesh of one dimension; the default group if neither is given."""
    if process_group is not None and device_mesh is not None:
        raise WrapError("Cannot specify both process_group and device_mesh arguments.")
    if process_group is not None and not belongs_to(process_group):
        raise OptionError("this rank is not a member of the given process group")
    if device_mesh is None:
        return default_process_group() if process_group is None else process_group
    if device_mesh.ndim != 1:
        raise WrapError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)


def belongs_to(process_group: Any) -> bool:
    """Whether this process is a member of the group."""
    return not torch_private.is_outside(process_group)
