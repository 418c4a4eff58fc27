"""A set of started ranks, seen from the caller."""

import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, auto
from multiprocessing.connection import wait
from pathlib import Path

from paceline.testing.forkserver import ForkServer
from paceline.testing.mailbox import Mailbox
from paceline.testing.rank import CALL, END_SIGNAL, Setup
from paceline.testing.remote import Call, Died, Outcome, Returned, unpack
from paceline.testing.tally import Deadline, Tally

# How long a rank may take to write down its stacks, or to end once its socket is closed.
END_SECONDS = 2.0
# How long the ranks may take to close their group, which is a matter of milliseconds.
LEAVE_SECONDS = 10.0


def deadline_in(seconds: float) -> Deadline:
    """The deadline so many seconds from now."""
    return Deadline(time.monotonic() + seconds, seconds)


class Ranks:
    """``world`` started ranks, each waiting for a call. After a failure they are ended and of no more use."""

    def __init__(self, world: int, *, backend: str | None, server: ForkServer, deadline: Deadline) -> None:
        self._mailbox = Mailbox(Path(tempfile.mkdtemp(dir=server.directory)))
        self._ranks: list[Rank] = []
        with self._ended_on_error():
            self._mailbox.setup.write_bytes(pickle.dumps(Setup.of_caller(world=world, backend=backend)))
            for index in range(world):
                self._ranks.append(Rank(index, self._mailbox, server))
            self._outcomes("joining the group", deadline)

    def call(self, call: Call, deadline: Deadline) -> list[object]:
        """What each rank returned for ``call``, in rank order."""
        with self._ended_on_error():
            self._mailbox.call.write_bytes(pickle.dumps(call))
            for rank in self._ranks:
                rank.wake()
            return self._outcomes(str(call), deadline)

    def leave(self) -> None:
        """Have the ranks close their group and exit."""
        with self._ended_on_error():
            for rank in self._ranks:
                rank.hang_up()
            self._outcomes("leaving the group", deadline_in(LEAVE_SECONDS))
        self.end()

    def end(self) -> None:
        """Kill the ranks that still run, and let go of all that they held."""
        for rank in self._ranks:
            rank.end()
        shutil.rmtree(self._mailbox.directory, ignore_errors=True)

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        """End the ranks on any error: theirs, or the caller's KeyboardInterrupt."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def _outcomes(self, what: str, deadline: Deadline) -> list[object]:
        """What the ranks answer next, if none fails and all are in time."""
        tally = Tally(len(self._ranks), deadline)
        self._collect(tally)
        if not tally.is_good:
            raise tally.error(what, self._dump_stacks())
        return tally.values()

    def _collect(self, tally: Tally) -> None:
        """Enter outcomes until all are in, or it is time to give up."""
        while (missing := tally.missing) and (left := tally.wait_until - time.monotonic()) > 0:
            ranks = [self._ranks[index] for index in missing]
            ready = wait([event for rank in ranks for event in rank.events], left)
            for rank in ranks:
                if any(event in ready for event in rank.events):
                    tally.add(rank.index, rank.outcome(), now=time.monotonic())

    def _dump_stacks(self) -> dict[int, str]:
        """Where each rank was, as it was ended."""
        running = [rank for rank in self._ranks if rank.is_running]
        for rank in running:
            rank.send(END_SIGNAL)
        until = time.monotonic() + END_SECONDS
        for rank in running:
            wait([rank.life], max(0.0, until - time.monotonic()))
        return {rank.index: rank.stacks() for rank in self._ranks}


class RankState(Enum):
    """Where a rank is in its life."""

    SERVING = auto()
    LEAVING = auto()
    ENDED = auto()


class Rank:
    """One started rank."""

    def __init__(self, index: int, mailbox: Mailbox, server: ForkServer) -> None:
        self.index = index
        self._mailbox = mailbox
        self._server = server
        self._state = RankState.SERVING
        with ExitStack() as on_error:
            self._channel, theirs = socket.socketpair()
            on_error.callback(self._channel.close)
            with theirs:
                self._pid = server.fork(mailbox, index, theirs)
            # Becomes readable when the process has ended, and never means another process.
            self.life = os.pidfd_open(self._pid)
            on_error.pop_all()

    @property
    def events(self) -> list[socket.socket | int]:
        """What becomes readable when there is an outcome."""
        return [self._channel, self.life]

    @property
    def is_running(self) -> bool:
        """Whether the rank has not been seen to end."""
        return self._state is not RankState.ENDED

    def wake(self) -> None:
        """Point the rank to the call in the mailbox."""
        with suppress(OSError):  # If it is dead, its outcome will say so.
            self._channel.sendall(CALL)

    def hang_up(self) -> None:
        """Ask the rank to leave the group and exit."""
        self._state = RankState.LEAVING
        with suppress(OSError):  # As in wake.
            self._channel.shutdown(socket.SHUT_WR)

    def outcome(self) -> Outcome:
        """The rank's answer, or how it died."""
        if self._has_answered():
            return unpack(self._mailbox.answer(self.index).read_bytes())
        is_leaving = self._state is RankState.LEAVING
        wait([self.life], END_SECONDS)
        exit_code = self.end()
        return Returned(None) if is_leaving and exit_code == 0 else Died(exit_code)

    def _has_answered(self) -> bool:
        try:
            # A dead rank's socket may be held open by a process that it started, so do not block on it.
            return self._channel.recv(1, socket.MSG_DONTWAIT) != b""
        except OSError:
            return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank, which may have ended unseen."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.life, number)

    def stacks(self) -> str:
        """What the rank wrote about its threads when it ended; empty if it could not."""
        file = self._mailbox.stacks(self.index)
        return file.read_text(errors="replace") if file.exists() else ""

    def end(self) -> int:
        """Kill the rank if it still runs, and let go of all that it held; returns its exit code."""
        if self.is_running:
            self.send(signal.SIGKILL)
            wait([self.life])
            self._exit_code = self._server.reap(self._pid)
            os.close(self.life)
            self._channel.close()
            self._state = RankState.ENDED
        return self._exit_code
