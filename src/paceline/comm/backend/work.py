"""Calls in flight, as torch knows them, and the thread that attends to those that nobody waits for."""

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

from paceline.comm.backend.arguments import memory_of
from paceline.comm.backend.requests import Request
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import Launched
from paceline.errors import ClosedGroupError, LateRankError

# Makes a request for a channel.
Build = Callable[..., Request]

# Note [Works that C++ holds]. torch's reducer keeps a join's work, on a single number, in C++ alone. Once
# its Python part is gone, pybind finds our methods no more, and C++ waits for what never comes (torch 2.13).
# So works on so few bytes are kept until so many others have been launched.
_FEW_BYTES = 64
_KEPT = 64
# A wait looks around a bit more often than that: see channel.py.
_FAREWELL_SECONDS = 4.0


class WorkState(Enum):
    """How far a work is."""

    FLYING = auto()
    DONE = auto()
    FAILED = auto()


class Work(c10d.Work):
    """One call that has been launched, of one collective or several.

    Args:
        attendant: sees to it if nobody waits.
        request: what was called.
        launched: its collectives.
        timeout: so many seconds others are waited for.
    """

    def __init__(
        self, attendant: "Attendant", request: Request, launched: list[Launched], timeout: float
    ) -> None:
        super().__init__()
        self._attendant = attendant
        self._request = request
        self._launched = launched
        self._timeout = timeout
        self._state = WorkState.FLYING
        self._error: Exception | None = None
        self._trigger: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the outputs hold the result; past the timeout, if there is one, that raises."""
        if self._state is WorkState.FLYING:
            self._attendant.finish(self, timeout.total_seconds() if timeout else None)
            self.announce()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._state is not WorkState.FLYING

    def is_success(self) -> bool:
        """Whether it is over, and well."""
        return self._state is WorkState.DONE

    def exception(self) -> Exception | None:
        """Why it failed."""
        return self._error

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._request.outputs

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future of the outputs."""
        with self._lock:
            if self._future is None:
                self._trigger = torch.futures.Future()
                # C++ takes what a callback raises for an error, and what is set as one for a result.
                self._future = self._trigger.then(self._outcome)
        self.announce()
        return self._future

    def source_rank(self) -> int:
        """Raises, as for any collective: nothing was received from a single rank."""
        raise RuntimeError("only what was received from any rank has a source rank")

    _source_rank = source_rank

    def carry_out(self, channel: Channel, unusual: Callable[[], None], patience: float | None) -> None:
        """Wait in the channel, and keep what comes of it. Called by one thread at a time."""
        if self._state is not WorkState.FLYING:
            return
        seconds = self._timeout if patience is None else min(patience, self._timeout)
        try:
            for launched in self._launched:
                channel.wait(launched, unusual, timeout=seconds)
            self._request.finish()
        except Exception as error:
            if isinstance(error, LateRankError) and seconds < self._timeout:
                raise  # only the caller has lost patience
            self._settle(WorkState.FAILED, error)
        else:
            self._settle(WorkState.DONE, None)

    def is_awaited(self) -> bool:
        """Whether somebody asked for the future and has not been told."""
        return self._trigger is not None

    def announce(self) -> None:
        """If it is over, tell who asked for the future."""
        with self._lock:
            if self._state is WorkState.FLYING or self._trigger is None:
                return
            trigger, self._trigger = self._trigger, None
        trigger.set_result(None)

    def _settle(self, state: WorkState, error: Exception | None) -> None:
        with self._lock:
            self._error = error
            self._state = state

    def _outcome(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._request.outputs


class Attendant:
    """Launches calls in one channel and sees that each is finished.

    A call that is waited for is carried out by the caller: to hand it over takes longer than most calls do.
    For others there is a thread, made when it is first needed. Threads know the attendant and not the group,
    so that a group that was dropped takes its threads with it.

    Note [Callbacks that wait]. Who asked for a work's future is told by the thread that finished the work,
    and may wait for another collective then, in a way that we do not see. So while a thread tells, another
    one has to be there for what is still to be finished.

    Args:
        channel: what carries the calls.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._owner = os.getpid()
        self._is_closed = False
        # Held by who carries a work out: that is done once, and who comes second has nothing to do.
        self._turn = threading.Lock()
        self._unattended: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads that are not telling
        self._lock = threading.Lock()
        self._kept: deque[Work] = deque(maxlen=_KEPT)
        self._flying: dict[int, tuple[Work, list[range]]] = {}
        _attendants.add(self)

    def launch(
        self, build: Build, args: tuple[Any, ...], kwargs: dict[str, Any], *, timeout: float, is_async: bool
    ) -> Work:
        """Begin a call; unless it is asynchronous, also finish it."""
        # Asked first, because to record costs as much as to launch; private in torch 2.13.
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            with torch.profiler.record_function(f"paceline:{build.__name__}"):
                return self._launch(build, args, kwargs, timeout=timeout, is_async=is_async)
        return self._launch(build, args, kwargs, timeout=timeout, is_async=is_async)

    def _launch(
        self, build: Build, args: tuple[Any, ...], kwargs: dict[str, Any], *, timeout: float, is_async: bool
    ) -> Work:
        self._refuse_closed()
        if self._flying:
            self._finish_touching(args)
        with torch.inference_mode():
            request = build(self._channel, *args, **kwargs)
            launched = [self._channel.launch(collective) for collective in request.collectives]
            work = Work(self, request, launched, timeout)
            if not is_async:
                self._carry_out(work)
        if is_async:
            self._flying[id(work)] = (work, list(memory_of(args)))
            if sum(output.nbytes for output in request.outputs) <= _FEW_BYTES:
                self._kept.append(work)
            self._unattended.put(work)
            self._have_thread()
        else:
            work.wait()
        return work

    def _finish_touching(self, args: tuple[Any, ...]) -> None:
        """A call reads its tensors when it is launched: wait for those that write to the same memory."""
        wanted = list(memory_of(args))
        for work, memory in list(self._flying.values()):
            if any(one.start < other.stop and other.start < one.stop for one in wanted for other in memory):
                self.finish(work)

    def finish(self, work: Work, patience: float | None = None) -> None:
        """Have a work carried out; raises if that takes longer than the patience."""
        with torch.inference_mode():  # so that results can be written to tensors of any kind
            self._carry_out(work, patience)

    def _carry_out(self, work: Work, patience: float | None = None) -> None:
        until = None if patience is None else time.monotonic() + patience
        if not self._turn.acquire(timeout=-1 if patience is None else patience):
            raise LateRankError(f"a collective did not end within the timeout of {patience:g} s")
        try:
            left = None if until is None else max(0.0, until - time.monotonic())
            work.carry_out(self._channel, self._refuse_closed, left)
        finally:
            self._turn.release()
        self._flying.pop(id(work), None)

    def close(self) -> None:
        """Finish what is in flight, and take no more calls."""
        if self._owner == os.getpid():
            self._dismiss()
            self._is_closed = True

    def abort(self) -> None:
        """Take no more calls, and wait for nobody."""
        self._is_closed = True
        self._unattended.put(None)

    def leave(self) -> None:
        """The interpreter ends: see that no thread needs it any more."""
        if self._owner == os.getpid():
            self.abort()
            self._dismiss(_FAREWELL_SECONDS)

    def _dismiss(self, seconds: float | None = None) -> None:
        self._unattended.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _have_thread(self) -> None:
        with self._lock:
            if not self._free:
                self._free += 1
                thread = threading.Thread(target=self._finish_all, name="paceline-works", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _finish_all(self) -> None:
        while (work := self._unattended.get()) is not None:
            self.finish(work)
            if work.is_awaited():
                self._tell(work)
            del work  # or it would live until the next one comes
        self._unattended.put(None)  # for the next thread

    def _tell(self, work: Work) -> None:
        """See Note [Callbacks that wait]."""
        with self._lock:
            self._free -= 1
        if not self._unattended.empty():
            self._have_thread()
        try:
            work.announce()
        finally:
            with self._lock:
                self._free += 1

    def _refuse_closed(self) -> None:
        if self._owner != os.getpid():
            raise ClosedGroupError("a process group cannot be used in a forked child of its process")
        if self._is_closed:
            raise ClosedGroupError("the process group has been destroyed or aborted")


_attendants: "weakref.WeakSet[Attendant]" = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for attendant in list(_attendants):
        attendant.leave()
