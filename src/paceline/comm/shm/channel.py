"""An ordered stream of collectives among the ranks that share memory.

Note [Ready and done]. A collective goes in chunks. For each chunk every rank sends two signals to every other
rank: *ready* (my part can be read, and written to) and *done* (I touch nothing of this chunk any more). Each
pair of ranks has a semaphore per signal and direction. Chunks follow each other in the same order on every
rank, so the number of signals that have come is all that a rank has to know.

Note [No thread]. Nothing happens in the background: a rank makes progress when it launches something and when
it waits. On a machine whose cores are busy with backward a thread would gain no time and cost much. There is
one exception: a rank that gives up a step, or will end it later, owes the others its part of what it has
launched, and lets a thread do that. It ends before the interpreter exits, see Note [Works that gloo drops].
"""

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from paceline.comm.pending import OnSlow, Pending
from paceline.comm.shm.arena import Arena, Span
from paceline.comm.shm.collective import (
    CHUNK_BYTES,
    IN_PLACE,
    MAX_IN_FLIGHT,
    STAGING_BUFFERS,
    ChunkViews,
    Collective,
    CollectiveHeader,
    Headers,
    Launched,
    encoded,
    headers_bytes,
)
from paceline.comm.shm.peer_failures import PeerFailures, WaitTimer
from paceline.comm.shm.segment import CHANNELS, RankLocks, Segment, round_up
from paceline.comm.shm.semaphores import Signal, make_signal, signal_bytes
from paceline.errors import CollectiveError

