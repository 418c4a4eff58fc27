"""Calls in flight as torch's ``Work``, and the executor that finishes them, if need be in a thread."""

import atexit
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.comm.backend.arguments import memory_ranges
from paceline.comm.backend.calls import BackendCall
from paceline.comm.native_threads import wait_until_asleep
from paceline.comm.pending import OnSlow
from paceline.comm.shm.channel import Channel, end_threads
from paceline.comm.shm.collective import Launched
from paceline.errors import ClosedGroupError, LateRankError
from paceline.torch_private import is_profiler_enabled

# A function of calls.py, which makes a call for a channel.
MakeCall = Callable[..., BackendCall]

# Note [Works that C++ holds]. torch's reducer keeps the work of a join, on a single number, in C++ alone.
# Once its Python part is gone, pybind no longer finds our methods, and C++ waits forever (torch 2.13). So
# works on at most _SMALL_BYTES are kept until _KEPT_WORKS others have been launched.
_SMALL_BYTES = 64
_KEPT_WORKS = 64
# A waiting thread checks more often than that whether the executor was closed: see channel.py.
_EXIT_SECONDS = 4.0


class WorkState(Enum):
    """How far a work is."""

    IN_FLIGHT = auto()
    DONE = auto()
    FAILED = auto()


class Work(c10d.Work):
    """One call that has been launched, of one collective or several.

    Args:
        executor: finishes it.
        call: what was called.
        launched: its collectives.
        timeout: how many seconds to wait for others.
    """

    def __init__(
        self, executor: "WorkExecutor", call: BackendCall, launched: list[Launched], timeout: float
    ) -> None:
        super().__init__()
        self._executor = executor
        self._call = call
        self._launched = launched
        self._timeout = timeout
        self._state = WorkState.IN_FLIGHT
        self._error: Exception | None = None
        self._over: torch.futures.Future[None] | None = None  # not yet set, and set when it is over
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the outputs hold the result; raises after the timeout, if there is one."""
        if self._state is WorkState.IN_FLIGHT:
            self._executor.finish(self, timeout.total_seconds() if timeout else None)
            self.set_future()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait, as ``wait`` without a timeout."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._state is not WorkState.IN_FLIGHT

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._state is WorkState.DONE

    def exception(self) -> Exception | None:
        """The error; None if there is none so far."""
        return self._error

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._call.outputs

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future of the outputs."""
        with self._lock:
            if self._future is None:
                self._over = torch.futures.Future()
                # C++ takes what a callback raises for an error, but an exception that was set for a result.
                self._future = self._over.then(self._outcome)
        self.set_future()
        return self._future

    def source_rank(self) -> int:
        """Raises, as for any collective: nothing was received from a single rank."""
        raise RuntimeError("only what was received from any rank has a source rank")

    _source_rank = source_rank

    def finish(self, channel: Channel, on_slow: OnSlow, timeout: float | None) -> None:
        """Wait in the channel, and keep the outcome. Called by one thread at a time."""
        if self._state is not WorkState.IN_FLIGHT:
            return
        seconds = self._timeout if timeout is None else min(timeout, self._timeout)
        try:
            for launched in self._launched:
                self._wait_in(channel, launched, on_slow, seconds)
            self._call.finish()
        except Exception as error:
            if isinstance(error, LateRankError) and seconds < self._timeout:
                raise  # the caller's timeout has passed, and not the work's
            self._end(WorkState.FAILED, error)
        else:
            self._end(WorkState.DONE, None)

    def _wait_in(self, channel: Channel, launched: Launched, on_slow: OnSlow, seconds: float) -> None:
        """Wait for a collective; if its own timeout passes, no rank may end it any more."""
        try:
            channel.wait(launched, on_slow, timeout=seconds)
        except LateRankError:
            if seconds < self._timeout or channel.give_up(launched):
                raise
            channel.wait(launched, on_slow, timeout=seconds)  # all ranks have come meanwhile

    def has_unset_future(self) -> bool:
        """Whether somebody asked for the future and it is not set."""
        return self._over is not None

    def set_future(self) -> None:
        """Set the future if the work has ended and somebody asked for it; runs its callbacks."""
        with self._lock:
            if self._state is WorkState.IN_FLIGHT or self._over is None:
                return
            over, self._over = self._over, None
        over.set_result(None)

    def _end(self, state: WorkState, error: Exception | None) -> None:
        with self._lock:
            self._error = error
            self._state = state

    def _outcome(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._call.outputs


class WorkExecutor:
    """Launches calls in one channel and sees that each is finished.

    The caller that waits for a call also finishes it: handing it to a thread would take longer than most
    calls do. Calls that nobody waits for are finished by a thread, which is started when it is first needed.
    Threads have a reference to the executor and not to the group, so when a group is dropped its threads end.

    Note [Callbacks that wait]. The thread that finishes a work also runs the callbacks of its future. Such a
    callback may wait for another collective, in a way that we do not see. So while a thread runs callbacks,
    there has to be another one for what is still to be finished.

    Args:
        channel: where the collectives go.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._owner = os.getpid()
        self._is_closed = False
        # Held while a work is finished: that happens once, and whoever comes second has nothing to do.
        self._finishing = threading.Lock()
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._free_threads = 0  # those that do not run callbacks
        self._lock = threading.Lock()
        self._kept: deque[Work] = deque(maxlen=_KEPT_WORKS)
        self._in_flight: dict[int, tuple[Work, list[range]]] = {}
        _executors.add(self)

    def launch(
        self, make: MakeCall, args: tuple[Any, ...], kwargs: dict[str, Any], *, timeout: float, is_async: bool
    ) -> Work:
        """Begin a call; unless it is asynchronous, also finish it."""
        # Checked first, because recording costs as much as launching.
        if is_profiler_enabled():
            with torch.profiler.record_function(f"paceline:{make.__name__}"):
                return self._launch(make, args, kwargs, timeout=timeout, is_async=is_async)
        return self._launch(make, args, kwargs, timeout=timeout, is_async=is_async)

    def _launch(
        self, make: MakeCall, args: tuple[Any, ...], kwargs: dict[str, Any], *, timeout: float, is_async: bool
    ) -> Work:
        self._check_open()
        if self._in_flight:
            self._finish_overlapping(args)
        with torch.inference_mode():
            call = make(self._channel, *args, **kwargs)
            launched = [self._channel.launch(collective) for collective in call.collectives]
            work = Work(self, call, launched, timeout)
            if not is_async:
                self._finish(work)
        if is_async:
            self._in_flight[id(work)] = (work, list(memory_ranges(args)))
            if sum(output.nbytes for output in call.outputs) <= _SMALL_BYTES:
                self._kept.append(work)
            self._queue.put(work)
            self._ensure_thread()
        else:
            work.wait()
        return work

    def _finish_overlapping(self, args: tuple[Any, ...]) -> None:
        """Finish the works that write to the tensors of a call, which reads them when it is launched."""
        wanted = list(memory_ranges(args))
        for work, memory in list(self._in_flight.values()):
            if any(one.start < other.stop and other.start < one.stop for one in wanted for other in memory):
                self.finish(work)

    def finish(self, work: Work, timeout: float | None = None) -> None:
        """Finish a work; raises if that takes longer than the timeout."""
        with torch.inference_mode():  # so that results can be written to inference tensors too
            self._finish(work, timeout)

    def _finish(self, work: Work, timeout: float | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        if not self._finishing.acquire(timeout=-1 if timeout is None else timeout):
            raise LateRankError(f"a collective did not end within the timeout of {timeout:g} s")
        try:
            left = None if until is None else max(0.0, until - time.monotonic())
            work.finish(self._channel, self._check_open, left)
        finally:
            self._finishing.release()
        self._in_flight.pop(id(work), None)

    def close(self) -> None:
        """Finish what is in flight, and take no more calls."""
        if self._owner == os.getpid():
            self._end_threads()
            self._is_closed = True

    def abort(self) -> None:
        """Take no more calls, and wait for nobody."""
        self._is_closed = True
        self._queue.put(None)

    def exit(self) -> None:
        """End the threads because the interpreter exits, and they need it."""
        if self._owner == os.getpid():
            self.abort()
            self._end_threads(_EXIT_SECONDS)

    def _end_threads(self, seconds: float | None = None) -> None:
        self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _ensure_thread(self) -> None:
        with self._lock:
            if not self._free_threads:
                self._free_threads += 1
                thread = threading.Thread(target=self._run_thread, name="paceline-works", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run_thread(self) -> None:
        while (work := self._queue.get()) is not None:
            self.finish(work)
            if work.has_unset_future():
                self._run_callbacks(work)
            del work  # or it would live until the next one comes
        self._queue.put(None)  # for the next thread

    def _run_callbacks(self, work: Work) -> None:
        """See Note [Callbacks that wait]."""
        with self._lock:
            self._free_threads -= 1
        if not self._queue.empty():
            self._ensure_thread()
        try:
            work.set_future()
        finally:
            with self._lock:
                self._free_threads += 1

    def _check_open(self) -> None:
        if self._owner != os.getpid():
            raise ClosedGroupError("a process group cannot be used in a forked child of its process")
        if self._is_closed:
            raise ClosedGroupError("the process group has been destroyed or aborted")


_executors: "weakref.WeakSet[WorkExecutor]" = weakref.WeakSet()


@atexit.register
def _exit_all() -> None:
    for executor in list(_executors):
        executor.exit()
    end_threads(_EXIT_SECONDS)
    wait_until_asleep()
