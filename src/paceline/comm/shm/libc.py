"""What shared memory needs of the C library, by ctypes: semaphores, mappings, and holes in files.

Note [Ordering]. Ranks tell each other through semaphores alone. POSIX lists ``sem_post`` and the ``sem_wait``
family among the functions that synchronise memory: what a rank wrote before it posted is seen by the rank
whose wait returned because of it. So no flag is ever read that could be seen before the data that it stands
for, on no kind of CPU, and no fence has to be written in Python, which has none.

Note [Counted at once]. Python may raise KeyboardInterrupt after any call, and what was taken from a semaphore
would be lost before it was counted, and waited for for ever. So it is taken and counted by one iterator that
runs in C: its next value is right, whether or not anybody saw the last one.
"""

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from itertools import accumulate, repeat
from operator import add
from typing import Any

# A cache line each, lest ranks that wait for different semaphores get in each other's way; sem_t is 32 bytes.
SEMAPHORE_BYTES = 64

_READ_WRITE = 0x1 | 0x2  # PROT_READ, PROT_WRITE
_SHARED = 0x1  # MAP_SHARED
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2  # linux/falloc.h

# The first lets other threads run meanwhile; the second is quicker, for what never takes long.
_libc = ctypes.CDLL(None, use_errno=True)
_brief = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _function(library: ctypes.CDLL, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes, function.restype = arguments, result
    return function


_pointer = ctypes.c_void_p
_init = _function(_libc, "sem_init", _pointer, ctypes.c_int, ctypes.c_uint)
# glibc has it since 2.30. Its elder brother's clock can be set, and a wait would last until it has caught up.
_clock_wait = _function(_libc, "sem_clockwait", _pointer, ctypes.c_int, ctypes.POINTER(_Timespec))
_mmap = _function(
    _libc, "mmap", _pointer, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64, result=_pointer
)
_munmap = _function(_libc, "munmap", _pointer, ctypes.c_size_t)
_fallocate = _function(_libc, "fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

# Adds one to a semaphore.
post = _function(_brief, "sem_post", _pointer)
# Takes one from a semaphore and returns 0; -1 if there is none.
_try_wait = _function(_brief, "sem_trywait", _pointer)


def why_not() -> str | None:
    """Why this system cannot share memory between ranks; None if it can."""
    if _clock_wait is None or _fallocate is None or not hasattr(os, "memfd_create"):
        return "the C library lacks sem_clockwait, fallocate or memfd_create"
    return None


def make_semaphore(address: int) -> None:
    """Have a semaphore of nothing there, for any process that maps the memory."""
    if _init(address, 1, 0):
        raise _error("sem_init")


def tries(semaphore: int) -> Iterator[int]:
    """Takes one from a semaphore at each step, if there is one; yields how many it took so far."""
    return accumulate(map(add, map(_try_wait, repeat(semaphore)), repeat(1)))


class Naps:
    """The same, but sleeps until there is one to take, for some time. One thread at a time.

    Args:
        semaphore: its address.
    """

    def __init__(self, semaphore: int) -> None:
        self._until = _Timespec()
        waits = map(
            _clock_wait, repeat(semaphore), repeat(time.CLOCK_MONOTONIC), repeat(ctypes.byref(self._until))
        )
        self._taken: Iterator[int] = accumulate(map(add, waits, repeat(1)))

    def nap(self, seconds: float) -> int:
        """Sleep until there is one to take; returns how many were taken so far."""
        until = time.clock_gettime(time.CLOCK_MONOTONIC) + seconds
        self._until.seconds, self._until.nanoseconds = int(until), int(until % 1 * 1e9)
        return next(self._taken)


def map_shared(file: int, offset: int, nbytes: int) -> int:
    """Map a part of a file; returns its address."""
    # Python's own mmap keeps a copy of the descriptor and closes it later, and at that Linux drops all of the
    # process's locks on the file: see life.py.
    address = _mmap(None, nbytes, _READ_WRITE, _SHARED, file, offset)
    if address in (None, _FAILED):
        raise _error("mmap")
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    """Take a mapping away."""
    _munmap(address, nbytes)


def punch(file: int, offset: int, nbytes: int) -> None:
    """Give a part of a file's memory back to the system."""
    _fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes)


def _error(function: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{function}: {errno.errorcode.get(number, number)}, {os.strerror(number)}")
