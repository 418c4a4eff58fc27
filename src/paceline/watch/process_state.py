"""In what state another process is, by what the kernel says of it."""

import enum
from dataclasses import dataclass
from pathlib import Path

from paceline.watch.rank_page import start_time

# Fields of /proc/PID/stat, counted after the command's name.
_STATE, _MAJOR_FAULTS, _USER, _SYSTEM = 0, 9, 11, 12
# Read from disk in a tenth of a second: a process that is being read back from swap.
_MANY_MAJOR_FAULTS = 5
# Ticks of 10 ms in a tenth of a second, on a machine that is shared by several ranks.
_BUSY_TICKS = 2
# The watcher of a rank wakes once per second, and later on a busy machine.
STALE_SECONDS = 2.5


class ProcessState(enum.StrEnum):
    """What the kernel says of a rank's training thread; the values are for messages."""

    ENDED = "has ended"
    STOPPED = "is stopped by a signal"
    TRACED = "is stopped by a debugger"
    DISK = "waits for a disk"
    SWAPPED = "is being read back from swap"
    HOLDS_LOCK = "is in C code that holds Python's lock"
    BUSY = "is busy on a CPU"
    SLEEPING = "sleeps or waits"
    SILENT = "gives no sign of life"
    UNKNOWN = "is in an unknown state"


@dataclass(frozen=True)
class ProcessFacts:
    """What the kernel says of a thread at one moment: its state, ticks on a CPU, and major page faults."""

    state: str
    ticks: int
    major_faults: int


def read_facts(pid: int, thread: int, started: int) -> ProcessFacts | None:
    """The facts of a process's thread; None if the process has ended.

    Args:
        pid: the process.
        thread: the system's number of the thread; that of the process for the main thread.
        started: when the process started: another one may have its number by now.
    """
    if start_time(pid) != started:
        return None
    try:
        main = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        task = Path(f"/proc/{pid}/task/{thread or pid}/stat")
        fields = task.read_text().rpartition(")")[2].split() if task.exists() else main
    except OSError:
        return None
    if main[_STATE] in "ZX":
        return None
    ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    return ProcessFacts(fields[_STATE], ticks, int(fields[_MAJOR_FAULTS]))


def judge(before: ProcessFacts | None, after: ProcessFacts | None, *, heartbeat_age: float) -> ProcessState:
    """The state of a rank.

    Args:
        before: the facts a tenth of a second ago.
        after: the facts now; None if the process has ended.
        heartbeat_age: how many seconds ago its watcher ran.
    """
    if before is None or after is None:
        return ProcessState.ENDED
    if after.state in "Tt":
        return ProcessState.STOPPED if after.state == "T" else ProcessState.TRACED
    if after.major_faults - before.major_faults >= _MANY_MAJOR_FAULTS:
        return ProcessState.SWAPPED
    if before.state == after.state == "D":
        return ProcessState.DISK
    # The watcher needs Python's lock.
    if heartbeat_age > STALE_SECONDS:
        return ProcessState.HOLDS_LOCK
    if after.state == "R" or after.ticks - before.ticks >= _BUSY_TICKS:
        return ProcessState.BUSY
    return ProcessState.SLEEPING
