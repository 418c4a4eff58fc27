"""One shared-memory file, mapped by the ranks of one host.

It is far larger than any machine's memory: only what was reserved exists. So each rank has its own part of
it, its lot, as long as it will ever need, and nobody has to be asked where something may be put.

    head                                proof that ranks share the file
    channels                            semaphores and notes of each channel
    lot of local rank 0, 1, 2 …         blocks: what the rank lets others read and write

Note [No file remains]. A memfd has no name, so it is gone with the last process that has it open. Ranks in
other PID namespaces cannot open it; for them there is a file in /dev/shm, that only its owner may open, under
a name that cannot be guessed, which is removed as soon as all have opened it.
"""

import ctypes
import os
import secrets
import stat
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from paceline.comm.shm import libc

HEAD = 0
HEAD_BYTES = 1 << 16
CHANNELS = 1 << 20
LOTS = 1 << 40
LOT_BYTES = 1 << 40
MOST_RANKS = 1024
_FILE_BYTES = LOTS + MOST_RANKS * LOT_BYTES

PAGE = os.sysconf("SC_PAGESIZE")
# What is near each other is mapped at once.
_WINDOW = 1 << 30
# So many windows stay mapped; they cost address space only.
_WINDOWS = 256
_VIEWS = 4096
_AT_ONCE = 4 << 20
_SHM = Path("/dev/shm")  # noqa: S108  # not a temporary file of a guessable name


class Segment:
    """An open shared-memory file.

    Args:
        file: its descriptor, which is owned.
        path: where other processes of the host can open it.
    """

    def __init__(self, file: int, path: str) -> None:
        self.file = file
        self.path = path
        self._owner = os.getpid()
        self._windows: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._close = weakref.finalize(self, os.close, file)
        # At the end the system closes it, and not before: until then this rank lives, and threads may use it.
        self._close.atexit = False

    @classmethod
    def nameless(cls) -> Self:
        """A new one without a name, for ranks of this PID namespace."""
        file = os.memfd_create("paceline", os.MFD_CLOEXEC)
        segment = cls(file, f"/proc/{os.getpid()}/fd/{file}")
        os.ftruncate(file, _FILE_BYTES)
        return segment

    @classmethod
    def named(cls) -> Self:
        """A new one in /dev/shm, for ranks that share that and no more; to be unlinked soon."""
        path = _SHM / f"paceline-{secrets.token_hex(16)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        segment = cls(file, str(path))
        try:
            os.ftruncate(file, _FILE_BYTES)
        except BaseException:
            segment.unlink()
            raise
        return segment

    @classmethod
    def at_path(cls, path: str, inode: int) -> Self:
        """One that another process has made."""
        # In another PID namespace the path may be any file's. To read one that is shorter than its mapping
        # would kill the process, and to close one that is another segment of ours would drop its locks.
        found = Path(path).stat()
        if (found.st_ino, found.st_size) != (inode, _FILE_BYTES) or not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is another file here")
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)

    @property
    def inode(self) -> int:
        """Tells it from other files of its path."""
        return os.fstat(self.file).st_ino

    @property
    def is_limited(self) -> bool:
        """Whether its size is limited by more than the machine's memory."""
        return self.path.startswith(str(_SHM))

    def unlink(self) -> None:
        """Have no name any more."""
        if self.is_limited:
            Path(self.path).unlink(missing_ok=True)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Have memory there; raises OSError if there is not enough, where a write would kill the process."""
        # A signal undoes a call that it comes in, and Python calls again: with a profiler's timer that would
        # never end if the call was long.
        for start in range(0, nbytes, _AT_ONCE):
            try:
                os.posix_fallocate(self.file, offset + start, min(_AT_ONCE, nbytes - start))
            except OSError:
                self.release(offset, start)
                raise

    def release(self, offset: int, nbytes: int) -> None:
        """Give memory back."""
        # A forked child has the file and these objects too, and they are not its own to take away.
        if nbytes and os.getpid() == self._owner and self._close.alive:
            libc.punch(self.file, offset, nbytes)

    def at(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """What is at a place, where there must be memory."""
        # Ranks come back to the same places, and to find a view costs a tenth of what it costs to make one.
        view = self._views.get((offset, nbytes, dtype))
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            with torch.inference_mode(mode=False):  # it is kept, and written to by others in no such mode
                view = self._views[offset, nbytes, dtype] = self._bytes(offset, nbytes).view(dtype)
        return view

    def _bytes(self, offset: int, nbytes: int) -> Tensor:
        start, length = _window(offset, nbytes)
        window = self._windows.get((start, length))
        if window is None:
            window = self._windows[start, length] = self._map(start, length)
            if len(self._windows) > _WINDOWS:
                self._windows.popitem(last=False)
        return window[offset - start : offset - start + nbytes]

    def _map(self, offset: int, nbytes: int) -> Tensor:
        address = libc.map_shared(self.file, offset, nbytes)
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(memory, libc.unmap, address, nbytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)


def round_up(nbytes: int) -> int:
    """To whole pages."""
    return -(-nbytes // PAGE) * PAGE


def _window(offset: int, nbytes: int) -> tuple[int, int]:
    """Which part of the file to map for some bytes of it."""
    start = offset // _WINDOW * _WINDOW
    if offset + nbytes <= start + _WINDOW:
        return start, _WINDOW
    start = offset // PAGE * PAGE
    return start, round_up(offset + nbytes - start)
