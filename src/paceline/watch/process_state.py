"""In what state another process is, by what the kernel says of it."""

import enum
import re
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
# A thread that waits for Python's lock looks for it each 5 ms, so twenty times in a tenth of a second.
_FEW_LOOKS, _MANY_LOOKS = 5, 40
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE)


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
    """What the kernel says of a rank's training thread at one moment, and of its watcher.

    Attributes:
        state: a letter.
        ticks: those on a CPU.
        major_faults: page faults that read from a disk.
        watcher_waits: how often the watcher has gone to sleep.
    """

    state: str
    ticks: int
    major_faults: int
    watcher_waits: int = 0

    def waits_for_lock(self, before: "ProcessFacts", *, is_certain: bool = False) -> bool:
        """Whether the watcher, which has not run since, has looked for Python's lock again and again.

        A process that was stopped, and has just gone on, has not: soon its watcher runs.
        """
        return self.watcher_waits - before.watcher_waits >= (_MANY_LOOKS if is_certain else _FEW_LOOKS)


def read_facts(pid: int, thread: int, started: int, *, watcher: int = 0) -> ProcessFacts | None:
    """The facts of a process; None if it has ended.

    Args:
        pid: the process.
        thread: the system's number of the training thread; that of the process for the main thread.
        started: when the process started: another one may have its number by now.
        watcher: the system's number of the watcher's thread; 0 if it is not known.
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
    return ProcessFacts(fields[_STATE], ticks, int(fields[_MAJOR_FAULTS]), _waits(pid, watcher))


def _waits(pid: int, thread: int) -> int:
    """How often a thread has gone to sleep; 0 if there is none."""
    try:
        found = _SWITCHES.search(Path(f"/proc/{pid}/task/{thread}/status").read_text())
    except OSError:
        return 0
    return 0 if found is None else int(found[1])


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
    if heartbeat_age > STALE_SECONDS and after.waits_for_lock(before):
        return ProcessState.HOLDS_LOCK
    if after.state == "R" or after.ticks - before.ticks >= _BUSY_TICKS:
        return ProcessState.BUSY
    return ProcessState.SLEEPING
