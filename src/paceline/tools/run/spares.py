"""Processes that have imported what the script needs, and wait to take the place of lost ranks.

Note [Forked spares]. To import torch takes seconds. So a spare does not become a rank itself: it forks one,
and waits on. The fork's parent is to be the launcher, which has to know how it ends, so it is forked twice:
the process in between ends, and the launcher is the next parent above that takes orphans. A spare that has
threads cannot be forked. Then it becomes the rank, and another spare is started.
"""

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from paceline.tools.run import worker

# How long a spare may take to import everything; one that is stopped, or blocked, is replaced.
_IMPORT_SECONDS = 120.0
# How long a spare that has imported everything may take to fork.
_FORK_SECONDS = 5.0
_POLL_SECONDS = 0.02


class RankProcess(Protocol):
    """A process of a rank, as far as it is needed here."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Its exit code; None if it has not ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; returns its exit code."""


class AdoptedProcess:
    """A process that became a child of this one when its parent ended.

    Args:
        pid: its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None if it has not ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; returns its exit code."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code


class _Spare:
    """A process that waits.

    Args:
        process: the process, with pipes for its input and output.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self._is_ready = False
        self._until = time.monotonic() + _IMPORT_SECONDS

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything."""
        self._is_ready = self._is_ready or self._answer(0.0) is not None
        return self._is_ready

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or will never be ready."""
        is_late = not self._is_ready and time.monotonic() > self._until
        return self.process.poll() is not None or is_late

    def fork(self, order: bytes) -> int | None:
        """Have it fork a rank, or become one; returns the rank's pid. None if it does not answer."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended
            self.process.stdin.write(order)
            self.process.stdin.flush()
            answer = self._answer(_FORK_SECONDS)
            return None if answer is None else int(answer)
        return None

    def _answer(self, seconds: float) -> bytes | None:
        """The next line that it says; None if it says nothing, or has ended."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if readable else b""
        return line.strip() or None

    def close(self) -> None:
        """Have nothing more to do with it."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.close()


class Spares:
    """Keeps some processes ready.

    Args:
        command: the command line of a rank.
        environment: tells the variables that all ranks have in common.
        number: how many are kept ready; with none, no rank is replaced.
    """

    def __init__(
        self, command: Sequence[str], environment: Callable[[], Mapping[str, str]], number: int
    ) -> None:
        at = command.index(worker.__file__) + 1
        self._command = [*command[:at], "--spare", *command[at:]]
        self._environment = environment
        self._number = number
        self._waiting: list[_Spare] = []

    @property
    def can_replace(self) -> bool:
        """Whether lost ranks are replaced at all."""
        return self._number > 0

    def fill(self) -> None:
        """Start as many as are missing."""
        for spare in [each for each in self._waiting if each.is_gone]:
            spare.end()
            self._waiting.remove(spare)
        while len(self._waiting) < self._number:
            self._waiting.append(self._start())

    def take(self, environment: Mapping[str, str], stdout: str, stderr: str) -> RankProcess | None:
        """A new process that is the rank with this environment, and prints to these files.

        None if no spare is ready yet.
        """
        self.fill()
        order = {"environment": dict(environment), "output": [stdout, stderr], "launcher": os.getpid()}
        for spare in [each for each in self._waiting if each.is_ready]:
            pid = spare.fork(json.dumps(order).encode() + b"\n")
            if pid == spare.process.pid:  # it has become the rank itself
                self._waiting.remove(spare)
                spare.close()
                return spare.process
            if pid is not None:
                return AdoptedProcess(pid)
            self._waiting.remove(spare)
            spare.end()
        return None

    def stop(self) -> None:
        """End those that wait."""
        for spare in self._waiting:
            spare.end()
        self._waiting = []

    def _start(self) -> _Spare:
        process = subprocess.Popen(  # noqa: S603 - the command of a rank
            self._command,
            env={**os.environ, **self._environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        return _Spare(process)
