"""Processes that ranks have started, and their end, by what /proc tells of them."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
TERM_SECONDS = 0.8
KILL_SECONDS = 1.0
POLL_SECONDS = 0.01


@contextmanager
def orphans_adopted() -> Iterator[None]:
    """Within it, processes whose parents have ended become this process's children, and not the system's."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


@dataclass(frozen=True)
class Process:
    """One line of the table of processes."""

    pid: int
    parent: int
    session: int
    state: str


def table() -> dict[int, Process]:
    """All processes that can be seen."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                # The name, in parentheses, may contain anything.
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                processes[int(entry.name)] = Process(int(entry.name), int(parent), int(session), state)
    return processes


def left_by(sessions: set[int], *, mark: str, adopted_by: int | None, strangers: frozenset[int]) -> set[int]:
    """Running processes of ranks: in their sessions, with the mark in their environment, or below such.

    Children of ``adopted_by`` count as well. ``strangers``, which were there before the ranks, do not.
    Adopted orphans that have ended are taken off the table.
    """
    processes = {pid: process for pid, process in table().items() if pid not in strangers}
    found = {pid for pid, process in processes.items() if process.session in sessions or _has(pid, mark)}
    found |= {pid for pid, process in processes.items() if process.parent == adopted_by}
    while below := {pid for pid, process in processes.items() if process.parent in found} - found:
        found |= below
    for pid in found - sessions:
        if processes[pid].state == "Z" and processes[pid].parent == os.getpid():
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return {pid for pid in found if processes[pid].state not in "ZX"}


def _has(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # It has ended, or is another user's.
        return False


def end(find: Callable[[], set[int]], *, at_once: bool = False) -> None:
    """End every process that ``find`` finds: kindly, unless ``at_once``, and then by force."""
    if not at_once:
        _send(find(), signal.SIGTERM)
        if _gone(find, TERM_SECONDS, None):
            return
    _gone(find, KILL_SECONDS, signal.SIGKILL)


def _gone(find: Callable[[], set[int]], seconds: float, signum: signal.Signals | None) -> bool:
    """Wait until nothing is found, sending ``signum`` to what is."""
    until = time.monotonic() + seconds
    while found := find():
        if signum is not None:
            _send(found, signum)
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _send(pids: set[int], signum: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
