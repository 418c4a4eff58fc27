"""A rank's status page: a small mapped file in which other processes read what the rank does.

Note [Torn reads]. Nobody locks a page, because a rank that is stopped would never give the lock back. Each
record has its own number at both ends. A reader that finds two different numbers reads again.

Note [Where pages are]. With ``PACELINE_RECORD`` the page is a file in that folder, which stays after the run.
Otherwise it is memory without a name, which other processes open by ``/proc/PID/fd/N``, and which leaves
nothing behind.
"""

import enum
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.recording.files import make_folder, new_file

VERSION = 1
_MAGIC = b"paceline"
_HEADER = struct.Struct(
    "<8siiiiQqQ"
)  # magic, version, rank, pid, the watcher's thread, start, epoch, namespace
_BEAT = struct.Struct("<QqqiQ")  # number, monotonic time, the usual step, the training thread, number
_ACTIVITY = struct.Struct("<QiqqiqQQ")  # number, activity, wrapper, step, bucket, since, thread, number
_TOLD = struct.Struct("<QiiqiQ")  # number, kind, rank, since, length of the text, number
_SAMPLE = struct.Struct("<QqiqiiQ")  # number, time, activity, step, bucket, length of the text, number
_STACK = struct.Struct("<QqiQ")  # number, time, length of the text, number
_BEAT_AT, _ACTIVITY_AT, _TOLD_AT, _TOLD_BYTES = 128, 256, 512, 3584
_STACK_AT, _STACK_BYTES = 4096, 8192
_SAMPLES_AT, _SAMPLE_BYTES = _STACK_AT + _STACK_BYTES, 256
SAMPLES = 64  # one per second: the last minute
_NBYTES = _SAMPLES_AT + SAMPLES * _SAMPLE_BYTES
_TRIES = 4
_WHEN_STARTED = 19  # the field of /proc/PID/stat, counted after the command's name


class Activity(enum.IntEnum):
    """What a rank does, as far as the wrapper sees."""

    OUTSIDE = 0
    """User code outside of forward, backward and optimizer."""
    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    OPTIMIZER = enum.auto()
    WRAPPING = enum.auto()
    """Exchanges what is needed to wrap a module."""
    INPUTS = enum.auto()
    """Under join: tells the others whether it has inputs."""
    BUFFERS = enum.auto()
    """Makes module buffers equal."""
    BUCKET = enum.auto()
    """Waits for a bucket, or for the step report."""
    UPDATE = enum.auto()
    """Waits before or after an update of parameters that ranks share."""
    OUTER = enum.auto()
    """Waits in an outer step for the rank that talks to the other hosts."""
    TUNING = enum.auto()
    """Decides for the hook "auto" after a step, and measures links for it."""


# A rank that does one of these for long waits for other ranks.
WAITING = frozenset(
    {
        *(Activity.WRAPPING, Activity.BUFFERS, Activity.INPUTS, Activity.BUCKET, Activity.UPDATE),
        *(Activity.OUTER, Activity.TUNING),
    }
)


class Moment(enum.IntEnum):
    """What a rank has told on its page."""

    NOTHING = 0
    STALLED = enum.auto()
    FAILED = enum.auto()
    """It has raised, because of another rank."""
    EXITED = enum.auto()
    """Its interpreter has exited, and it had told nothing; the text is the exception that nobody caught."""


@dataclass(frozen=True)
class Doing:
    """What a rank does since when.

    Attributes:
        activity: what.
        wrapper: a number of the wrapper that is the same on all ranks; 0 for none.
        step: the wrapper's step.
        bucket: the bucket that is waited for; -1 for none.
        since: when it began, in nanoseconds of the monotonic clock.
        thread: Python's number of the thread that does it.
    """

    activity: Activity = Activity.OUTSIDE
    wrapper: int = 0
    step: int = -1
    bucket: int = -1
    since: int = 0
    thread: int = 0

    @property
    def awaited(self) -> tuple[int, int, int, int] | None:
        """What it waits for; None if it waits for nobody."""
        if self.activity not in WAITING:
            return None
        return (self.activity, self.wrapper, self.step, self.bucket)


@dataclass(frozen=True)
class Sample:
    """What a rank did at one moment: nanoseconds of the monotonic clock, activity, step, bucket, and line."""

    at: int
    activity: Activity
    step: int
    bucket: int
    line: str


@dataclass(frozen=True)
class Told:
    """What a rank has said: which rank is missing, since when (monotonic clock), or why it has raised."""

    moment: Moment = Moment.NOTHING
    rank: int = -1
    since: int = 0
    text: str = ""


