"""One shared-memory file, mapped by the ranks of one host.

It is far larger than any machine's memory: only what was reserved takes memory. So each rank has its own
region of it, as long as it will ever need, and need not ask anybody where it may put something.

    head                                proof that ranks share the file
    channels                            semaphores and headers of each channel
    region of local rank 0, 1, 2 …      blocks: what the rank lets others read and write

Note [No file remains]. A memfd has no name, so it is gone with the last process that has it open. Ranks in
other PID namespaces cannot open it. For them there is a file in /dev/shm, which only its owner may open,
under a name that cannot be guessed. It is removed as soon as all ranks have opened it.
"""

import ctypes
import fcntl
import os
import secrets
import stat
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Self, TypeAlias

import torch
from torch import Tensor

from paceline.comm.shm import libc

HEAD = 0
HEAD_BYTES = 1 << 16
CHANNELS = 1 << 20
REGIONS = 1 << 40
REGION_BYTES = 1 << 40
MAX_RANKS = 1024
_FILE_BYTES = REGIONS + MAX_RANKS * REGION_BYTES

PAGE = os.sysconf("SC_PAGESIZE")
# The longest chunk of a collective; a multiple of any element's size.
CHUNK_BYTES = 4 << 20
# The file is mapped in windows that begin at multiples of this; of head and channels little is used. A window
# is longer by a chunk, so that every chunk that begins in it is in it.
_WINDOW_STEP = 1 << 30
_HEAD_WINDOW_STEP = 16 << 20
# The number of windows that stay mapped; they take address space only.
_MAX_WINDOWS = 256
_MAX_VIEWS = 4096
# How much is reserved by one system call.
_RESERVE_BYTES = 4 << 20
# Locks need no memory behind them: an offset where nothing else is.
_LOCKS = 1 << 62
# A mapped part of the file: its offset and length.
Window: TypeAlias = tuple[int, int]
_SHM = Path("/dev/shm")  # noqa: S108  # not a temporary file of a guessable name


