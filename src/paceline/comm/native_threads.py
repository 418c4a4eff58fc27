"""Threads of torch, which Python did not start, when the interpreter exits.

Note [Works that gloo drops]. A thread of gloo runs a collective, tells whoever waits for it, and only then
drops the work. To drop it, the thread needs the interpreter, once for each tensor. If the interpreter exits
meanwhile, Python 3.13 and older end the thread inside a C++ destructor, which aborts the process: "terminate
called without an active exception", after a script that did everything right. So the exit waits until these
threads sleep. torch does not say which threads are gloo's (in 2.10 they have no names), so all of them count.
"""

import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_ASLEEP = ("S", "")  # the second if the thread has ended
_POLL_SECONDS = 0.001
# A thread that waits for the interpreter sleeps too, but not each time after it could have had it.
_QUIET_POLLS = 3
# Other threads of C++ may be busy for as long as they like.
_LIMIT_SECONDS = 0.5


def wait_until_asleep() -> None:
    """Wait until the threads that Python did not start sleep, see Note [Works that gloo drops]."""
    threads = _native_threads()
    until = time.monotonic() + _LIMIT_SECONDS
    quiet = 0
    while threads and quiet < _QUIET_POLLS and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)  # without the interpreter's lock
        quiet = quiet + 1 if all(_state(thread) in _ASLEEP for thread in threads) else 0


def _native_threads() -> list[Path]:
    # Of the thread that calls, because Python may have its number from before a fork.
    pythons = {str(threading.get_native_id()), *(str(thread.native_id) for thread in threading.enumerate())}
    tasks = _TASKS.iterdir() if _TASKS.is_dir() else ()  # Linux only
    return [task for task in tasks if task.name not in pythons]


def _state(thread: Path) -> str:
    try:
        stat = (thread / "stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(") ")[2][:1]
