"""What shared memory needs of the C library, by ctypes: semaphores, mappings, and holes in files.

Note [Ordering]. Ranks signal each other through semaphores alone. POSIX lists ``sem_post`` and the
``sem_wait`` family among the functions that synchronise memory: what a rank wrote before it posted is seen by
the rank whose wait returned because of it. So no rank reads a flag that it could see before the data that the
flag stands for, on any kind of CPU. Python has no memory fences, and none is needed.

Note [Counted at once]. Python may raise KeyboardInterrupt after any call. A count that was taken from a
semaphore but not yet kept would be lost, and the rank would wait for it forever. So one iterator that runs in
C takes and counts: its next value is right, whether or not anybody saw the last one.

Note [Hints]. Reading the word that holds a semaphore's value takes a tenth of the time of a call. Such a read
orders nothing, and where the word is depends on the C library. So it is only a hint whether a call is worth
while: if it is wrong, a rank polls in vain, or sleeps and finds out by calling.
"""

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, repeat
from operator import add
from typing import Any

# One cache line each, so that ranks that wait for different semaphores do not slow each other down; sem_t has
# 32 bytes.
SEMAPHORE_BYTES = 64

_READ_WRITE = 0x1 | 0x2  # PROT_READ, PROT_WRITE
_SHARED = 0x1  # MAP_SHARED
_PRIVATE_AT_ADDRESS = 0x2 | 0x10 | 0x4000  # MAP_PRIVATE, MAP_FIXED, MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2  # linux/falloc.h

# The first releases the GIL; the second does not and is faster, for calls that never take long.
_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _function(library: ctypes.CDLL, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes, function.restype = arguments, result
    return function


_pointer = ctypes.c_void_p
_init = _function(_libc, "sem_init", _pointer, ctypes.c_int, ctypes.c_uint)
# In glibc since 2.30. The older sem_timedwait uses a clock that can be set, which would make waits longer.
_clock_wait = _function(_libc, "sem_clockwait", _pointer, ctypes.c_int, ctypes.POINTER(_Timespec))
_mmap = _function(
    _libc, "mmap", _pointer, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64, result=_pointer
)
_munmap = _function(_libc, "munmap", _pointer, ctypes.c_size_t)
_fallocate = _function(_libc, "fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

# Lets other threads and processes run that wait for the core.
yield_core = _function(_libc, "sched_yield")
# Increments a semaphore.
post = _function(_libc_with_gil, "sem_post", _pointer)
# Decrements a semaphore and returns 0; returns -1 if it is zero.
try_wait = _function(_libc_with_gil, "sem_trywait", _pointer)


def unsupported_reason() -> str | None:
    """Why this system cannot share memory between ranks; None if it can."""
    if _clock_wait is None or _fallocate is None or not hasattr(os, "memfd_create"):
        return "the C library lacks sem_clockwait, fallocate or memfd_create"
    return None


def make_semaphore(address: int, value: int = 0) -> None:
    """Make a semaphore there, for all processes that map the memory."""
    if _init(address, 1, value):
        raise _error("sem_init")


def value_hint(semaphore: int) -> memoryview:
    """A view whose only element is not zero if the semaphore is not; see Note [Hints]."""
    offset = _value_offset()
    if offset is None:
        return memoryview(bytes(4)).cast("I")
    return memoryview((ctypes.c_ubyte * 4).from_address(semaphore + offset)).cast("B").cast("I")


@cache
def _value_offset() -> int | None:
    """Where in a semaphore the word is that has its value; None if there is no such word."""
    memory = (ctypes.c_uint64 * (SEMAPHORE_BYTES // 8))()
    words = memoryview(memory).cast("B").cast("I")
    make_semaphore(ctypes.addressof(memory))
    before = words.tolist()
    post(ctypes.addressof(memory))
    changed = [number for number, word in enumerate(words.tolist()) if word != before[number]]
    return 4 * changed[0] if len(changed) == 1 and not before[changed[0]] else None


def poll_counts(semaphore: int) -> Iterator[int]:
    """Decrements a semaphore at each step, if it is not zero; yields how often it did so far."""
    return accumulate(map(add, map(try_wait, repeat(semaphore)), repeat(1)))


class SleepingCounter:
    """Decrements a semaphore after sleeping until it is not zero. Only one thread at a time may use it.

    Args:
        semaphore: its address.
    """

    def __init__(self, semaphore: int) -> None:
        self._until = _Timespec()
        waits = map(
            _clock_wait, repeat(semaphore), repeat(time.CLOCK_MONOTONIC), repeat(ctypes.byref(self._until))
        )
        self._counts: Iterator[int] = accumulate(map(add, waits, repeat(1)))

    def sleep(self, seconds: float) -> int:
        """Sleep, for that long at most; returns how often the semaphore was decremented so far."""
        until = time.clock_gettime(time.CLOCK_MONOTONIC) + seconds
        self._until.seconds, self._until.nanoseconds = int(until), int(until % 1 * 1e9)
        return next(self._counts)


def map_shared(file: int, offset: int, nbytes: int) -> int:
    """Map a part of a file; returns its address."""
    # Python's own mmap duplicates the descriptor and closes it later. Then Linux drops all locks that the
    # process has on the file: see RankLocks in segment.py.
    address = _mmap(None, nbytes, _READ_WRITE, _SHARED, file, offset)
    if address in (None, _FAILED):
        raise _error("mmap")
    return int(address)


def make_private(address: int, file: int, offset: int, nbytes: int) -> None:
    """Replace a mapping by one of the same part of the file, in which writes stay in this process."""
    found = _mmap(address, nbytes, _READ_WRITE, _PRIVATE_AT_ADDRESS, file, offset)
    if found in (None, _FAILED):
        raise _error("mmap")


def unmap(address: int, nbytes: int) -> None:
    """Remove a mapping."""
    _munmap(address, nbytes)


def punch_hole(file: int, offset: int, nbytes: int) -> None:
    """Give a part of a file's memory back to the system."""
    _fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes)


def release_freed() -> None:
    """Have malloc give back to the system what was freed, where the C library can do that."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _error(function: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{function}: {errno.errorcode.get(number, number)}, {os.strerror(number)}")
