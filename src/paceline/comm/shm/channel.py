"""An ordered stream of collectives among the ranks that share memory.

Note [No thread]. Nothing happens in the background: a rank makes progress when it launches something and when
it waits. On a machine whose cores are busy with backward a thread would gain no time and cost much. There is
one exception: a rank that gives up a step, or will end it later, owes the others its part of what it has
launched, and lets a thread do that. It ends before the interpreter exits, see Note [Works that gloo drops].
"""

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch

from paceline.comm.pending import OnSlow, Pending
from paceline.comm.shm.arena import Arena, Span
from paceline.comm.shm.claims import SliceClaims, claims_bytes, make_claims
from paceline.comm.shm.collective import (
    MAX_IN_FLIGHT,
    Collective,
    Headers,
    Launched,
    Until,
    headers_bytes,
)
from paceline.comm.shm.peer_failures import PeerFailures, WaitTimer
from paceline.comm.shm.polling import Poller
from paceline.comm.shm.segment import CHANNELS, RankLocks, Segment, round_up
from paceline.comm.shm.semaphores import Signal, make_signal, signal_bytes
from paceline.comm.shm.stages import Awaited, Stages
from paceline.errors import ClosedGroupError, CollectiveError

T = TypeVar("T")

# How many seconds to sleep before checking the other ranks; the short time is for when other channels or
# threads have something to do.
_SLEEP, _SHORT_SLEEP = 0.1, 0.001
# How many seconds to try to change something, if another rank is changing its part too.
_CHANGE_SECONDS = 0.5
# This process's channels: see Channel._advance_other_channels.
_channels: "weakref.WeakValueDictionary[int, Channel]" = weakref.WeakValueDictionary()
_exiting = threading.Event()


def end_threads(seconds: float) -> None:
    """End the channels' threads, because the interpreter exits; waits for each as long at most."""
    _exiting.set()
    for reference in _channels.valuerefs():
        if (channel := reference()) is not None:
            channel.join_background(seconds)


