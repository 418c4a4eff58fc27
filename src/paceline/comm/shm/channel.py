"""An ordered stream of collectives among the ranks that share memory.

Note [Here and done]. A collective goes in pieces. For each, every rank says twice where it stands: *here*
(my part can be read, and written to) and *done* (I touch nothing of this piece any more). Each pair of ranks
has a semaphore for either word and direction, and pieces follow each other in one order on every rank, so
the number of words that came is all that has to be known.

Note [No thread]. Nothing happens behind the caller's back: a rank makes progress when it launches something
and when it waits. On a machine whose cores are busy with backward there is no time to be gained by a thread,
and much to be lost. But for what is left behind: a rank that gives a step up still owes its part of what it
has launched, and lets a thread do it.
"""

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from paceline.comm.pending import Pending
from paceline.comm.shm.arena import Arena, Place
from paceline.comm.shm.collective import AREAS, PIECE_BYTES, Areas, Collective, Launched
from paceline.comm.shm.life import Life
from paceline.comm.shm.notes import IN_PLACE, NOTES, Note, Notes, as_text, as_words, notes_bytes
from paceline.comm.shm.segment import CHANNELS, Segment, round_up
from paceline.comm.shm.words import Words, make_words, words_bytes
from paceline.errors import CollectiveError, LateRankError, LostRankError, UnmatchedError

Unusual = Callable[[], None]

# That a piece is here, that it is done, and that the rank broke off.
_WORDS = 3

# Spinning is worth while as long as the others are likely to be running.
_SPINS = 200
# How long to sleep before looking around, in seconds, and if other channels or threads have anything to do.
_NAP, _SHORT_NAP = 0.1, 0.001
_UNUSUAL = 2.0
_AGAIN = 1.0
# This process's, for the sake of others that wait: see Channel._help.
_channels: "weakref.WeakValueDictionary[int, Channel]" = weakref.WeakValueDictionary()