@dataclass(frozen=True)
class PageAddress:
    """Where other processes find a page.

    Attributes:
        rank: the global rank.
        host: a text that is the same for all processes of one host.
        node: the host's name, for messages.
        namespace: the number of the process's namespace of process numbers.
        pid: the process.
        started: when it started, in the system's ticks.
        page: the page's path.
        stacks: the path of the file that stacks are written to.
        signal: the signal that asks for one; 0 for none.
    """

    rank: int
    host: str
    node: str
    namespace: int
    pid: int
    started: int
    page: str
    stacks: str
    signal: int


class RankPage:
    """The page that this process writes.

    Args:
        rank: the global rank.
        folder: where the file is; without a folder, or if it cannot be written there, it has no name.
    """

    def __init__(self, rank: int, folder: Path | None) -> None:
        self.rank = rank
        self.owner = os.getpid()
        self._file, self.path = _create(folder, f"rank{rank}.status", _NBYTES)
        self._memory: mmap.mmap | bytearray = mmap.mmap(self._file, _NBYTES)
        weakref.finalize(self, os.close, self._file)
        self.told = Told()
        self._count = 0
        self._samples = 0
        self.write_header(watcher=0)
        self.mark(Activity.OUTSIDE)

    def write_header(self, *, watcher: int) -> None:
        """Write who this is; ``watcher`` is the system's number of the thread that answers a signal."""
        epoch = time.time_ns() - time.monotonic_ns()
        identity = (start_time(self.owner) or 0, epoch, own_namespace())
        _HEADER.pack_into(self._memory, 0, _MAGIC, VERSION, self.rank, self.owner, watcher, *identity)

    def mark(self, activity: Activity, wrapper: int = 0, step: int = -1, bucket: int = -1) -> None:
        """Write what this rank does from now on."""
        self._count = count = self._count + 1
        self._place = (wrapper, step)
        thread, now = threading.get_ident(), time.monotonic_ns()
        _ACTIVITY.pack_into(
            self._memory, _ACTIVITY_AT, count, activity, wrapper, step, bucket, now, thread, count
        )

    def change(self, activity: Activity) -> None:
        """Write another activity of the same step."""
        self.mark(activity, *self._place)

    def doing(self) -> Doing:
        """What was marked last."""
        _, activity, wrapper, step, bucket, since, thread, _ = _ACTIVITY.unpack_from(
            self._memory, _ACTIVITY_AT
        )
        return Doing(Activity(activity), wrapper, step, bucket, since, thread)

    def beat(self, now: int, *, usual_step: int, thread: int) -> None:
        """Write that the watcher runs, and the system's number of the training thread."""
        _BEAT.pack_into(self._memory, _BEAT_AT, now, now, usual_step, thread, now)

    def write_stack(self, now: int, text: str) -> None:
        """Write the training thread's stack."""
        self._write(_STACK, _STACK_AT, _STACK_BYTES, (now,), text)

    def add_sample(self, sample: Sample) -> None:
        """Add to the last minute."""
        at = _SAMPLES_AT + self._samples % SAMPLES * _SAMPLE_BYTES
        self._samples += 1
        values = (sample.at, sample.activity, sample.step, sample.bucket)
        self._write(_SAMPLE, at, _SAMPLE_BYTES, values, sample.line)

    def tell(self, told: Told) -> None:
        """Write what this rank says."""
        self.told = told
        self._write(_TOLD, _TOLD_AT, _TOLD_BYTES, (told.moment, told.rank, told.since), told.text)

    def _write(self, record: struct.Struct, at: int, nbytes: int, values: Sequence[int], text: str) -> None:
        content = text.encode(errors="replace")[: nbytes - record.size]
        number = time.monotonic_ns()
        record.pack_into(self._memory, at, 0, *values, len(content), number)
        self._memory[at + record.size : at + record.size + len(content)] = content
        record.pack_into(self._memory, at, number, *values, len(content), number)

    def become_private(self) -> None:
        """In a forked child: let go of the parent's page."""
        self._memory = bytearray(_NBYTES)


@dataclass(frozen=True)
class PageContent:
    """What was read from a page.

    Attributes:
        rank: the global rank.
        pid: its process.
        watcher: the system's number of the thread that answers a signal.
        started: when the process started, as the system counts it.
        epoch: added to a time of the monotonic clock, it gives nanoseconds since the epoch.
        namespace: of process numbers.
        heartbeat: when the watcher ran last.
        usual_step: nanoseconds; 0 if nothing is known.
        thread: the system's number of the training thread.
        doing: what the rank does.
        told: what it has said.
        stack: the training thread's stack, as text; see ``stacks.decode``.
        stack_at: when it was taken.
        samples: the last minute, oldest first.
    """

    rank: int
    pid: int
    watcher: int
    started: int
    epoch: int
    namespace: int
    heartbeat: int
    usual_step: int
    thread: int
    doing: Doing
    told: Told
    stack: str
    stack_at: int
    samples: tuple[Sample, ...]