class Channel:
    """This rank's end of a stream of collectives.

    Several threads may use it. Their collectives go in the order in which they were launched.

    Args:
        segment: the shared file.
        arena: this rank's region of it.
        number: which of the segment's channels it is.
        ranks: the ranks that share the segment, as users know them.
        rank: which of them this one is.
        locks: tell who has ended.
        timeout: how many seconds to wait for others.
        staging: addresses for this rank's staging buffers.

    Attributes:
        in_flight: the collectives that have been launched and are not over on every rank.
    """

    def __init__(
        self,
        segment: Segment,
        arena: Arena,
        number: int,
        ranks: Sequence[int],
        rank: int,
        locks: RankLocks,
        *,
        timeout: float,
        staging: Span,
    ) -> None:
        self.arena = arena
        self.rank = rank
        self.size = len(ranks)
        self.in_flight: deque[Launched] = deque()
        self._others = [other for other in range(self.size) if other != rank]
        self._segment = segment
        self._timeout = timeout
        self._memory = segment.at(*_layout(number, self.size))  # keeps it mapped
        ready, done, failed, at_headers, at_claims = _parts(self._memory.data_ptr(), self.size)
        headers = Headers(at_headers, self.size)
        self._failures = PeerFailures(
            rank, ranks, Signal(failed, rank, self.size), headers, locks, self.in_flight
        )
        self._stages = Stages(
            segment,
            rank,
            self.size,
            ready=Signal(ready, rank, self.size),
            done=Signal(done, rank, self.size),
            headers=headers,
            claims=SliceClaims(at_claims, rank, self.size),
            failures=self._failures,
            staging=staging,
            in_flight=self.in_flight,
        )
        self._poller = Poller()
        self._lock = threading.RLock()
        self._last_thread: int | None = None
        self._has_threads = False
        self._sleep_lock = threading.Lock()  # held by the thread that sleeps until there is a signal
        self._background: threading.Thread | None = None
        self._background_chunks = 0  # this many chunks must be done before the thread may end
        _channels[id(self)] = self

    def launch(self, collective: Collective) -> Launched:
        """Begin a collective, after those that were begun before."""
        while True:
            with self._lock:
                if self._failures.error is not None:
                    self._failures.raise_again()
                if len(self.in_flight) < MAX_IN_FLIGHT:
                    self._note_thread()
                    launched = self._stages.enqueue(collective)
                    self._advance()
                    return launched
                first = self.in_flight[0]
            self._wait_for(first.end, Until.ALL_DONE)

    def is_over(self, launched: Launched) -> bool:
        """Whether a collective is over, as far as this rank has seen."""
        return launched.end <= self._stages.count(launched.until)

    def advance(self) -> None:
        """Do what can be done without waiting for anyone."""
        with self._lock:
            if self._failures.error is None:
                self._stages.poll()
                self._advance()

    def _advance(self) -> None:
        try:
            self._stages.advance()
        except BaseException as error:
            # Half of something was done, and nobody knows which half.
            self._failures.fail(error)
            raise

    def _help(self) -> bool:
        try:
            return self._stages.help()
        except BaseException as error:
            self._failures.fail(error)
            raise

    def wait(
        self, launched: Launched, on_slow: OnSlow = lambda: None, *, timeout: float | None = None
    ) -> None:
        """Wait until a collective is over.

        ``on_slow`` is called from time to time if that takes long, and may raise. The timeout is the
        channel's, unless another is given.
        """
        self._wait_for(launched.end, launched.until, on_slow=on_slow, timeout=timeout)

    def change(self, launched: Launched, change: Callable[[], None] | None) -> bool:
        """Change what this rank has given to a collective, unless all ranks have come and may have read it.

        Args:
            launched: the collective.
            change: changes this rank's tensor; None to keep every rank from ending the collective.

        Returns:
            Whether it was changed. Then all ranks end the collective with the change.
        """
        until = time.monotonic() + _CHANGE_SECONDS
        while not self.is_over(launched) and time.monotonic() < until:
            with self._lock:
                # Without a change, what another rank has failed in could still end on a rank that is late.
                if self._stages.change(launched, change) or self._has_failed():
                    return True
            # All ranks have come, or another one is changing its part just now.
            time.sleep(_SHORT_SLEEP)
            self.advance()
        return False

    def give_up(self, launched: Launched) -> bool:
        """Have every rank fail in a collective, unless all ranks have come and it may have ended on one.

        Returns:
            Whether the collective has failed on every rank. Then the channel cannot be used any more.
        """
        if not self.change(launched, None):
            return False
        with self._lock:
            self._failures.give_up(launched)
        return True

    def _has_failed(self) -> bool:
        """Whether this rank or another has failed."""
        with contextlib.suppress(CollectiveError):
            self._failures.check_failed(self._others)
        return self._failures.error is not None

    def run(self, collective: Collective) -> None:
        """Launch a collective and wait for it."""
        self.wait(self.launch(collective))

    def release_staging(self) -> None:
        """Release the memory of the staging buffers until they are needed; waits for what is in flight."""
        self._wait_for(self._stages.launched, Until.ALL_DONE)
        with self._lock:
            self._stages.release_staging()

    def finish_in_background(self) -> None:
        """Let a thread do this rank's part of what is in flight, because other ranks need it."""
        with self._lock:
            self._background_chunks = self._stages.launched
            is_needed = self._stages.done < self._background_chunks and self._failures.error is None
            if is_needed and self._background is None:
                self._background = threading.Thread(
                    target=self._run_background, name="paceline-channel", daemon=True
                )
                self._background.start()

    def join_background(self, seconds: float) -> None:
        """Wait until the thread has ended, if there is one."""
        if (thread := self._background) is not None:
            thread.join(seconds)

    def _run_background(self) -> None:
        try:
            while self._background is not None:
                self._wait_for(self._background_chunks, Until.ALL_DONE, in_background=True)
                with self._lock:  # there may be more by now
                    if self._stages.done >= self._background_chunks:
                        self._background = None
        except Exception:  # the next wait raises it, if the interpreter does not exit
            self._background = None

    def _wait_for(
        self,
        chunks: int,
        until: Until,
        *,
        on_slow: OnSlow = lambda: None,
        timeout: float | None = None,
        in_background: bool = False,
    ) -> None:
        timer = None
        stages = self._stages
        self._note_thread()
        if in_background:
            on_slow = _check_not_exiting
        while True:
            with self._lock:
                if in_background:
                    _check_not_exiting()
                if self._failures.error is not None:
                    self._failures.raise_again()
                self._advance()
                if chunks <= stages.count(until):
                    return
                if self._help():
                    continue
                awaited = stages.awaited(until)
            if isinstance(awaited, Awaited):
                if not self._wait_briefly(awaited):
                    timer = timer or WaitTimer(self._timeout if timeout is None else timeout, on_slow)
                    self._advance_other_channels()
                    self._failures.check(partial(self._missing, awaited), timer)
            elif awaited is not None:
                self._wait_for_hosts(awaited, on_slow)

    def _missing(self, awaited: Awaited) -> Sequence[int]:
        with self._lock:
            self._advance()
            return awaited.missing()

    def _wait_for_hosts(self, reduction: Pending, on_slow: OnSlow) -> None:
        timer = WaitTimer(self._timeout, on_slow)

        def check() -> None:
            self._failures.check_failed(self._others)
            timer.tick()  # the process group has a timeout of its own

        try:
            reduction.wait(check)
        except CollectiveError as error:
            self._failures.fail(error)
            raise

    def _wait_briefly(self, awaited: Awaited) -> bool:
        """Wait a short time; whether what is awaited seems to have come."""
        with self._sleep_lock:  # signals that another thread receives meanwhile count here too
            if self._poller.poll(awaited.hint):
                return True
            # Another thread may receive the signal that this one sleeps for, or wait for the lock.
            short = self._has_threads or self._others_in_flight()
            start = time.perf_counter()
            has_come = awaited.sleep(_SHORT_SLEEP if short else _SLEEP)
            self._poller.learn(time.perf_counter() - start)
            return has_come

    def _note_thread(self) -> None:
        thread = threading.get_ident()
        if thread != self._last_thread:
            self._has_threads = self._last_thread is not None
            self._last_thread = thread

    def _others_in_flight(self) -> list["Channel"]:
        # A list of references and not an iterator: other threads make channels meanwhile.
        channels = [reference() for reference in _channels.valuerefs()]
        others = [each for each in channels if each is not None and each is not self]
        return [each for each in others if each.in_flight and each._failures.error is None]

    def _advance_other_channels(self) -> None:
        """Make progress in other channels: the rank that this one waits for may wait for that."""
        for channel in self._others_in_flight():
            if channel._lock.acquire(blocking=False):
                try:
                    # Errors are raised to whoever waits there. Its tensors may be inference tensors.
                    with contextlib.suppress(Exception), torch.inference_mode():
                        channel.advance()
                finally:
                    channel._lock.release()


