"""How far this rank has come with the chunks of a channel's collectives.

Note [Ready and done]. A collective goes in chunks. For each chunk every rank sends two signals to every other
rank: *ready* (my part can be read, and written to) and *done* (I touch nothing of this chunk any more, and my
slice of it is final). Each pair of ranks has a semaphore per signal and direction. Chunks follow each other
in the same order on every rank, so the number of signals that have come is all that a rank has to know.

Note [Over and done]. A chunk is over for a rank when its result is there and nobody touches the rank's tensor
any more. Usually that is when all ranks are done. But a rank that has helped another knows that its slice is
final before the other rank has looked. What the others have yet to read, the header and the claims, is kept
until they are done. A rank that only gives something away, as the source of a broadcast does, waits until its
part is ready, and not until anybody has read it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence, Set

from paceline.comm.pending import Pending
from paceline.comm.shm.arena import Span
from paceline.comm.shm.claims import MAX_CHUNKS_AHEAD, SliceClaims
from paceline.comm.shm.collective import (
    IN_PLACE,
    STAGING_BUFFERS,
    Collective,
    Headers,
    Launched,
    Until,
    encoded,
)
from paceline.comm.shm.peer_failures import PeerFailures
from paceline.comm.shm.segment import CHUNK_BYTES, Segment
from paceline.comm.shm.semaphores import Signal

# How many seconds to sleep while another rank reduces this rank's slice: not longer than that takes.
_HELPED_SLEEP = 0.0001


class Awaited:
    """Something that another rank of this host has to do next.

    Attributes:
        hint: is not zero if it seems to be done, see Note [Hints] in libc.py.
    """

    hint: memoryview

    def sleep(self, seconds: float) -> bool:
        """Sleep until it is done, or for some time; whether it seems to be done."""
        raise NotImplementedError

    def missing(self) -> Sequence[int]:
        """The ranks that have not done it."""
        raise NotImplementedError


class _AwaitedSignal(Awaited):
    """A rank's signal that has to come next.

    Args:
        signal: what kind of signal.
        other: the rank.
        count: how many have to come.
    """

    def __init__(self, signal: Signal, other: int, count: int) -> None:
        self._signal = signal
        self._other = other
        self._count = count
        self.hint = signal.hints[other]

    def sleep(self, seconds: float) -> bool:
        """Sleep until a signal comes; whether that was the last one."""
        return self._signal.sleep(self._other, self._count, seconds)

    def missing(self) -> Sequence[int]:
        """The ranks that have not sent as many."""
        return self._signal.all_missing(self._count)


class _AwaitedClaim(Awaited):
    """A claim that another rank holds while it changes its part, or for good if it has given up."""

    def __init__(self, stages: "Stages", chunk: int) -> None:
        self._stages = stages
        self._chunk = chunk
        self.hint = stages.claims.own_hint(chunk)

    def sleep(self, seconds: float) -> bool:
        """Sleep for some time; whether the claim seems to be free."""
        time.sleep(min(seconds, _HELPED_SLEEP))
        return bool(self.hint[0])

    def missing(self) -> Sequence[int]:
        """Any rank may hold it."""
        return [] if self._stages.exchanged > self._chunk else self._stages.others


class HelpedSlice(Awaited):
    """This rank's slice of a chunk, which another rank has claimed and not finished."""

    def __init__(self, claims: SliceClaims, chunk: int, others: list[int]) -> None:
        self._claims = claims
        self._chunk = chunk
        self._others = others
        self._is_done = False
        self.hint = claims.finished_hint(chunk)

    def done(self) -> bool:
        """Whether the slice is reduced."""
        self._is_done = self._is_done or self._claims.receive_finished(self._chunk)
        return self._is_done

    def sleep(self, seconds: float) -> bool:
        """Sleep for some time; whether the slice seems to be reduced."""
        time.sleep(min(seconds, _HELPED_SLEEP))
        return bool(self.hint[0])

    def missing(self) -> Sequence[int]:
        """The rank that has claimed it; all if that one has not said so."""
        if self._is_done:
            return []
        helper = self._claims.helper_of(self._chunk)
        return self._others if helper is None else [helper]


