"""The processes of this host's ranks and whatever they started: how they ended, and how to stop them."""

import ctypes
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.tools.run import worker
from paceline.tools.run.failures import FailureSummary, RankFailure, summarise, was_stopped
from paceline.tools.run.processes import (
    ENDED,
    ProcessEntry,
    ProcessId,
    end_processes,
    in_sessions,
    list_processes,
    read_process,
    remaining_sessions,
    with_descendants,
    with_mark,
)
from paceline.tools.run.rank_output import OutputThread
from paceline.tools.run.spares import RankProcess
from paceline.tools.run.worker import FOLDER

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


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
        self._older = frozenset(process.id for process in list_processes().values())
        # The leaders of the ranks' sessions.
        self._sessions: set[ProcessId] = set()
        self._running: dict[int, RankProcess] = {}
        self._ended_at: dict[int, float] = {}
        self._asked_to_stop_at: float | None = None

    def started(self, running: Mapping[int, RankProcess]) -> None:
        """Note a new attempt's processes, each the leader of its session."""
        self._running, self._ended_at, self._asked_to_stop_at = {}, {}, None
        for rank, process in running.items():
            self._add(rank, process)

    def _add(self, rank: int, process: RankProcess) -> None:
        self._running[rank] = process
        # Nobody has waited for it yet, so that it is still there, even if it has ended.
        if (leader := read_process(process.pid)) is not None:
            self._sessions.add(leader.id)
        self._output.call_when_ended(process.pid, lambda: self._note_end(rank))

    def replaced(self, rank: int, process: RankProcess) -> None:
        """Note that a rank's process has ended, and another has its place."""
        self._ended_at.pop(rank, None)
        self._add(rank, process)

    def dropped(self, rank: int) -> None:
        """Note that a rank's process has ended, and that the run goes on without it."""
        del self._running[rank]

    def has_report(self, rank: int) -> bool:
        """Whether a rank has ended by an exception."""
        return bool(self._error_report(rank))

    def asked_to_stop(self) -> None:
        """From now on, ranks may end because they were asked to."""
        # On a busy host the news that a rank has ended comes late.
        for rank, process in self._running.items():
            if process.poll() is not None:
                self._note_end(rank)
        self._asked_to_stop_at = self._asked_to_stop_at or time.time()

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the ranks and all that they started: by SIGTERM, unless ``at_once``, and then by SIGKILL."""
        end_processes(self._find, at_once=at_once)

    def running(self) -> dict[int, ProcessEntry]:
        """The process of each rank that has not ended. Sessions of the others are forgotten when possible."""
        running = {rank: process for rank, process in self._running.items() if process.poll() is None}
        if {leader.pid for leader in self._sessions} - {process.pid for process in running.values()}:
            self._list_processes()
        entries = {rank: read_process(process.pid) for rank, process in running.items()}
        return {rank: entry for rank, entry in entries.items() if entry is not None}

    def failures(self) -> list[RankFailure]:
        """The ranks of the last attempt whose exit code is not 0."""
        codes = {rank: process.poll() for rank, process in self._running.items()}
        return [self._failure(rank, code) for rank, code in codes.items() if code]

    def summary(self, *, is_one_host: bool) -> FailureSummary | None:
        """How the ranks of the last attempt failed; None if none has."""
        return summarise(self.failures(), ended_before=self._ended_before(), is_one_host=is_one_host)

    def _ended_before(self) -> list[int]:
        """The ranks that ended with exit code 0 before they were asked to stop."""
        ended = [rank for rank, process in self._running.items() if process.poll() == 0]
        asked_at = self._asked_to_stop_at
        return [
            rank for rank in ended if asked_at is None or self._ended_at.get(rank, asked_at + 1) <= asked_at
        ]

    def _find(self) -> list[ProcessEntry]:
        """The processes of ranks that have not ended. Orphans that have ended are reaped."""
        processes = self._list_processes()
        table = {pid: process for pid, process in processes.items() if process.id not in self._older}
        seeds = in_sessions(table, self._sessions, launcher=os.getpid())
        seeds |= with_mark(table, f"{FOLDER}={self._folder()}")
        seeds |= {pid for pid, process in table.items() if process.parent == self._parent}
        found = [table[pid] for pid in with_descendants(table, seeds)]
        ranks = {process.pid for process in self._running.values()}  # their exit codes are read elsewhere
        _reap(process for process in found if process.id.pid not in ranks)
        return [process for process in found if process.state not in ENDED]

    def _list_processes(self) -> dict[int, ProcessEntry]:
        """All processes of this host. Sessions in which nobody is left are forgotten."""
        table = list_processes()
        self._sessions = remaining_sessions(table, self._sessions)
        return table

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


def _reap(processes: Iterable[ProcessEntry]) -> None:
    """Release those that have ended and have become this process's children."""
    for process in processes:
        if process.state == "Z" and process.parent == os.getpid():
            with suppress(ChildProcessError):
                os.waitpid(process.id.pid, os.WNOHANG)