def _in_forked_child() -> None:
    """See Note [Forked children] in segment.py."""
    for reference in _channels.valuerefs():
        if (channel := reference()) is not None and channel._failures.error is None:
            channel._failures.error = ClosedGroupError(
                "a forked child cannot take part in its parent's collectives"
            )


os.register_at_fork(after_in_child=_in_forked_child)


def make_channel(segment: Segment, number: int, size: int) -> None:
    """Make a channel's semaphores; one rank does this, before any other rank looks at them."""
    offset, nbytes = _layout(number, size)
    segment.reserve(offset, nbytes)
    *signals, _, claims = _parts(segment.at(offset, nbytes).data_ptr(), size)
    for signal in signals:
        make_signal(signal, size)
    make_claims(claims, size)


def map_channel(segment: Segment, number: int, size: int) -> None:
    """Map a channel's semaphores; raises OSError if that is not possible."""
    segment.at(*_layout(number, size))


def _check_not_exiting() -> None:
    if _exiting.is_set():
        raise CollectiveError("the interpreter exits")


def _layout(number: int, size: int) -> tuple[int, int]:
    """Where a channel's semaphores and headers are in the segment: their offset and length."""
    nbytes = round_up(sum(_lengths(size)))
    return CHANNELS + number * nbytes, nbytes


def _parts(address: int, size: int) -> list[int]:
    """The addresses of the signals ready, done and failed, of the headers, and of the claims."""
    return list(accumulate(_lengths(size)[:-1], initial=address))


def _lengths(size: int) -> list[int]:
    return [*[signal_bytes(size)] * 3, headers_bytes(size), claims_bytes(size)]
