"""The processes of this host's ranks and whatever they started: how they ended, and how to stop them."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.tools.run import worker
from paceline.tools.run.failures import RankFailure, was_stopped
from paceline.tools.run.rank_output import OutputThread
from paceline.tools.run.worker import FOLDER

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
TERM_SECONDS = 0.8
KILL_SECONDS = 1.0
POLL_SECONDS = 0.01


class RankProcesses:
    """The processes of one attempt, by rank.

    Args:
        output: tells when a process has ended.
        folder: where the ranks of this attempt write their error reports.
        owns_all_children: whether all children of this process are ranks or were started by ranks.
    """

    def __init__(self, output: OutputThread, folder: Callable[[], Path], *, owns_all_children: bool) -> None:
        self._output = output
        self._folder = folder
        self._parent = os.getpid() if owns_all_children else None
        self._older_pids = frozenset(list_processes())
        self._sessions: set[int] = set()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended_at: dict[int, float] = {}
        self._asked_to_stop_at: float | None = None

    def started(self, running: Mapping[int, "subprocess.Popen[bytes]"]) -> None:
        """Note a new attempt's processes, each the leader of its session."""
        self._running, self._ended_at, self._asked_to_stop_at = dict(running), {}, None
        for rank, process in running.items():
            self._sessions.add(process.pid)
            self._output.call_when_ended(process.pid, lambda rank=rank: self._note_end(rank))  # type: ignore[misc]

    def asked_to_stop(self) -> None:
        """From now on, ranks may end because they were asked to."""
        # On a busy host the news that a rank has ended comes late.
        for rank, process in self._running.items():
            if process.poll() is not None:
                self._note_end(rank)
        self._asked_to_stop_at = self._asked_to_stop_at or time.time()

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the ranks and all that they started: by SIGTERM, unless ``at_once``, and then by SIGKILL."""
        if not at_once:
            _send(self._find(), signal.SIGTERM)
            if self._wait_until_gone(TERM_SECONDS, None):
                return
        self._wait_until_gone(KILL_SECONDS, signal.SIGKILL)

    def failures(self) -> list[RankFailure]:
        """The ranks of the last attempt whose exit code is not 0."""
        codes = {rank: process.poll() for rank, process in self._running.items()}
        return [self._failure(rank, code) for rank, code in codes.items() if code]

    def _wait_until_gone(self, seconds: float, signum: signal.Signals | None) -> bool:
        """Wait until no process is left, sending ``signum`` to those that are."""
        until = time.monotonic() + seconds
        while found := self._find():
            if signum is not None:
                _send(found, signum)
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _find(self) -> set[int]:
        mark = f"{FOLDER}={self._folder()}"
        return find_processes(self._sessions, mark=mark, parent=self._parent, older_pids=self._older_pids)

    def _note_end(self, rank: int) -> None:
        self._ended_at.setdefault(rank, time.time())

    def _failure(self, rank: int, code: int) -> RankFailure:
        report = self._error_report(rank)
        code = report.get("code", code)
        at = report.get("time") or self._ended_at.get(rank) or time.time()
        return RankFailure(
            rank=rank,
            host=socket.gethostname(),
            pid=self._running[rank].pid,
            time=at,
            exit_code=code,
            kind=report.get("kind", ""),
            message=report.get("message", ""),
            trace=report.get("trace", "") or self._crash_trace(rank),
            origins=report.get("origins", ()),
            was_stopped=was_stopped(code, at=at, asked_at=self._asked_to_stop_at),
        )

    def _error_report(self, rank: int) -> dict[str, Any]:
        try:
            report: dict[str, Any] = json.loads((self._folder() / f"{rank}.json").read_text())
        except FileNotFoundError:
            return {}
        return report

    def _crash_trace(self, rank: int) -> str:
        """What faulthandler wrote when a signal such as SIGSEGV killed the rank."""
        try:
            trace = (self._folder() / f"{rank}.crash").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "".join(line for line in trace.splitlines(keepends=True) if worker.__file__ not in line)


@contextmanager
def child_subreaper() -> Iterator[None]:
    """While it lasts, orphans below this process become its children, and not init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


@dataclass(frozen=True)
class ProcessEntry:
    """One process in /proc."""

    pid: int
    parent: int
    session: int
    state: str


def list_processes() -> dict[int, ProcessEntry]:
    """All processes that can be seen, by pid."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                # The name, in parentheses, may contain anything.
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                processes[int(entry.name)] = ProcessEntry(int(entry.name), int(parent), int(session), state)
    return processes


def find_processes(
    sessions: set[int], *, mark: str, parent: int | None, older_pids: frozenset[int]
) -> set[int]:
    """Running processes of ranks: in their sessions, with ``mark`` in their environment, or below those.

    Children of ``parent`` count too. ``older_pids``, which existed before the ranks, do not. Orphans that
    have ended are reaped.
    """
    processes = {pid: process for pid, process in list_processes().items() if pid not in older_pids}
    found = {pid for pid, process in processes.items() if process.session in sessions or _has_mark(pid, mark)}
    found |= {pid for pid, process in processes.items() if process.parent == parent}
    while below := {pid for pid, process in processes.items() if process.parent in found} - found:
        found |= below
    for pid in found - sessions:
        if processes[pid].state == "Z" and processes[pid].parent == os.getpid():
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return {pid for pid in found if processes[pid].state not in "ZX"}


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False


def _send(pids: set[int], signum: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