class Channel:
    """This rank's end of a stream of collectives.

    Several threads may use it; what they launch goes in the order in which they did.

    Args:
        segment: the shared file.
        arena: this rank's part of it.
        number: which of the segment's channels it is.
        ranks: the ranks that share the segment, as users know them.
        rank: which of them this one is.
        life: tells who has ended.
        timeout: so many seconds others are waited for.
        staging: addresses of this rank's, for what does not live in shared memory.

    Attributes:
        in_flight: what has been launched and is not over on every rank.
    """

    def __init__(
        self,
        segment: Segment,
        arena: Arena,
        number: int,
        ranks: Sequence[int],
        rank: int,
        life: Life,
        *,
        timeout: float,
        staging: Place,
    ) -> None:
        self.arena = arena
        self.rank = rank
        self.size = len(ranks)
        self._others = [other for other in range(self.size) if other != rank]
        self._segment = segment
        self._ranks = ranks
        self._life = life
        self._timeout = timeout
        self._memory = segment.at(*_layout(number, self.size))  # keeps it mapped
        address, words = self._memory.data_ptr(), words_bytes(self.size)
        self._here = Words(address, rank, self.size)
        self._done = Words(address + words, rank, self.size)
        self._broken = Words(address + 2 * words, rank, self.size)
        self._notes = Notes(address + 3 * words, self.size)
        self._staging = staging
        self._reserved = [0] * AREAS
        self._busy = [0] * AREAS  # each area is in use until so many pieces are over
        self._spins = _SPINS if self.size <= len(os.sched_getaffinity(0)) else 1
        self._lock = threading.RLock()
        self._thread: int | None = None  # the last that used it
        self._has_threads = False
        self._ears = threading.Lock()  # held by the thread that sleeps until there is a word
        self.in_flight: deque[Launched] = deque()
        self._collectives = self._areas = 0
        # How many pieces were launched, and how many of them have come how far.
        self._pieces = self._published = self._met = self._spread = self._ended = 0
        self._carried: deque[Pending | None] = deque()
        self._failed: Exception | None = None
        self._tail: threading.Thread | None = None
        self._owed = 0  # so many pieces are to be over before the thread may end
        _channels[id(self)] = self

    def launch(self, collective: Collective) -> Launched:
        """Begin a collective, after those that were begun before."""
        while True:
            with self._lock:
                self._refuse_failed()
                if len(self.in_flight) < NOTES:
                    launched = self._line_up(collective)
                    self.advance()
                    return launched
                first = self.in_flight[0]
            self._wait_for(first.last, fully=True)

    def over(self, launched: Launched) -> bool:
        """Whether a collective is over, as far as this rank has seen."""
        return self._is_over(launched.last, fully=launched.awaits_done)

    def advance(self) -> None:
        """Do what can be done without waiting for anyone."""
        with self._lock:
            try:
                while (
                    (self._published < self._pieces and self._publish())
                    or (self._met < self._published and self._meet())
                    or (self._spread < self._met and self._carry())
                    or (self._ended < self._spread and self._end())
                ):
                    pass
            except BaseException as error:
                # Half of something was done, and nobody knows which half.
                if self._failed is None:
                    self._break_off(error)
                raise

    def wait(
        self, launched: Launched, unusual: Unusual = lambda: None, *, timeout: float | None = None
    ) -> None:
        """Wait until a collective is over.

        ``unusual`` is called from time to time if that takes long, and may raise. The timeout is the
        channel's, unless another is given.
        """
        self._wait_for(launched.last, fully=launched.awaits_done, unusual=unusual, timeout=timeout)

    def run(self, collective: Collective) -> None:
        """Launch a collective and wait for it."""
        self.wait(self.launch(collective))

    def release_staging(self) -> None:
        """Have no memory for what lives elsewhere until it is needed again; waits for what is in flight."""
        self._wait_for(self._pieces, fully=True)
        with self._lock:
            # In a file of limited size it might not be there the next time.
            if self._ended == self._pieces and not self._segment.is_limited:
                self._segment.release(self._staging.offset, self._staging.nbytes)
                self._reserved = [0] * AREAS

    def finish_in_background(self) -> None:
        """Have a thread do this rank's part of what is left, for the others' sake."""
        with self._lock:
            self._owed = self._pieces
            if self._ended < self._owed and self._failed is None and self._tail is None:
                self._tail = threading.Thread(target=self._finish, name="paceline-channel", daemon=True)
                self._tail.start()

    def _finish(self) -> None:
        try:
            while self._tail is not None:
                self._wait_for(self._owed, fully=True)
                with self._lock:  # more may be owed by now
                    self._tail = self._tail if self._ended < self._owed else None
        except Exception:  # who waits next is told
            self._tail = None

    def _wait_for(
        self, pieces: int, *, fully: bool, unusual: Unusual = lambda: None, timeout: float | None = None
    ) -> None:
        patience = None
        self._see_thread()
        while True:
            with self._lock:
                self._refuse_failed()
                self.advance()
                if self._is_over(pieces, fully=fully):
                    return
                carried, words, count = self._awaited()
                other = None if words is None else words.missing(count)
            if carried is not None:
                self._wait_for_hosts(carried, unusual)
            elif words is not None and other is not None and not self._listen(words, other, count):
                patience = patience or _Patience(self._timeout if timeout is None else timeout, unusual)
                self._help()
                self._look_around(words, count, patience)

    def _wait_for_hosts(self, carried: Pending, unusual: Unusual) -> None:
        patience = _Patience(self._timeout, unusual)

        def look() -> None:
            self._look_for_broken(self._others)
            patience.is_over()  # which the process group sees to, but it may be unusual

        try:
            carried.wait(look)
        except CollectiveError as error:
            if self._failed is None:
                self._break_off(error)
            raise

    def _listen(self, words: Words, other: int, count: int) -> bool:
        """Wait a short time for a rank's words; whether they came."""
        with self._ears:  # what another thread hears meanwhile counts here too
            for _ in range(self._spins):
                if words.has_said(other, count):
                    return True
            # Another thread may take the word that this one sleeps for, or wait for its turn to listen.
            short = self._has_threads or self._others_in_flight()
            return words.nap(other, count, _SHORT_NAP if short else _NAP)

    def _see_thread(self) -> None:
        thread = threading.get_ident()
        if thread != self._thread:
            self._has_threads = self._thread is not None
            self._thread = thread

    def _others_in_flight(self) -> list["Channel"]:
        # A list of references, and no iterator: other threads make channels meanwhile.
        all_of_them = [reference() for reference in _channels.valuerefs()]
        return [each for each in all_of_them if each is not None and each is not self and each.in_flight]

    def _help(self) -> None:
        """Do what can be done in other channels: the rank that is waited for may wait for that."""
        for channel in self._others_in_flight():
            if channel._failed is None and channel._lock.acquire(blocking=False):
                try:
                    # Who waits there is told of errors; its tensors may be of any kind.
                    with contextlib.suppress(Exception), torch.inference_mode():
                        channel.advance()
                finally:
                    channel._lock.release()

    def _break_off(self, error: BaseException) -> None:
        self._failed = CollectiveError(f"a collective broke off (rank: {self._ranks[self.rank]}, {error!r})")
        self._notes.write_why(self.rank, repr(error))
        self._broken.say()

    def _is_over(self, pieces: int, *, fully: bool) -> bool:
        return pieces <= (self._ended if fully else self._spread)

    def _awaited(self) -> tuple[Pending | None, Words | None, int]:
        """What has to come next: something from another host, or so many words of some kind."""
        if self._met < self._published:
            return None, self._here, self._met + 1
        if self._spread < self._met:
            return self._carried[0], None, 0
        return None, self._done, self._ended + 1

    def _line_up(self, collective: Collective) -> Launched:
        """Give a collective its number and its pieces theirs."""
        self._see_thread()
        note = self._place(collective)
        self._notes.write(self.rank, self._collectives, note)
        launched = Launched(
            collective,
            collective.text,
            collective.awaits_done,
            number=self._collectives,
            first=self._pieces,
            last=self._pieces + collective.pieces,
            notes={self.rank: note},
        )
        self._collectives += 1
        self._pieces = launched.last
        self.in_flight.append(launched)
        return launched

    def _place(self, collective: Collective) -> Note:
        """Where this rank's part will be."""
        text = as_text(collective.text)
        if collective.place is not None:
            return Note(collective.place.offset, IN_PLACE, text)
        note = Note(self._staging.offset, self._areas, text)
        self._areas += collective.pieces
        return note

    def _publish(self) -> bool:
        """Say that the next piece is here."""
        launched, piece = self._find(self._published)
        collective, note = launched.collective, launched.notes[self.rank]
        assert collective is not None
        if note.area != IN_PLACE and (nbytes := collective.nbytes(piece, self.rank)):
            area = (note.area + piece) % AREAS
            if self._busy[area] > self._ended:
                return False
            self._busy[area] = self._published + 1
            if nbytes > self._reserved[area]:
                self._segment.reserve(note.offset + area * PIECE_BYTES, nbytes)
                self._reserved[area] = nbytes
            collective.put(piece, Areas(self._segment, launched, piece))
        self._published += 1
        self._here.say()
        return True

    def _meet(self) -> bool:
        """Work on the next piece, if everybody is here."""
        if self._here.missing(self._met + 1) is not None:
            return False
        launched, piece = self._find(self._met)
        if piece == 0:
            self._read_notes(launched)
        assert launched.collective is not None
        self._carried.append(launched.collective.meet(piece, Areas(self._segment, launched, piece)))
        self._met += 1
        return True

    def _carry(self) -> bool:
        """Give others what came from other hosts, and be done with the piece."""
        if (carried := self._carried[0]) is not None:
            if not carried.done():
                return False
            carried.wait(lambda: None)
        self._carried.popleft()
        launched, piece = self._find(self._spread)
        assert launched.collective is not None
        launched.collective.spread(piece, Areas(self._segment, launched, piece))
        self._spread += 1
        if self._spread == launched.last and not launched.awaits_done:
            launched.collective = None
        self._done.say()
        return True

    def _end(self) -> bool:
        """See the next piece over."""
        if self._done.missing(self._ended + 1) is not None:
            return False
        launched, piece = self._find(self._ended)
        if launched.collective is not None and launched.notes[self.rank].area != IN_PLACE:
            launched.collective.end(piece, Areas(self._segment, launched, piece))
        self._ended += 1
        if self._ended == launched.last:
            self.in_flight.popleft()
        return True

    def _find(self, number: int) -> tuple[Launched, int]:
        """Which collective a piece belongs to, and which of its pieces it is."""
        for launched in self.in_flight:
            if number < launched.last:
                return launched, number - launched.first
        raise AssertionError(f"no such piece: {number}")

    def _read_notes(self, launched: Launched) -> None:
        """See where the others' parts are, and that they mean the same collective."""
        own = launched.notes[self.rank]
        for other in self._others:
            note = launched.notes[other] = self._notes.read(other, launched.number)
            if note.text != own.text:
                self._failed = UnmatchedError(
                    f"ranks called different collectives: {launched.text} on rank {self._ranks[self.rank]}, "
                    f"{as_words(note.text)} on rank {self._ranks[other]}"
                )
                raise self._failed

    def _look_around(self, words: Words, count: int, patience: "_Patience") -> None:
        """A wait takes long: see whether it can still end."""
        missing = words.all_missing(count)
        if ended := [other for other in missing if self._life.has_ended(other)]:
            # What one said before it ended may have come meanwhile.
            missing = words.all_missing(count)
            if lost := [other for other in ended if other in missing]:
                self._failed = LostRankError(self._words("cannot end, because ranks have ended", lost))
                raise self._failed
        self._look_for_broken(missing)
        if patience.is_over():
            raise LateRankError(
                self._words(f"did not end within the timeout of {patience.seconds:g} s", missing)
            )

    def _look_for_broken(self, others: Sequence[int]) -> None:
        for other in others:
            if self._broken.has_said(other, 1):
                why = f"cannot end, because one broke off: {self._notes.read_why(other)}"
                self._failed = CollectiveError(self._words(why, [other]))
                raise self._failed

    def _words(self, what: str, others: Sequence[int]) -> str:
        names = [self._ranks[other] for other in others]
        text = self.in_flight[0].text if self.in_flight else "nothing"
        return f"a collective {what} (missing ranks: {names}, here: rank {self._ranks[self.rank]}, {text})"

    def _refuse_failed(self) -> None:
        if self._failed is not None:
            raise type(self._failed)(str(self._failed))


class _Patience:
    """How long a wait has taken."""

    def __init__(self, timeout: float, unusual: Unusual) -> None:
        now = time.monotonic()
        self.seconds = timeout
        self._end = now + timeout
        self._next = now + _UNUSUAL
        self._unusual = unusual

    def is_over(self) -> bool:
        """Whether it has taken too long; if only long, that is told."""
        now = time.monotonic()
        if now > self._next:
            self._next = now + _AGAIN
            self._unusual()
        return now > self._end


def open_channel(segment: Segment, number: int, size: int) -> None:
    """Make a channel's semaphores; done by one rank, before any other looks."""
    offset, nbytes = _layout(number, size)
    segment.reserve(offset, nbytes)
    address = segment.at(offset, nbytes).data_ptr()
    for word in range(_WORDS):
        make_words(address + word * words_bytes(size), size)


def _layout(number: int, size: int) -> tuple[int, int]:
    """Where a channel's semaphores and notes are in the segment, and how long they are."""
    nbytes = round_up(_WORDS * words_bytes(size) + notes_bytes(size))
    return CHANNELS + number * nbytes, nbytes