class Segment:
    """An open shared-memory file.

    Args:
        file: its descriptor, which the segment owns and closes.
        path: where other processes of the host can open it.
    """

    def __init__(self, file: int, path: str) -> None:
        self.file = file
        self.path = path
        self._owner = os.getpid()
        self._windows: OrderedDict[Window, Tensor] = OrderedDict()
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._close = weakref.finalize(self, os.close, file)
        _segments.add(self)
        # When the process ends the system closes it, and not before: until then threads may use it, and the
        # rank's lock says that it is alive.
        self._close.atexit = False

    @classmethod
    def nameless(cls) -> Self:
        """Make one without a name, for ranks of this PID namespace."""
        file = os.memfd_create("paceline", os.MFD_CLOEXEC)
        segment = cls(file, f"/proc/{os.getpid()}/fd/{file}")
        os.ftruncate(file, _FILE_BYTES)
        return segment

    @classmethod
    def named(cls) -> Self:
        """Make one in /dev/shm, for ranks in other PID namespaces; to be unlinked soon."""
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
        """Open one that another process has made."""
        # In another PID namespace the path may be that of any file. Reading a file that is shorter than its
        # mapping would kill the process, and closing another segment of ours would drop its locks.
        found = Path(path).stat()
        if (found.st_ino, found.st_size) != (inode, _FILE_BYTES) or not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is another file here")
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)

    @property
    def inode(self) -> int:
        """The file's inode number, which tells it from other files of the same path."""
        return os.fstat(self.file).st_ino

    @property
    def is_limited(self) -> bool:
        """Whether its size is limited by more than the machine's memory."""
        return self.path.startswith(str(_SHM))

    def unlink(self) -> None:
        """Remove the file's name, if it has one."""
        if self.is_limited:
            Path(self.path).unlink(missing_ok=True)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocate memory; raises OSError if there is not enough, where a write would kill the process."""
        # A signal that interrupts a call undoes it, and Python calls again. With a profiler's timer a long
        # call would never end.
        for start in range(0, nbytes, _RESERVE_BYTES):
            try:
                os.posix_fallocate(self.file, offset + start, min(_RESERVE_BYTES, nbytes - start))
            except OSError:
                self.release(offset, start)
                raise

    def release(self, offset: int, nbytes: int) -> None:
        """Give memory back to the system."""
        # A forked child has the file and these objects too, but they belong to its parent.
        if nbytes and os.getpid() == self._owner and self._close.alive:
            libc.punch_hole(self.file, offset, nbytes)

    def at(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """A view of reserved memory, by its offset in the file."""
        # Ranks use the same offsets again and again. Finding a view is ten times as fast as making one.
        view = self._views.get((offset, nbytes, dtype))
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            # The view is kept, and may be written to later outside inference mode.
            with torch.inference_mode(mode=False):
                view = self._views[offset, nbytes, dtype] = self._bytes(offset, nbytes).view(dtype)
        return view

    def map_ahead(self, offset: int, nbytes: int) -> list[Window]:
        """Map all windows in which chunks of these bytes of a region begin; returns those that are new.

        Raises:
            OSError: that is not possible. None of them is mapped then.
        """
        new: list[Window] = []
        try:
            for start in range(offset // _WINDOW_STEP * _WINDOW_STEP, offset + nbytes, _WINDOW_STEP):
                window = _window(start, 0)
                if window not in self._windows:
                    self._bytes(start, 0)
                    new.append(window)
        except OSError:
            self.unmap(new)
            raise
        return new

    def unmap(self, windows: Iterable[Window]) -> None:
        """Unmap windows that nobody has used yet."""
        for window in windows:
            self._windows.pop(window, None)

    def _bytes(self, offset: int, nbytes: int) -> Tensor:
        start, length = _window(offset, nbytes)
        window = self._windows.get((start, length))
        if window is None:
            window = self._windows[start, length] = self._map(start, length)
            if len(self._windows) > _MAX_WINDOWS:
                self._windows.popitem(last=False)
        return window[offset - start : offset - start + nbytes]

    def _map(self, offset: int, nbytes: int) -> Tensor:
        address = libc.map_shared(self.file, offset, nbytes)
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(memory, libc.unmap, address, nbytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def make_private(self) -> None:
        """Have what this process writes from now on stay in it."""
        for (start, length), window in self._windows.items():
            libc.make_private(window.data_ptr(), self.file, start, length)


# Note [Forked children]. A forked child has its parent's gradients, which are in shared memory, and its ends
# of the channels. What it does to them must not reach the parent, nor the other ranks. So its mappings become
# private: it sees what was there, and what it writes is its own.
_segments: "weakref.WeakSet[Segment]" = weakref.WeakSet()


def _in_forked_child() -> None:
    for segment in list(_segments):
        segment.make_private()


os.register_at_fork(after_in_child=_in_forked_child)


class RankLocks:
    """Tells which of the ranks that share a segment have ended.

    Each rank holds a lock on a byte of its own. The locks are POSIX record locks: Linux drops them when the
    process ends, however it ends; a forked child does not inherit them; and they work between PID namespaces.
    Linux also drops them when the process closes any descriptor of the file, so there must be only one.

    Args:
        segment: the file that the ranks share.
        rank: this rank's number among them; it counts as alive from now on.
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment = segment
        fcntl.lockf(segment.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKS + rank)

    def has_ended(self, rank: int) -> bool:
        """Whether another rank's process is gone."""
        offset = _LOCKS + rank
        try:
            # A shared lock, so that two ranks that look at the same time do not see each other.
            fcntl.lockf(self._segment.file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, offset, os.SEEK_SET)
        except OSError:
            return False
        fcntl.lockf(self._segment.file, fcntl.LOCK_UN, 1, offset, os.SEEK_SET)
        return True


def round_up(nbytes: int) -> int:
    """A number of bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def _window(offset: int, nbytes: int) -> Window:
    """Which part of the file to map in order to see some bytes of it: its offset and length."""
    step = _WINDOW_STEP if offset >= REGIONS else _HEAD_WINDOW_STEP
    start = offset // step * step
    if offset + nbytes <= start + step + CHUNK_BYTES:
        return start, step + CHUNK_BYTES
    start = offset // PAGE * PAGE
    return start, round_up(offset + nbytes - start)
