"""Run functions on ranks: once on fresh ranks, or many times on kept ones."""

import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, auto
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from paceline.testing import forkserver
from paceline.testing.forkserver import ForkServer
from paceline.testing.messages import Call, Died, RankAnswer, RankFiles, Returned, unpack
from paceline.testing.rank_answers import Deadline, RankAnswers
from paceline.testing.rank_process import CALL, END_SIGNAL, RankSetup
from paceline.watch.stacks import signal_thread

T = TypeVar("T")

# How long a rank may take to write its stacks, or to end once its socket is closed.
END_SECONDS = 2.0
# How long the ranks may take to close their group, which is a matter of milliseconds.
CLOSE_SECONDS = 10.0


def run_ranks(
    fn: Callable[..., T],
    world: int = 2,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 60.0,
    backend: str | None = "gloo",
) -> list[T]:
    """Call ``fn(rank, *args)`` on ``world`` fresh ranks, and return what each returned, in rank order.

    Each rank is a process of its own, with a process group open and one torch thread.

    Args:
        fn: A function at the top level of a module, or of a program guarded by ``if __name__ == "__main__"``.
        world: How many ranks.
        args: The arguments of ``fn`` after the rank. They and the results are pickled by value.
        timeout: After this many seconds every rank's stacks are collected and the ranks are killed.
        backend: The process group's backend; None for no process group.

    Raises:
        RanksError: A rank raised, died, or did not finish in time.
    """
    with RankPool(world, timeout=timeout, backend=backend) as pool:
        return pool.run(fn, *args)


class PoolState(Enum):
    """Whether a pool takes calls."""

    OPEN = auto()
    CLOSED = auto()