# Ready, done, and failed.
_SIGNALS = 3
# How often to look for a signal before sleeping: worth while as long as the other ranks are likely to run.
_SPINS = 200
# How many seconds to sleep before checking the other ranks; the short time is for when other channels or
# threads have something to do.
_SLEEP, _SHORT_SLEEP = 0.1, 0.001
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
        address, nbytes = self._memory.data_ptr(), signal_bytes(self.size)
        self._ready = Signal(address, rank, self.size)
        self._done = Signal(address + nbytes, rank, self.size)
        self._headers = Headers(address + _SIGNALS * nbytes, self.size)
        failed = Signal(address + 2 * nbytes, rank, self.size)
        self._failures = PeerFailures(rank, ranks, failed, self._headers, locks, self.in_flight)
        self._staging = staging
        self._reserved = [0] * STAGING_BUFFERS  # bytes of each staging buffer that have memory
        self._busy_until = [0] * STAGING_BUFFERS  # each is in use until this many chunks are done
        self._spins = _SPINS if self.size <= len(os.sched_getaffinity(0)) else 1
        self._lock = threading.RLock()
        self._last_thread: int | None = None
        self._has_threads = False
        self._sleep_lock = threading.Lock()  # held by the thread that sleeps until there is a signal
        self._launched_collectives = self._staged_chunks = 0
        # How many chunks were launched, and how many of them have come how far.
        self._launched_chunks = self._ready_chunks = self._exchanged_chunks = 0
        self._distributed_chunks = self._done_chunks = 0
        # The reductions between hosts of the chunks that are exchanged and not distributed.
        self._between_hosts: deque[Pending | None] = deque()
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
                    launched = self._enqueue(collective)
                    self.advance()
                    return launched
                first = self.in_flight[0]
            self._wait_for(first.end, all_done=True)

    def is_over(self, launched: Launched) -> bool:
        """Whether a collective is over, as far as this rank has seen."""
        return self._are_over(launched.end, all_done=launched.awaits_done)

    def advance(self) -> None:
        """Do what can be done without waiting for anyone."""
        with self._lock:
            try:
                while (
                    (self._ready_chunks < self._launched_chunks and self._post_ready())
                    or (self._exchanged_chunks < self._ready_chunks and self._exchange())
                    or (self._distributed_chunks < self._exchanged_chunks and self._distribute())
                    or (self._done_chunks < self._distributed_chunks and self._finish())
                ):
                    pass
            except BaseException as error:
                # Half of something was done, and nobody knows which half.
                self._failures.fail(error)
                raise

    def wait(
        self, launched: Launched, on_slow: OnSlow = lambda: None, *, timeout: float | None = None
    ) -> None:
        """Wait until a collective is over.

        ``on_slow`` is called from time to time if that takes long, and may raise. The timeout is the
        channel's, unless another is given.
        """
        self._wait_for(launched.end, all_done=launched.awaits_done, on_slow=on_slow, timeout=timeout)

    def run(self, collective: Collective) -> None:
        """Launch a collective and wait for it."""
        self.wait(self.launch(collective))

    def release_staging(self) -> None:
        """Release the memory of the staging buffers until they are needed; waits for what is in flight."""
        self._wait_for(self._launched_chunks, all_done=True)
        with self._lock:
            # In a file of limited size the memory might not be there the next time.
            if self._done_chunks == self._launched_chunks and not self._segment.is_limited:
                self._segment.release(self._staging.offset, self._staging.nbytes)
                self._reserved = [0] * STAGING_BUFFERS

    def finish_in_background(self) -> None:
        """Let a thread do this rank's part of what is in flight, because other ranks need it."""
        with self._lock:
            self._background_chunks = self._launched_chunks
            is_needed = self._done_chunks < self._background_chunks and self._failures.error is None
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
                self._wait_for(self._background_chunks, all_done=True, in_background=True)
                with self._lock:  # there may be more by now
                    if self._done_chunks >= self._background_chunks:
                        self._background = None
        except Exception:  # the next wait raises it, if the interpreter does not exit
            self._background = None

    def _wait_for(
        self,
        chunks: int,
        *,
        all_done: bool,
        on_slow: OnSlow = lambda: None,
        timeout: float | None = None,
        in_background: bool = False,
    ) -> None:
        timer = None
        self._note_thread()
        if in_background:
            on_slow = _check_not_exiting
        while True:
            with self._lock:
                if in_background:
                    _check_not_exiting()
                if self._failures.error is not None:
                    self._failures.raise_again()
                self.advance()
                if self._are_over(chunks, all_done=all_done):
                    return
                between_hosts, signal, count = self._awaited()
                other = None if signal is None else signal.first_missing(count)
            if between_hosts is not None:
                self._wait_for_hosts(between_hosts, on_slow)
            elif signal is not None and other is not None and not self._wait_briefly(signal, other, count):
                timer = timer or WaitTimer(self._timeout if timeout is None else timeout, on_slow)
                self._advance_other_channels()
                self._failures.check(signal, count, timer)

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

    def _wait_briefly(self, signal: Signal, other: int, count: int) -> bool:
        """Wait a short time for a rank's signals; whether they came."""
        with self._sleep_lock:  # signals that another thread receives meanwhile count here too
            for _ in range(self._spins):
                if signal.has_come(other, count):
                    return True
            # Another thread may receive the signal that this one sleeps for, or wait for the lock.
            short = self._has_threads or self._others_in_flight()
            return signal.sleep(other, count, _SHORT_SLEEP if short else _SLEEP)

    def _note_thread(self) -> None:
        thread = threading.get_ident()
        if thread != self._last_thread:
            self._has_threads = self._last_thread is not None
            self._last_thread = thread

    def _others_in_flight(self) -> list["Channel"]:
        # A list of references and not an iterator: other threads make channels meanwhile.
        channels = [reference() for reference in _channels.valuerefs()]
        return [each for each in channels if each is not None and each is not self and each.in_flight]

    def _advance_other_channels(self) -> None:
        """Make progress in other channels: the rank that this one waits for may wait for that."""
        for channel in self._others_in_flight():
            if channel._failures.error is None and channel._lock.acquire(blocking=False):
                try:
                    # Errors are raised to whoever waits there. Its tensors may be inference tensors.
                    with contextlib.suppress(Exception), torch.inference_mode():
                        channel.advance()
                finally:
                    channel._lock.release()

    def _are_over(self, chunks: int, *, all_done: bool) -> bool:
        return chunks <= (self._done_chunks if all_done else self._distributed_chunks)

    def _awaited(self) -> tuple[Pending | None, Signal | None, int]:
        """What has to come next: a reduction between hosts, or a number of signals of some kind."""
        if self._exchanged_chunks < self._ready_chunks:
            return None, self._ready, self._exchanged_chunks + 1
        if self._distributed_chunks < self._exchanged_chunks:
            return self._between_hosts[0], None, 0
        return None, self._done, self._done_chunks + 1

    def _enqueue(self, collective: Collective) -> Launched:
        """Give a collective its number, and numbers to its chunks."""
        self._note_thread()
        header = self._header_of(collective)
        self._headers.write(self.rank, self._launched_collectives, header)
        launched = Launched(
            collective,
            collective.text,
            collective.awaits_done,
            number=self._launched_collectives,
            first=self._launched_chunks,
            end=self._launched_chunks + collective.chunks,
            headers={self.rank: header},
        )
        self._launched_collectives += 1
        self._launched_chunks = launched.end
        self.in_flight.append(launched)
        return launched

    def _header_of(self, collective: Collective) -> CollectiveHeader:
        text = encoded(collective.text)
        if collective.span is not None:
            return CollectiveHeader(collective.span.offset, IN_PLACE, text)
        header = CollectiveHeader(self._staging.offset, self._staged_chunks, text)
        self._staged_chunks += collective.chunks
        return header

    def _post_ready(self) -> bool:
        """Signal that the next chunk is ready; False if its staging buffer is still in use."""
        launched, chunk = self._find(self._ready_chunks)
        collective, header = launched.collective, launched.headers[self.rank]
        assert collective is not None
        if header.first_buffer != IN_PLACE and (nbytes := collective.nbytes(chunk, self.rank)):
            buffer = (header.first_buffer + chunk) % STAGING_BUFFERS
            if self._busy_until[buffer] > self._done_chunks:
                return False
            self._busy_until[buffer] = self._ready_chunks + 1
            if nbytes > self._reserved[buffer]:
                self._segment.reserve(header.offset + buffer * CHUNK_BYTES, nbytes)
                self._reserved[buffer] = nbytes
            collective.copy_in(chunk, ChunkViews(self._segment, launched, chunk))
        self._ready_chunks += 1
        self._ready.post()
        return True

    def _exchange(self) -> bool:
        """Do this rank's work on the next chunk; False if not all ranks are ready."""
        if self._ready.first_missing(self._exchanged_chunks + 1) is not None:
            return False
        launched, chunk = self._find(self._exchanged_chunks)
        if chunk == 0:
            self._read_headers(launched)
        assert launched.collective is not None
        self._between_hosts.append(
            launched.collective.exchange(chunk, ChunkViews(self._segment, launched, chunk))
        )
        self._exchanged_chunks += 1
        return True

    def _distribute(self) -> bool:
        """Distribute what came from other hosts and signal that this rank is done; False if it is missing."""
        if (reduction := self._between_hosts[0]) is not None:
            if not reduction.done():
                return False
            reduction.wait(lambda: None)
        self._between_hosts.popleft()
        launched, chunk = self._find(self._distributed_chunks)
        assert launched.collective is not None
        launched.collective.distribute(chunk, ChunkViews(self._segment, launched, chunk))
        self._distributed_chunks += 1
        if self._distributed_chunks == launched.end and not launched.awaits_done:
            launched.collective = None
        self._done.post()
        return True

    def _finish(self) -> bool:
        """Finish the next chunk; False if not all ranks are done with it."""
        if self._done.first_missing(self._done_chunks + 1) is not None:
            return False
        launched, chunk = self._find(self._done_chunks)
        if launched.collective is not None and launched.headers[self.rank].first_buffer != IN_PLACE:
            launched.collective.copy_out(chunk, ChunkViews(self._segment, launched, chunk))
        self._done_chunks += 1
        if self._done_chunks == launched.end:
            self.in_flight.popleft()
        return True

    def _find(self, number: int) -> tuple[Launched, int]:
        """Which collective a chunk belongs to, and which of its chunks it is."""
        for launched in self.in_flight:
            if number < launched.end:
                return launched, number - launched.first
        raise AssertionError(f"no such chunk: {number}")

    def _read_headers(self, launched: Launched) -> None:
        """See where the other ranks' parts are, and that they have launched the same collective."""
        own = launched.headers[self.rank]
        for other in self._others:
            header = launched.headers[other] = self._headers.read(other, launched.number)
            if header.text != own.text:
                self._failures.raise_unmatched(launched, header, other)


def make_channel(segment: Segment, number: int, size: int) -> None:
    """Make a channel's semaphores; one rank does this, before any other rank looks at them."""
    offset, nbytes = _layout(number, size)
    segment.reserve(offset, nbytes)
    address = segment.at(offset, nbytes).data_ptr()
    for signal in range(_SIGNALS):
        make_signal(address + signal * signal_bytes(size), size)


def _check_not_exiting() -> None:
    if _exiting.is_set():
        raise CollectiveError("the interpreter exits")


def _layout(number: int, size: int) -> tuple[int, int]:
    """Where a channel's semaphores and headers are in the segment: their offset and length."""
    nbytes = round_up(_SIGNALS * signal_bytes(size) + headers_bytes(size))
    return CHANNELS + number * nbytes, nbytes
