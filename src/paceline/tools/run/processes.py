"""Which processes belong to ranks, how they are ended, and a guard that ends them if the launcher is killed.

When a process has ended, another one may get its number. So a process is known by its number and the time at
which it was started.

The guard is this file, run by its path. It is a process of its own, because nothing inside a killed launcher
can act, and a thread inside a rank cannot run while the script holds Python's lock. It uses the standard
library only, so it is small and starts fast.

    processes.py LAUNCHER STARTED FOLDER MARK SECONDS
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

TERM_SECONDS = 0.8
KILL_SECONDS = 1.0
POLL_SECONDS = 0.01
# How long ranks may take to end after their launcher was killed.
SECONDS_AFTER_LAUNCHER = 5
ENDED = "ZX"
STOPPED = "T"


class ProcessId(NamedTuple):
    """One process for all time: its number, and when it was started, in ticks after the host's start."""

    pid: int
    started: int


class ProcessEntry(NamedTuple):
    """One process in /proc."""

    id: ProcessId
    parent: int
    session: int
    state: str


# All processes, by number.
Table = Mapping[int, ProcessEntry]


def read_process(pid: int) -> ProcessEntry | None:
    """What /proc says of a process; None if there is none with this number."""
    try:
        # The name, in parentheses, may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessEntry(ProcessId(pid, int(fields[19])), int(fields[1]), int(fields[3]), fields[0])


def list_processes() -> dict[int, ProcessEntry]:
    """All processes that can be seen, by number."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {pid: process for pid in pids if (process := read_process(pid)) is not None}


def remaining_sessions(table: Table, leaders: Iterable[ProcessId]) -> set[ProcessId]:
    """The leaders of sessions in which somebody is left.

    The system gives a session's number to another process only when nobody of the session is left.
    """
    return {leader for leader in leaders if any(True for _ in _members(table, leader))}


def in_sessions(table: Table, leaders: Iterable[ProcessId], *, launcher: int) -> set[int]:
    """The processes of ranks' sessions.

    If a session's leader has ended, its number may be another's by now. Then only processes below the
    launcher count, which is the parent of all orphans of ranks.
    """
    return {
        process.id.pid
        for leader in leaders
        for process in _members(table, leader)
        if leader.pid in table or _is_below(table, process, launcher)
    }


def _members(table: Table, leader: ProcessId) -> Iterator[ProcessEntry]:
    """Who is in a session; its leader too, unless it has ended."""
    first = table.get(leader.pid)
    if first is not None and first.id != leader:
        return  # another process has the number
    for process in table.values():
        if process.session == leader.pid and not (process.id == leader and process.state in ENDED):
            yield process


def _is_below(table: Table, process: ProcessEntry | None, ancestor: int) -> bool:
    seen: set[int] = set()
    while process is not None and process.id.pid not in seen:
        if process.parent == ancestor:
            return True
        seen.add(process.id.pid)
        process = table.get(process.parent)
    return False


def with_descendants(table: Table, pids: Iterable[int]) -> set[int]:
    """These processes and all below them."""
    found = set(pids) & table.keys()
    while below := {pid for pid, process in table.items() if process.parent in found} - found:
        found |= below
    return found


def with_mark(table: Table, mark: str) -> set[int]:
    """The processes that have a variable in their environment that begins with ``mark`` (``NAME=value``)."""
    return {pid for pid in table if _has_mark(pid, mark.encode())}


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False
    return any(variable.startswith(mark) for variable in variables)


def send(processes: Iterable[ProcessEntry], *signals: signal.Signals) -> None:
    """Send signals to these processes, and never to others that have got their numbers."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            descriptor = os.pidfd_open(process.id.pid)
            try:
                # The descriptor stays with the process, so it is enough to look once, after opening it.
                now = read_process(process.id.pid)
                for signum in signals if now is not None and now.id == process.id else ():
                    signal.pidfd_send_signal(descriptor, signum)
            finally:
                os.close(descriptor)


def wait_until_gone(
    find: Callable[[], list[ProcessEntry]], seconds: float, signum: signal.Signals | None = None
) -> bool:
    """Wait until ``find`` finds nobody, sending ``signum`` to whom it finds; whether that was in time."""
    until = time.monotonic() + seconds
    while found := find():
        if signum is not None:
            send(found, signum)
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def end_processes(find: Callable[[], list[ProcessEntry]], *, at_once: bool = False) -> None:
    """End those that ``find`` finds: by SIGTERM, unless ``at_once``, and then by SIGKILL."""
    if not at_once:
        # A stopped process gets its SIGTERM only when it is continued.
        send(find(), signal.SIGTERM, signal.SIGCONT)
        if wait_until_gone(find, TERM_SECONDS):
            return
    wait_until_gone(find, KILL_SECONDS, signal.SIGKILL)


@contextmanager
def guarded_folder(variable: str, seconds: float | None = None) -> Iterator[Path]:
    """A temporary folder for one run, with a guard in case this process is killed.

    The guard then ends all processes in whose environment ``variable`` names a folder inside this one. They
    have ``seconds`` to end by themselves. After that the guard deletes the folder.
    """
    directory = tempfile.TemporaryDirectory(prefix="paceline-")
    after = SECONDS_AFTER_LAUNCHER if seconds is None else seconds
    # The guard outlives the folder.
    with _guard(directory.name, f"{variable}={directory.name}/", after), directory as folder:
        yield Path(folder)


@contextmanager
def _guard(folder: str, mark: str, seconds: float) -> Iterator[None]:
    this = read_process(os.getpid())
    assert this is not None
    arguments = [*map(str, this.id), folder, mark, str(seconds)]
    guard = subprocess.Popen(  # noqa: S603 - this file
        [sys.executable, "-S", "-E", __file__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # what is sent to the launcher's process group must not reach it
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


def main() -> None:
    """Wait until the launcher has ended; then end its ranks, and delete its folder."""
    launcher, started, folder, mark, seconds = sys.argv[1:]
    _wait_for_end(ProcessId(int(launcher), int(started)))
    known: set[ProcessId] = set()

    def find() -> list[ProcessEntry]:
        table = {pid: process for pid, process in list_processes().items() if pid != os.getpid()}
        # Known ones too: when a rank has ended, what it has started is below it no more.
        seeds = with_mark(table, mark) | {pid for pid, process in table.items() if process.id in known}
        found = [table[pid] for pid in with_descendants(table, seeds)]
        known.update(process.id for process in found)
        return [process for process in found if process.state not in ENDED]

    # The kernel has sent SIGTERM to each rank, which reaches a stopped one only now.
    send(find(), signal.SIGCONT)
    if not wait_until_gone(find, float(seconds)):
        end_processes(find)
    shutil.rmtree(folder, ignore_errors=True)


def _wait_for_end(process: ProcessId) -> None:
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    now = read_process(process.pid)
    if now is not None and now.id == process:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()


if __name__ == "__main__":
    main()