class RankPool:
    """Ranks that are kept, with their process group, from one call to the next.

    They are started at the first call. A call that fails costs the pool its ranks, which may be out of
    step with each other by then; the next call starts new ones. The arguments are those of ``run_ranks``.
    """

    def __init__(self, world: int = 2, *, timeout: float = 60.0, backend: str | None = "gloo") -> None:
        if world < 1:
            raise ValueError(f"world must be positive (world: {world})")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive (timeout: {timeout})")
        self._world = world
        self._timeout = timeout
        self._backend = backend
        self._state = PoolState.OPEN
        self._ranks: StartedRanks | None = None

    def run(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Call ``fn(rank, *args)`` on every rank, and return what each returned, in rank order."""
        if self._state is PoolState.CLOSED:
            raise RuntimeError("the pool is closed: open a new one")
        call = Call.of(fn, args)
        # Its start does not count against the timeout: torch's import can take long on a cold machine.
        server = forkserver.current()
        deadline = _deadline_in(self._timeout)
        # The ranks are put back only if the call succeeds.
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            ranks = StartedRanks(self._world, backend=self._backend, server=server, deadline=deadline)
        results = ranks.call(call, deadline)
        self._ranks = ranks
        return cast("list[T]", results)

    def close(self) -> None:
        """End the ranks; a second time does nothing."""
        self._state = PoolState.CLOSED
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _deadline_in(seconds: float) -> Deadline:
    return Deadline(time.monotonic() + seconds, seconds)


class StartedRanks:
    """``world`` running ranks, each waiting for a call. After a failure they are ended and of no more use."""

    def __init__(self, world: int, *, backend: str | None, server: ForkServer, deadline: Deadline) -> None:
        self._files = RankFiles(Path(tempfile.mkdtemp(dir=server.directory)))
        self._ranks: list[RankHandle] = []
        with self._ended_on_error():
            self._files.setup.write_bytes(pickle.dumps(RankSetup.of_caller(world=world, backend=backend)))
            for index in range(world):
                self._ranks.append(RankHandle(index, self._files, server))
            self._answers("joining the group", deadline)

    def call(self, call: Call, deadline: Deadline) -> list[object]:
        """What each rank returned for ``call``, in rank order."""
        with self._ended_on_error():
            self._files.call.write_bytes(pickle.dumps(call))
            for rank in self._ranks:
                rank.wake()
            return self._answers(str(call), deadline)

    def close(self) -> None:
        """Have the ranks close their group and exit."""
        with self._ended_on_error():
            for rank in self._ranks:
                rank.request_exit()
            self._answers("leaving the group", _deadline_in(CLOSE_SECONDS))
        self.end()

    def end(self) -> None:
        """Kill the ranks that still run, and free what they used."""
        for rank in self._ranks:
            rank.end()
        shutil.rmtree(self._files.directory, ignore_errors=True)

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        """End the ranks on any error: theirs, or the caller's KeyboardInterrupt."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def _answers(self, what: str, deadline: Deadline) -> list[object]:
        """What the ranks return next, if none fails and all are in time."""
        answers = RankAnswers(len(self._ranks), deadline)
        self._collect(answers)
        if not answers.all_returned:
            raise answers.error(what, self._dump_stacks())
        return answers.values()

    def _collect(self, answers: RankAnswers) -> None:
        """Add answers until all are there, or the time is over."""
        while (missing := answers.missing) and (left := answers.wait_until - time.monotonic()) > 0:
            ranks = [self._ranks[index] for index in missing]
            ready = wait([event for rank in ranks for event in rank.events], left)
            for rank in ranks:
                if any(event in ready for event in rank.events):
                    answers.add(rank.index, rank.answer(), now=time.monotonic())

    def _dump_stacks(self) -> dict[int, str]:
        """End the ranks; returns the stacks of each."""
        running = [rank for rank in self._ranks if rank.is_running]
        # Stopped until all have the signal: otherwise a rank sees that another one is gone, and leaves the
        # line that it waited in before it writes its stacks.
        for rank in running:
            rank.send(signal.SIGSTOP)
        for rank in running:
            rank.ask_for_stacks()
        for rank in running:
            rank.send(signal.SIGCONT)
        until = time.monotonic() + END_SECONDS
        for rank in running:
            wait([rank.pidfd], max(0.0, until - time.monotonic()))
        return {rank.index: rank.stacks() for rank in self._ranks}


class RankState(Enum):
    """Whether a rank answers calls, was asked to exit, or has ended."""

    SERVING = auto()
    CLOSING = auto()
    ENDED = auto()


class RankHandle:
    """One running rank, as its caller sees it."""

    def __init__(self, index: int, files: RankFiles, server: ForkServer) -> None:
        self.index = index
        self._files = files
        self._server = server
        self._state = RankState.SERVING
        with ExitStack() as on_error:
            self._channel, theirs = socket.socketpair()
            on_error.callback(self._channel.close)
            with theirs:
                self._pid = server.fork(files, index, theirs)
            # Becomes readable when the process has ended, and never means another process.
            self.pidfd = os.pidfd_open(self._pid)
            on_error.pop_all()

    @property
    def events(self) -> list[socket.socket | int]:
        """What becomes readable when there is an answer."""
        return [self._channel, self.pidfd]

    @property
    def is_running(self) -> bool:
        """Whether the rank has not been seen to end."""
        return self._state is not RankState.ENDED

    def wake(self) -> None:
        """Tell the rank that there is a call."""
        with suppress(OSError):  # If it is dead, its answer will say so.
            self._channel.sendall(CALL)

    def request_exit(self) -> None:
        """Ask the rank to close its group and exit."""
        self._state = RankState.CLOSING
        with suppress(OSError):  # As in wake.
            self._channel.shutdown(socket.SHUT_WR)

    def answer(self) -> RankAnswer:
        """The rank's answer, or how it died."""
        if self._has_answered():
            return unpack(self._files.answer(self.index).read_bytes())
        is_closing = self._state is RankState.CLOSING
        wait([self.pidfd], END_SECONDS)
        exit_code = self.end()
        return Returned(None) if is_closing and exit_code == 0 else Died(exit_code)

    def _has_answered(self) -> bool:
        try:
            # A dead rank's socket may be held open by a process that it started, so do not block on it.
            return self._channel.recv(1, socket.MSG_DONTWAIT) != b""
        except OSError:
            return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank, which may have ended already."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def ask_for_stacks(self) -> None:
        """Tell the rank to write its stacks and end."""
        # To its main thread, which then runs nothing else before; the process is not reaped yet.
        if not signal_thread(self._pid, self._pid, END_SIGNAL):
            self.send(END_SIGNAL)

    def stacks(self) -> str:
        """The stacks that the rank wrote when it ended; empty if it could not."""
        file = self._files.stacks(self.index)
        return file.read_text(errors="replace") if file.exists() else ""

    def end(self) -> int:
        """Kill the rank if it still runs, and free what it used; returns its exit code."""
        if self.is_running:
            self.send(signal.SIGKILL)
            wait([self.pidfd])
            self._exit_code = self._server.reap(self._pid)
            os.close(self.pidfd)
            self._channel.close()
            self._state = RankState.ENDED
        return self._exit_code