class Stages:
    """The stages that chunks pass, one after the other. Only one thread at a time may use it.

    Args:
        segment: the shared file.
        rank: this rank's number among those of the channel.
        size: the number of those ranks.
        ready: the signal that a chunk is ready.
        done: the signal that a rank is done with a chunk.
        headers: the headers of all ranks.
        claims: the claims of all slices.
        failures: raises if ranks have launched different collectives.
        staging: addresses for this rank's staging buffers.
        in_flight: will hold the collectives that have been launched and are not done on every rank.

    Attributes:
        in_flight: the collectives that have been launched and are not done on every rank.
        others: the other ranks.
        claims: the claims of all slices.
        launched: the number of chunks that have been launched.
        exchanged: the number of chunks on which this rank has done its work, or another for it.
        over: the number of chunks that are over.
        done: the number of chunks that all ranks are done with.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        size: int,
        *,
        ready: Signal,
        done: Signal,
        headers: Headers,
        claims: SliceClaims,
        failures: PeerFailures,
        staging: Span,
        in_flight: deque[Launched],
    ) -> None:
        self.in_flight = in_flight
        self.launched = self.over = self.done = 0
        self._segment = segment
        self._rank = rank
        # Each rank begins with the next one, so that helpers do not all begin with the same.
        self.others = [(rank + step) % size for step in range(1, size)]
        self._ready_signal = ready
        self._done_signal = done
        self._headers = headers
        self.claims = claims
        self._failures = failures
        self._staging = staging
        self._reserved = [0] * STAGING_BUFFERS  # bytes of each staging buffer that have memory
        self._busy_until = [0] * STAGING_BUFFERS  # each is in use until this many chunks are over
        self._collectives = self._staged_chunks = 0
        self._ready = self.exchanged = self._distributed = 0
        # The collectives that have chunks which have not passed a stage.
        self._unready: deque[Launched] = deque()
        self._unexchanged: deque[Launched] = deque()
        self._undistributed: deque[Launched] = deque()
        self._unfinished: deque[Launched] = deque()
        # What the chunks that are exchanged and not distributed wait for.
        self._waiting: deque[Pending | HelpedSlice | None] = deque()
        self._helped: dict[int, set[int]] = {}  # by chunk, the ranks whose slices this rank has reduced
        self._offered = 0  # all slices of the chunks before this one have been claimed by somebody

    def enqueue(self, collective: Collective) -> Launched:
        """Give a collective its number, and numbers to its chunks."""
        if (span := collective.span) is not None:
            place = span.offset, IN_PLACE
        else:
            place = self._staging.offset, self._staged_chunks
            self._staged_chunks += collective.chunks
        number, first = self._collectives, self.launched
        self._headers.write(self._rank, number, *place, collective.text)
        launched = Launched(
            self._segment,
            collective,
            collective.text,
            collective.until,
            number,
            first,
            first + collective.chunks,
            {self._rank: place},
        )
        self._collectives = number + 1
        self.launched = launched.end
        self._unready.append(launched)
        self._unexchanged.append(launched)
        self._undistributed.append(launched)
        self._unfinished.append(launched)
        self.in_flight.append(launched)
        return launched

    def advance(self) -> None:
        """Do what can be done without waiting for anyone."""
        while (
            (self._unready and self._post_ready())
            or (self.exchanged < self._ready and self._exchange())
            or (self._waiting and self._distribute())
            or (self.over < self._distributed and self._end())
            or (self.done < self.over and self._finish())
        ):
            pass

    def help(self) -> bool:
        """Reduce a slice that its own rank has not begun; False if there is none. See Note [Help]."""
        self._offered = max(self._offered, self.over)
        for launched in self._unfinished:
            while launched.first <= self._offered < min(launched.end, self.exchanged):
                if launched.collective is not None and launched.collective.has_slices:
                    for other in self.others:
                        if self.claims.claim_to_help(self._offered, other):
                            self._reduce_for(launched, other)
                            return True
                self._offered += 1
        return False

    def count(self, until: Until) -> int:
        """How many chunks have come so far."""
        if until is Until.OVER:
            return self.over
        if until is Until.HAS_RESULT:
            return self._distributed
        return self._ready if until is Until.READY else self.done

    def awaited(self, until: Until) -> Awaited | Pending | None:
        """What has to come next; None if it has just come."""
        if self.exchanged < self._ready:
            signal = self._missing(self._ready_signal, self.exchanged + 1)
            return signal or _AwaitedClaim(self, self.exchanged)
        if self._waiting:
            return self._waiting[0]
        if until is Until.ALL_DONE or self.over == self._distributed:
            return self._missing(self._done_signal, self.done + 1)
        return self._missing(self._done_signal, self.over + 1, self._helped.get(self.over, frozenset()))

    def _missing(self, signal: Signal, count: int, but: Set[int] = frozenset()) -> Awaited | None:
        """The first signal that is missing, but for those of some ranks."""
        missing = [other for other in signal.all_missing(count) if other not in but]
        return _AwaitedSignal(signal, missing[0], count) if missing else None

    def change(self, launched: Launched, change: Callable[[], None] | None) -> bool:
        """Change this rank's part of a collective, or withdraw it; False if some rank has begun to read.

        See Note [Second thoughts] in claims.py.

        Args:
            launched: the collective.
            change: changes this rank's tensor; None to keep anybody from ever ending the collective.
        """
        collective = launched.collective
        chunks = range(launched.first, min(launched.end, self._ready))
        if collective is None or not self.claims.claim_all(chunks):
            return False
        if change is None:
            return True
        try:
            change()
            if launched.places[self._rank][1] != IN_PLACE:
                for number in chunks:
                    collective.copy_in(number - launched.first, launched)
        finally:
            self.claims.free_all(chunks)
        return True

    def poll(self) -> None:
        """Receive what has come; ``advance`` relies on hints."""
        self._ready_signal.all_missing(self.exchanged + 1)
        self._done_signal.all_missing(self.done + 1)

    def release_staging(self) -> None:
        """Release the memory of the staging buffers until they are needed, unless something is in flight."""
        # In a file of limited size the memory might not be there the next time.
        if self.done == self.launched and not self._segment.is_limited:
            self._segment.release(self._staging.offset, self._staging.nbytes)
            self._reserved = [0] * STAGING_BUFFERS

    def _reduce_for(self, launched: Launched, other: int) -> None:
        number = self._offered
        assert launched.collective is not None
        launched.collective.reduce_slice(number - launched.first, launched, other)
        self.claims.post_finished(number, other)
        self._helped.setdefault(number, set()).add(other)

    def _post_ready(self) -> bool:
        """Signal that the next chunk is ready; False if its staging buffer is still in use."""
        number = self._ready
        if number - self.done >= MAX_CHUNKS_AHEAD:
            return False
        launched = self._unready[0]
        offset, first_buffer = launched.places[self._rank]
        if first_buffer != IN_PLACE and not self._copy_in(launched, offset, first_buffer):
            return False
        self._ready = number + 1
        if self._ready == launched.end:
            self._unready.popleft()
        self._ready_signal.post()
        return True

    def _copy_in(self, launched: Launched, offset: int, first_buffer: int) -> bool:
        """Copy the next chunk to its staging buffer; False if that is still in use."""
        collective, chunk = launched.collective, self._ready - launched.first
        assert collective is not None
        if not (nbytes := collective.nbytes(chunk, self._rank)):
            return True
        buffer = (first_buffer + chunk) % STAGING_BUFFERS
        if self._busy_until[buffer] > self.over:
            return False
        self._busy_until[buffer] = self._ready + 1
        if nbytes > self._reserved[buffer]:
            self._segment.reserve(offset + buffer * CHUNK_BYTES, nbytes)
            self._reserved[buffer] = nbytes
        collective.copy_in(chunk, launched)
        return True

    def _exchange(self) -> bool:
        """Do this rank's work on the next chunk; False if not all ranks are ready."""
        number = self.exchanged
        if self._ready_signal.first_missing(number + 1) is not None:
            return False
        launched = self._unexchanged[0]
        collective, chunk = launched.collective, number - launched.first
        assert collective is not None
        if chunk == 0:
            self._read_headers(launched)
        waiting: Pending | HelpedSlice | None = None
        is_claimed = self.claims.claim_own(number)  # see Note [Second thoughts]
        if is_claimed and collective.has_slices:
            collective.reduce_slice(chunk, launched, self._rank)
        elif is_claimed:
            waiting = collective.exchange(chunk, launched)
        elif collective.has_slices:
            waiting = HelpedSlice(self.claims, number, self.others)
        else:
            return False
        self._waiting.append(waiting)
        self.exchanged = number + 1
        if self.exchanged == launched.end:
            self._unexchanged.popleft()
        return True

    def _read_headers(self, launched: Launched) -> None:
        """See where the other ranks' parts are, and that they have launched the same collective."""
        own = encoded(launched.text)
        for other in self.others:
            offset, first_buffer, text = self._headers.read(other, launched.number)
            launched.places[other] = offset, first_buffer
            if text != own:
                self._failures.raise_unmatched(launched, text, other)

    def _distribute(self) -> bool:
        """Distribute what came from other hosts and signal that this rank is done; False if it is missing."""
        launched, number = self._undistributed[0], self._distributed
        assert launched.collective is not None
        if (waiting := self._waiting[0]) is not None and not waiting.done():
            # It may have been claimed only for a moment, by a rank that has changed its part.
            if not (isinstance(waiting, HelpedSlice) and self.claims.claim_own_again(number)):
                return False
            launched.collective.reduce_slice(number - launched.first, launched, self._rank)
        elif waiting is not None and not isinstance(waiting, HelpedSlice):
            waiting.wait(lambda: None)
        self._waiting.popleft()
        launched.collective.distribute(number - launched.first, launched)
        self._distributed += 1
        if self._distributed == launched.end:
            self._undistributed.popleft()
            if launched.until is not Until.OVER:
                launched.collective = None
        self._done_signal.post()
        return True

    def _end(self) -> bool:
        """End the next chunk on this rank; False if somebody may still touch it."""
        number = self.over
        if self._done_signal.first_missing(number + 1) is not None and not self._is_final(number):
            return False
        launched = self._unfinished[0]
        if launched.collective is not None and launched.places[self._rank][1] != IN_PLACE:
            launched.collective.copy_out(number - launched.first, launched)
        self.over = number + 1
        if self.over == launched.end:
            launched.collective = None
            self._unfinished.popleft()
        return True

    def _is_final(self, number: int) -> bool:
        """Whether this rank has reduced the slices of all ranks that are not done with a chunk."""
        helped = self._helped.get(number)
        return helped is not None and helped.issuperset(self._done_signal.all_missing(number + 1))

    def _finish(self) -> bool:
        """Finish the next chunk; False if not all ranks are done with it."""
        if self._done_signal.first_missing(self.done + 1) is not None:
            return False
        if self._helped:
            self._helped.pop(self.done, None)
        self.done += 1
        if self.done == self.in_flight[0].end:
            self.in_flight.popleft()
        return True