class PageReader:
    """Reads another process's page.

    Args:
        path: the page's path.

    Raises:
        OSError: it cannot be opened, or is no page.
    """

    def __init__(self, path: str) -> None:
        # Not by mapping it: whoever truncates a mapped file kills its readers.
        through_proc = path.startswith("/proc/")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if through_proc else os.O_NOFOLLOW)
        self._file = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise OSError(f"not a status page ({path})")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self) -> PageContent | None:
        """What the page says now; None if it cannot be understood."""
        for _ in range(_TRIES):
            content = os.pread(self._file, _NBYTES, 0)
            try:
                return _parse(content)
            except (struct.error, ValueError):  # see Note [Torn reads]
                continue
        return None


def read_page(path: Path) -> PageContent | None:
    """What a page says; None if it cannot be read or understood."""
    try:
        reader = PageReader(str(path))
    except OSError:
        return None
    try:
        return reader.read()
    except OSError:
        return None
    finally:
        reader.close()


def read_pages(folder: Path) -> list[PageContent]:
    """The pages in a folder, by rank."""
    pages = [read_page(path) for path in folder.glob("rank*.status")]
    return sorted((page for page in pages if page is not None), key=lambda page: page.rank)


def delete_pages(folder: Path) -> None:
    """Delete the pages and the stacks that ranks have left in a folder."""
    for pattern in ("rank*.status", "rank*.stacks"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _parse(content: bytes) -> PageContent:
    magic, version, rank, pid, watcher, started, epoch, namespace = _HEADER.unpack_from(content)
    if magic != _MAGIC or version != VERSION:
        raise ValueError("not a status page")
    heartbeat, usual_step, thread = _whole(_BEAT, content, _BEAT_AT)
    activity, *doing = _whole(_ACTIVITY, content, _ACTIVITY_AT)
    (moment, culprit, since), told = _with_text(_TOLD, content, _TOLD_AT)
    (stack_at,), stack = _with_text(_STACK, content, _STACK_AT)
    return PageContent(
        rank=rank,
        pid=pid,
        watcher=watcher,
        started=started,
        epoch=epoch,
        namespace=namespace,
        heartbeat=heartbeat,
        usual_step=usual_step,
        thread=thread,
        doing=Doing(Activity(activity), *doing),
        told=Told(Moment(moment), culprit, since, told),
        stack=stack,
        stack_at=stack_at,
        samples=tuple(_samples(content)),
    )


def _samples(content: bytes) -> list[Sample]:
    samples = []
    for number in range(SAMPLES):
        try:
            values, line = _with_text(_SAMPLE, content, _SAMPLES_AT + number * _SAMPLE_BYTES)
        except ValueError:  # it is being written
            continue
        at, activity, step, bucket = values
        if at:
            samples.append(Sample(at, Activity(activity), step, bucket, line))
    return sorted(samples, key=lambda sample: sample.at)


def _whole(record: struct.Struct, content: bytes, at: int) -> tuple[int, ...]:
    first, *values, last = record.unpack_from(content, at)
    if first != last:
        raise ValueError("torn")
    return tuple(values)


def _with_text(record: struct.Struct, content: bytes, at: int) -> tuple[tuple[int, ...], str]:
    *values, length = _whole(record, content, at)
    start = at + record.size
    return tuple(values), content[start : start + length].decode(errors="replace")


def _create(folder: Path | None, name: str, nbytes: int) -> tuple[int, str]:
    """A new file with that many bytes, and its path: see Note [Where pages are]."""
    if folder is not None:
        try:
            make_folder(folder)
            path = folder / name
            with new_file(path) as made:
                if nbytes:
                    os.posix_fallocate(made, 0, nbytes)  # a full disk would kill whoever writes to the map
                file = os.dup(made)
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
            return file, str(path)
        except OSError:
            pass  # the recorder warns of it
    file = os.memfd_create(f"paceline-{name}", os.MFD_CLOEXEC)
    os.ftruncate(file, nbytes)
    return file, f"/proc/{os.getpid()}/fd/{file}"


def create_stacks_file(rank: int, folder: Path | None) -> tuple[int, str]:
    """The file that a rank's stacks are written to, and its path."""
    return _create(folder, f"rank{rank}.stacks", 0)


def start_time(pid: int) -> int | None:
    """When a process started, in the system's ticks; None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_WHEN_STARTED])
    except (OSError, IndexError, ValueError):
        return None


def own_namespace() -> int:
    """The number of this process's namespace of process numbers; 0 if it is not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116  # no path object for each call
    except OSError:
        return 0
