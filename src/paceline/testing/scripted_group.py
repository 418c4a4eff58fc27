"""A process group in one process, whose other ranks are a script."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.comm.peer_notes import PeerNotes
from paceline.comm.pending import Pending, ThenPending
from paceline.comm.shm.collectives import Scaling
from paceline.errors import LateRankError
from paceline.watch.watcher import UNWATCHED

# How often a wait for a rank that never comes calls ``on_slow`` before it raises.
_CALLS_BEFORE_TIMEOUT = 3
_CPU = torch.device("cpu")
_numbers = itertools.count()


@dataclass(frozen=True)
class ScriptedCall:
    """One collective that this rank called.

    Attributes:
        number: its place in the group's ``calls``, from 0.
        kind: the name of the group's method, such as "all_reduce".
        given: a copy of what this rank gave: a tensor, a list of tensors, bytes or an object.
        root: the rank that a broadcast starts from or objects are gathered to; None for other kinds.
    """

    number: int
    kind: str
    given: Any
    root: int | None = None


@dataclass(frozen=True)
class ScriptedReply:
    """What the other ranks do in one collective.

    Attributes:
        given: what each other rank gives, in rank order without this rank; None for the default.
        asks: the result is there when it is asked for this many times. Each call of ``done`` counts, and
            each time that ``wait`` finds it missing and calls ``on_slow``. With ``math.inf`` it never comes:
            ``wait`` calls ``on_slow`` three times and raises ``LateRankError``.
        error: what ``wait`` raises when the result is there; None for none.
    """

    given: Sequence[Any] | None = None
    asks: float = 1
    error: Exception | None = None


#: The reply of ranks that never come.
NEVER = ScriptedReply(asks=math.inf)

# A sequence stands for a reply with nothing but values, None for the default reply.
Script: TypeAlias = Callable[[ScriptedCall], ScriptedReply | Sequence[Any] | None]


class ScriptedGroup:
    """Stands in for a ``Group`` of several ranks, of which only one exists: tests need no processes.

    The script is called once per collective, when this rank calls it, and returns what each of the other
    ranks gives: the argument that it would call the same method with. By default the other ranks give zeros
    to a sum, and to every other collective they give what this rank gives. An exception that the script
    raises is raised by the call itself; one in a reply is raised by ``wait``.

    A tensor holds the result of a sum only once ``wait`` has returned or ``done`` has returned True, so code
    that reads it earlier is found out. Results can be awaited in any order. Methods that return the result
    itself raise at once if it never comes.

    For example, of three ranks, rank 1 gives ones and rank 2 never comes to the second sum::

        def others(call):
            return [torch.ones(3), torch.zeros(3)] if call.number == 0 else NEVER

        group = ScriptedGroup(rank=0, size=3, others=others)

    Args:
        rank: this rank.
        size: the number of ranks.
        others: the script; None for the default reply to every call.
        name: the group's name; by default each group has its own.
        backend: the name of the backend.
        timeout: how long ranks would wait for each other.
        global_ranks: the members' ranks in the default group.
        may_change: whether ranks may be others in each step; set ``size`` to change their number.

    Attributes:
        calls: the collectives that this rank called, in order.
        waits: the numbers of the collectives that this rank waited for, in the order of the first waits.
        local_calls: the names of the other methods that were called, in order.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 2,
        others: Script | None = None,
        *,
        name: str | None = None,
        backend: str = "gloo",
        timeout: timedelta = timedelta(minutes=30),
        global_ranks: Sequence[int] | None = None,
        may_change: bool = False,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be between 0 and size - 1 (rank: {rank}, size: {size})")
        self.rank = rank
        self.size = size
        self.name = f"scripted-{next(_numbers)}" if name is None else name
        self.backend = backend
        self.timeout = timeout
        self.global_ranks = list(range(size) if global_ranks is None else global_ranks)
        self.world = max(size, *(member + 1 for member in self.global_ranks))
        self.gloo_threads = 1
        self.adds_neighbours_first = size <= 3
        self.process_group: Any = _NoProcessGroup()
        self.may_change = may_change
        self.shared: Any = None
        self.host: Any = None
        self.may_tell_on_host = True
        self.awaits_others = False
        self.calls: list[ScriptedCall] = []
        self.waits: list[int] = []
        self.local_calls: list[str] = []
        self.wrapper = ""
        self._others = others
        self._store = _DictStore()
        self.peer_notes = self.group_notes = self.notes_of(rank)
        self.watch = UNWATCHED

    def notes_of(self, rank: int) -> PeerNotes:
        """The notes as another rank writes and reads them."""
        return PeerNotes(self._store, self.name, rank=rank, size=self.size)

    @property
    def global_rank(self) -> int:
        """This rank's in the default group."""
        return self.global_ranks[self.rank]

    def name_ranks(self, ranks: Iterable[int]) -> list[int]:
        """The members' ranks in the default group."""
        return [self.global_ranks[rank] for rank in ranks]

    def agree_on_name(self, device: torch.device) -> None:  # noqa: ARG002
        """Is noted in ``local_calls``: there is one wrapper at most."""
        self.local_calls.append("agree_on_name")

    def name_copy(self, original: str) -> None:
        """Name a copy of the wrapper."""
        self.wrapper = f"{original}-copy"

    def count_ranks(self) -> int:
        """The number of ranks now."""
        return self.size

    def change(self, pending: Pending, change: Callable[[], None]) -> bool:  # noqa: ARG002
        """Change this rank's tensor: a rank that the script lets never come has read nothing."""
        change()
        return True

    def give_up(self, pending: Pending) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def all_reduce_on_host(self, tensor: Tensor) -> "ScriptedPending":
        """As ``all_reduce``."""
        return self.all_reduce(tensor)

    def all_reduce(self, tensor: Tensor) -> "ScriptedPending":
        """Begin to add up a tensor over the ranks, in place."""

        def finish(everyone: list[Any]) -> Tensor:
            total = everyone[0].clone()
            for theirs in everyone[1:]:
                total += theirs
            with torch.no_grad():
                return tensor.copy_(total)

        return self._begin("all_reduce", tensor.detach().clone(), finish, default=torch.zeros_like)

    def all_reduce_scaled(self, tensor: Tensor, scaling: Scaling) -> Pending:
        """Begin to add up a flat tensor over the ranks, in place, and multiply the sum's first elements."""
        return ThenPending(self.all_reduce(tensor), lambda total: scaling.apply(total, 0))

    def all_reduce_future(self, tensor: Tensor) -> "torch.futures.Future[list[Tensor]]":
        """As ``all_reduce``, with a future, which is set at once unless the result never comes."""
        pending = self.all_reduce(tensor)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        if pending.reply.error is not None:
            future.set_exception(pending.reply.error)  # type: ignore[arg-type]  # declared for results
        elif not math.isinf(pending.reply.asks):
            future.set_result([pending.wait(_do_nothing)])
        return future

    def all_gather(self, row: Tensor) -> "ScriptedPending":
        """Begin to fetch every rank's row, a tensor of one row, in the order of the ranks."""
        return self._begin("all_gather", row.detach().clone(), torch.cat)

    def all_to_all(self, rows: Tensor) -> "ScriptedPending":
        """Begin to send row i to rank i; the result has the rows that came, in the order of the ranks."""

        def finish(everyone: list[Any]) -> Tensor:
            return torch.stack([theirs[self.rank] for theirs in everyone])

        return self._begin("all_to_all", rows.detach().clone(), finish)

    def broadcast(self, tensors: Sequence[Tensor], *, source: int, bytes_at_once: int) -> None:  # noqa: ARG002
        """Make tensors equal to those of one rank."""

        def finish(everyone: list[Any]) -> None:
            with torch.no_grad():
                for tensor, theirs in zip(tensors, everyone[source], strict=True):
                    tensor.copy_(theirs)

        given = [tensor.detach().clone() for tensor in tensors]
        self._begin("broadcast", given, finish, root=source).wait(_do_nothing)

    def gather_bytes(self, own: bytes, device: torch.device) -> list[bytes]:  # noqa: ARG002
        """Every rank's bytes."""
        gathered: list[bytes] = self._begin("gather_bytes", own, list).wait(_do_nothing)
        return gathered

    def gather_objects(self, own: object, device: torch.device = _CPU) -> list[Any]:  # noqa: ARG002
        """Every rank's object."""
        gathered: list[Any] = self._begin("gather_objects", own, list).wait(_do_nothing)
        return gathered

    def gather_objects_to(self, own: object, *, to: int) -> list[Any] | None:
        """Every rank's object, on one rank of the group; None on the others."""
        gathered: list[Any] = self._begin("gather_objects_to", own, list, root=to).wait(_do_nothing)
        return gathered if self.rank == to else None

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is to be reduced."""
        return torch.empty(numel, dtype=dtype, device=device)

    def open_host_group(self, device: torch.device, *, share_memory: bool) -> None:  # noqa: ARG002
        """Tensors in host memory are added up as any others."""
        self.local_calls.append("open_host_group")

    def share_memory(self, *, nbytes: int) -> None:  # noqa: ARG002
        """Is noted in ``local_calls``; ``shared`` stays None."""
        self.local_calls.append("share_memory")

    def open_leader_group(self) -> None:
        """Is noted in ``local_calls``: all ranks are on one host."""
        self.local_calls.append("open_leader_group")

    def open_for_messages(self, device: torch.device, *, name: str, timeout: timedelta) -> Any:  # noqa: ARG002
        """Is noted in ``local_calls``: nobody answers messages."""
        self.local_calls.append("open_for_messages")
        return self.process_group

    def check_current(self) -> None:
        """Does nothing: the ranks are never replaced."""

    def make_progress(self) -> None:
        """Is noted in ``local_calls``."""
        self.local_calls.append("make_progress")

    def release_staging(self) -> None:
        """Is noted in ``local_calls``."""
        self.local_calls.append("release_staging")

    def finish_in_background(self) -> None:
        """Is noted in ``local_calls``."""
        self.local_calls.append("finish_in_background")

    def _begin(
        self,
        kind: str,
        given: Any,
        finish: Callable[[list[Any]], Any],
        *,
        root: int | None = None,
        default: Callable[[Any], Any] = lambda given: given,
    ) -> "ScriptedPending":
        call = ScriptedCall(len(self.calls), kind, given, root)
        self.calls.append(call)
        reply = None if self._others is None else self._others(call)
        if not isinstance(reply, ScriptedReply):
            reply = ScriptedReply(reply)
        others = [default(given)] * (self.size - 1) if reply.given is None else list(reply.given)
        if len(others) != self.size - 1:
            raise ValueError(
                f"the script must give one value for each of the {self.size - 1} other ranks "
                f"(values: {len(others)}, call: {call.number}, {kind})"
            )
        everyone = [*others[: self.rank], given, *others[self.rank :]]
        return ScriptedPending(self, call, reply, lambda: finish(everyone))


class ScriptedPending:
    """A collective of a ``ScriptedGroup`` that has been called.

    Args:
        group: the group.
        call: what was called.
        reply: what the script said.
        finish: makes the result.
    """

    def __init__(
        self, group: ScriptedGroup, call: ScriptedCall, reply: ScriptedReply, finish: Callable[[], Any]
    ) -> None:
        self.reply = reply
        self._group = group
        self._call = call
        self._finish = finish
        self._asked = 0
        self._results: list[Any] = []

    def wait(self, on_slow: Callable[[], None]) -> Any:
        """Wait for the result; ``on_slow`` is called each time that it is not there yet, and may raise."""
        if self._call.number not in self._group.waits:
            self._group.waits.append(self._call.number)
        calls = 0
        while not self.done():
            if calls == _CALLS_BEFORE_TIMEOUT and math.isinf(self.reply.asks):
                self._raise_timeout()
            on_slow()
            calls += 1
        if self.reply.error is not None:
            raise self.reply.error
        return self._results[0]

    def done(self) -> bool:
        """Whether the result is there, or the error."""
        if self._asked < self.reply.asks:
            self._asked += 1
        if self._asked < self.reply.asks:
            return False
        if not self._results and self.reply.error is None:
            self._results.append(self._finish())
        return True

    def _raise_timeout(self) -> None:
        seconds = self._group.timeout.total_seconds()
        raise LateRankError(
            f"a collective did not end within the timeout of {seconds:g} s "
            f"(call: {self._call.number}, {self._call.kind}, here: rank {self._group.rank})"
        )


class _NoProcessGroup:
    """What a group's process group is, where that is used as a key."""


class _DictStore:
    """What ``PeerNotes`` needs of a store. It waits for nobody: there is no other rank that could write."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, text: str) -> None:
        self._values[key] = text.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        if not self.check(keys):
            raise RuntimeError(f"keys were not set within the timeout of {timeout} (keys: {list(keys)})")


def _do_nothing() -> None:
    """For waits that nobody looks into."""
