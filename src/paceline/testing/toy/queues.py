"""The queues of the toy device: one per stream, each worked off by a thread of its own.

The host puts kernels into queues and goes on. A place in a queue says how much of it has to be done: the
host or another queue can wait for it. Threads are started when there is something to do, and end when there
was nothing for a while.

Note [What the host waits for always comes]. A wait has no deadline here: a kernel ends by itself, and a
collective has its group's timeout. While the device is held, waiting raises an error instead.
"""

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.testing.toy.counts import caller

_IDLE_SECONDS = 1.0
_EXIT_SECONDS = 5.0


class QueuePlace(NamedTuple):
    """How many kernels of a queue have to be done."""

    queue: "StreamQueue"
    number: int

    @property
    def is_done(self) -> bool:
        """Whether the queue has come that far."""
        return self.queue.done >= self.number


@dataclass(frozen=True)
class _Task:
    """A kernel, which may begin when another queue has come to a place."""

    name: str
    kernel: Callable[[], object]
    after: QueuePlace | None
    latency: float
    caller: str


class StreamQueue:
    """Kernels that run one after the other, on a thread of the queue.

    Args:
        name: the stream's name, for errors.
        device: the index of its device.
    """

    def __init__(self, name: str, device: int) -> None:
        self.name = name
        self.device = device
        self.done = 0
        self._given = 0
        self._tasks: deque[_Task] = deque()
        self._thread: threading.Thread | None = None
        with _state.changed:
            _queues.add(self)

    @property
    def end(self) -> QueuePlace:
        """The place behind everything that is in the queue now."""
        return QueuePlace(self, self._given)

    def put(self, name: str, kernel: Callable[[], object], *, after: QueuePlace | None = None) -> None:
        """Run a kernel when what is in the queue is done, and the other queue has come to the place."""
        task = _Task(name, kernel, after, _state.latency, caller())
        with _state.changed:
            if _state.is_closing:
                return
            self._tasks.append(task)
            self._given += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self._thread.start()
            _state.changed.notify_all()

    def wait_for(self, place: QueuePlace) -> None:
        """Let the queue, and not the host, wait for a place in another one."""
        self.put("wait for another stream", lambda: None, after=place)

    def forget(self) -> None:
        """Begin anew in a forked process, which has no threads and does not run what was queued before."""
        self._tasks.clear()
        self._thread = None
        self.done = self._given

    def join(self, seconds: float) -> None:
        """Wait for the thread to end."""
        if (thread := self._thread) is not None:
            thread.join(seconds)

    @property
    def unfinished(self) -> int:
        """The number of kernels that are not done."""
        return self._given - self.done

    def _work(self) -> None:
        # What the host made in this mode can only be written to in it.
        with torch.inference_mode():
            while (task := self._next()) is not None:
                self._run(task)
                del task  # or its memory would live until the next one comes

    def _next(self) -> _Task | None:
        with _state.changed:
            while not _state.is_closing:
                if self._may_begin():
                    return self._tasks.popleft()
                if not _state.changed.wait(_IDLE_SECONDS) and not self._tasks:
                    break
            self._thread = None
            return None

    def _may_begin(self) -> bool:
        if not self._tasks or _state.holds:
            return False
        after = self._tasks[0].after
        return after is None or after.is_done

    def _run(self, task: _Task) -> None:
        try:
            time.sleep(task.latency)
            task.kernel()
        except Exception as error:
            with _state.changed:
                _state.failure = _state.failure or (task, error)
        with _state.changed:
            self.done += 1
            _state.changed.notify_all()


class _State:
    """What all queues share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.holds = 0
        self.latency = 0.0
        self.is_closing = False
        # The first kernel that failed since an error was raised.
        self.failure: tuple[_Task, Exception] | None = None


_state = _State()
_queues: "weakref.WeakSet[StreamQueue]" = weakref.WeakSet()


def wait_on_host(places: Iterable[QueuePlace]) -> None:
    """Let the host wait for places in queues; see Note [What the host waits for always comes]."""
    for place in places:
        with _state.changed:
            if _state.holds and not place.is_done:
                raise RuntimeError(
                    f"the host would wait for {place.queue.name}, which is held ({caller()}); wait for it "
                    "after the block of toy.hold()"
                )
            while not (place.is_done or _state.is_closing):
                _state.changed.wait()


def raise_failure() -> None:
    """Raise the error of a kernel that has failed, once."""
    with _state.changed:
        failure, _state.failure = _state.failure, None
    if failure is not None:
        task, error = failure
        raise RuntimeError(f"{task.name} failed on the device, queued by {task.caller}: {error}") from error


def queues_of(device: int) -> list[StreamQueue]:
    """The queues of a device."""
    return [queue for queue in _all_queues() if queue.device == device]


def _all_queues() -> list[StreamQueue]:
    with _state.changed:
        return list(_queues)


def unfinished() -> int:
    """The number of kernels that are queued or running, on all streams of this process."""
    return sum(queue.unfinished for queue in _all_queues())


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """Let no kernel begin inside the block, on any stream of this process.

    If the host waits for a kernel in the meantime, an error says who waits, because it would wait for ever.
    """
    with _state.changed:
        _state.holds += 1
    try:
        yield
    finally:
        with _state.changed:
            _state.holds -= 1
            _state.changed.notify_all()


@contextlib.contextmanager
def set_latency(seconds: float) -> Iterator[None]:
    """Let each kernel that is queued inside the block take at least so long."""
    before, _state.latency = _state.latency, seconds
    try:
        yield
    finally:
        _state.latency = before


def _begin_anew() -> None:
    global _state
    _state = _State()  # a thread of the parent may have had the lock
    for queue in _all_queues():
        queue.forget()


@atexit.register
def _end_threads() -> None:
    """Give up what is queued: a thread that is inside torch while the interpreter ends would crash it."""
    with _state.changed:
        _state.is_closing = True
        _state.changed.notify_all()
    for queue in _all_queues():
        queue.join(_EXIT_SECONDS)


os.register_at_fork(after_in_child=_begin_anew)
