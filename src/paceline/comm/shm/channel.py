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
import ctypes
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.comm.pending import Pending
from paceline.comm.shm import libc
from paceline.comm.shm.arena import Arena, Place
from paceline.comm.shm.life import Life
from paceline.comm.shm.segment import CHANNELS, Segment, round_up
from paceline.errors import CollectiveError, LateRankError, LostRankError, UnmatchedError

Unusual = Callable[[], None]

# Elements of a piece are cut among the ranks; a multiple of any element's size.
PIECE_BYTES = 4 << 20
# So many pieces can be in flight of what does not live in shared memory itself.
_AREAS = 4
STAGING_BYTES = _AREAS * PIECE_BYTES
# So many collectives can be in flight.
_NOTES = 256
_NOTE = struct.Struct("<qq112s")
_IN_PLACE = -1

# Spinning is worth while as long as the others are likely to be running.
_SPINS = 1000
_NAP = 0.1
_UNUSUAL = 2.0
_AGAIN = 1.0


class Collective(ABC):
    """One rank's part in one collective.

    Attributes:
        text: what it is, the same on every rank.
        pieces: in how many pieces it goes, the same on every rank.
        place: where this rank's part is in shared memory; None if it has to be copied there.
        awaits_done: whether it is over only when every rank is done.
    """

    text: str
    pieces: int = 1
    place: Place | None = None
    awaits_done: bool = False

    @abstractmethod
    def nbytes(self, piece: int, rank: int) -> int:
        """How long a rank's part of a piece is."""

    def put(self, piece: int, area: Tensor) -> None:  # noqa: B027  # if there is nothing to copy
        """Copy this rank's part of a piece into shared memory."""

    def meet(self, piece: int, areas: "Areas") -> Pending | None:  # noqa: B027  # if there is nothing to take
        """All ranks are here: take what is theirs. Returns what has to come from other hosts first."""

    def spread(self, piece: int, areas: "Areas") -> None:  # noqa: B027  # if nobody else needs it
        """What came from other hosts is here too: give it to the others."""

    def end(self, piece: int, area: Tensor) -> None:  # noqa: B027  # if it was done in place
        """Everybody is done."""


@dataclass
class Launched:
    """A collective that has been launched.

    Attributes:
        collective: what it is.
        number: its number among the channel's collectives.
        first: the number of its first piece among all pieces.
        area: which of this rank's areas its first piece is in, counted on; _IN_PLACE if it needs none.
    """

    collective: Collective
    number: int
    first: int
    area: int

    @property
    def last(self) -> int:
        """The number of the piece that follows its last one."""
        return self.first + self.collective.pieces


class Areas:
    """Where the ranks' parts of one piece are."""

    def __init__(self, channel: "Channel", launched: Launched, piece: int) -> None:
        self._channel = channel
        self._launched = launched
        self._piece = piece

    def __getitem__(self, rank: int) -> Tensor:
        """A rank's bytes of the piece."""
        return self._channel._area(self._launched, self._piece, rank)


class _Words:
    """The semaphores of one word: whom to tell, whom to hear from, and how often that was."""

    def __init__(self, address: int, rank: int, size: int) -> None:
        def semaphore(teller: int, hearer: int) -> int:
            return address + (teller * size + hearer) * libc.SEMAPHORE_BYTES

        others = [other for other in range(size) if other != rank]
        self._tell = [semaphore(rank, other) for other in others]
        self._hear = {other: semaphore(other, rank) for other in others}
        self._heard = dict.fromkeys(others, 0)

    def say(self) -> None:
        """Tell every other rank."""
        for semaphore in self._tell:
            libc.post(semaphore)

    def missing(self, count: int) -> int | None:
        """The first rank that has not said it so often; None if all have."""
        for other, semaphore in self._hear.items():
            while self._heard[other] < count:
                if libc.try_wait(semaphore):
                    return other
                self._heard[other] += 1
        return None

    def all_missing(self, count: int) -> list[int]:
        """Every rank that has not said it so often."""
        return [other for other, heard in self._heard.items() if heard < count]

    def listen(self, other: int, spins: int) -> bool:
        """Wait for a rank's next word, for a short time; whether it came."""
        semaphore = self._hear[other]
        for _ in range(spins):
            if not libc.try_wait(semaphore):
                return True
        return libc.wait(semaphore, _NAP)

    def count(self, other: int) -> None:
        """A word was listened to."""
        self._heard[other] += 1


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
    """

    def __init__(
        self,
        segment: Segment,
        arena: Arena,
        number: int,
        ranks: Sequence[int],
        rank: int,
        life: Life,
        timeout: float,
    ) -> None:
        self.arena = arena
        self.rank = rank
        self.size = len(ranks)
        self._segment = segment
        self._ranks = ranks
        self._life = life
        self._timeout = timeout
        memory = segment.at(*layout(number, self.size))
        address = memory.data_ptr()
        words = _words_bytes(self.size)
        self._here = _Words(address, rank, self.size)
        self._done = _Words(address + words, rank, self.size)
        self._memory = memory  # keeps the next one's mapped
        self._notes = (ctypes.c_ubyte * (memory.numel() - 2 * words)).from_address(address + 2 * words)
        self._staging: Place | None = None
        self._reserved = [0] * _AREAS
        self._busy = [0] * _AREAS  # each area is in use until so many pieces are over
        self._spins = _SPINS if self.size <= len(os.sched_getaffinity(0)) else 1
        self._lock = threading.RLock()
        self._active: deque[Launched] = deque()
        self._launched = self._pieces = self._areas = 0
        self._here_count = self._met = self._spread = self._ended = 0
        self._carried: deque[Pending | None] = deque()
        self._failed: Exception | None = None
        self._theirs: dict[tuple[int, int], tuple[int, int]] = {}
        self._tail: threading.Thread | None = None

    def launch(self, collective: Collective) -> Launched:
        """Begin a collective, after those that were begun before."""
        while len(self._active) >= _NOTES:
            self._wait_for(self._active[0].last, fully=True)
        with self._lock:
            self._refuse_failed()
            if collective.place is None and self._staging is None:
                self._staging = self.arena.space(STAGING_BYTES)
            area = _IN_PLACE if collective.place is not None else self._areas
            launched = Launched(collective, self._launched, self._pieces, area)
            self._launched += 1
            self._pieces += collective.pieces
            if area != _IN_PLACE:
                self._areas += collective.pieces
            self._active.append(launched)
            self._write_note(launched)
            self.advance()
            return launched

    def over(self, launched: Launched) -> bool:
        """Whether a collective is over, as far as this rank has seen."""
        return self._is_over(launched.last, fully=launched.collective.awaits_done)

    def advance(self) -> None:
        """Do what can be done without waiting for anyone."""
        with self._lock:
            try:
                while self._publish() or self._meet() or self._carry() or self._end():
                    pass
            except BaseException as error:
                # Half of something was done, and nobody knows which half.
                self._failed = self._failed or CollectiveError(
                    f"a collective broke off (rank: {self._ranks[self.rank]}, {error!r})"
                )
                raise

    def wait(
        self, launched: Launched, unusual: Unusual = lambda: None, *, timeout: float | None = None
    ) -> None:
        """Wait until a collective is over.

        ``unusual`` is called from time to time if that takes long, and may raise. The timeout is the
        channel's, unless another is given.
        """
        self._wait_for(launched.last, fully=launched.collective.awaits_done, unusual=unusual, timeout=timeout)

    def _wait_for(
        self, pieces: int, *, fully: bool, unusual: Unusual = lambda: None, timeout: float | None = None
    ) -> None:
        patience = _Patience(self._timeout if timeout is None else timeout, unusual)
        while True:
            with self._lock:
                self._refuse_failed()
                self.advance()
                if self._is_over(pieces, fully=fully):
                    return
                words, count = self._awaited()
                other = words.missing(count) if words is not None else None
                carried = self._carried[0] if words is None else None
            if carried is not None:
                carried.wait(unusual)
            elif words is not None and other is not None:
                if words.listen(other, self._spins):
                    with self._lock:
                        words.count(other)
                else:
                    self._look_around(words, count, patience)

    def _is_over(self, pieces: int, *, fully: bool) -> bool:
        return pieces <= (self._ended if fully else self._spread)

    def run(self, collective: Collective) -> None:
        """Launch a collective and wait for it."""
        self.wait(self.launch(collective))

    def finish_behind(self) -> None:
        """Have a thread do this rank's part of what is left, for the others' sake."""
        with self._lock:
            if self._active and self._failed is None and (self._tail is None or not self._tail.is_alive()):
                self._tail = threading.Thread(target=self._finish, name="paceline-channel", daemon=True)
                self._tail.start()

    def _finish(self) -> None:
        with contextlib.suppress(Exception):  # who waits next is told
            self._wait_for(self._pieces, fully=True)

    def _awaited(self) -> tuple[_Words | None, int]:
        """Whose words are missing, and how many of them; none if it is another host that is waited for."""
        if self._met < self._here_count:
            return self._here, self._met + 1
        if self._spread < self._met:
            return None, 0
        return self._done, self._ended + 1

    def _publish(self) -> bool:
        """Say that the next piece is here."""
        if self._here_count == self._pieces:
            return False
        launched, piece = self._find(self._here_count)
        collective = launched.collective
        if launched.area != _IN_PLACE and (nbytes := collective.nbytes(piece, self.rank)):
            area = (launched.area + piece) % _AREAS
            if self._busy[area] > self._ended:
                return False
            self._busy[area] = self._here_count + 1
            if nbytes > self._reserved[area]:
                self._segment.reserve(self._base(launched) + area * PIECE_BYTES, nbytes)
                self._reserved[area] = nbytes
            collective.put(piece, self._area(launched, piece, self.rank))
        self._here_count += 1
        self._here.say()
        return True

    def _meet(self) -> bool:
        """Work on the next piece, if everybody is here."""
        if self._met == self._here_count or self._here.missing(self._met + 1) is not None:
            return False
        launched, piece = self._find(self._met)
        if piece == 0:
            self._read_notes(launched)
        self._carried.append(launched.collective.meet(piece, Areas(self, launched, piece)))
        self._met += 1
        return True

    def _carry(self) -> bool:
        """Give others what came from other hosts, and be done with the piece."""
        if self._spread == self._met:
            return False
        if (carried := self._carried[0]) is not None:
            if not carried.done():
                return False
            carried.wait(lambda: None)
        self._carried.popleft()
        launched, piece = self._find(self._spread)
        launched.collective.spread(piece, Areas(self, launched, piece))
        self._spread += 1
        self._done.say()
        return True

    def _end(self) -> bool:
        """See the next piece over."""
        if self._ended == self._spread or self._done.missing(self._ended + 1) is not None:
            return False
        launched, piece = self._find(self._ended)
        if launched.area != _IN_PLACE:
            launched.collective.end(piece, self._area(launched, piece, self.rank))
        self._ended += 1
        if self._ended == launched.last:
            self._active.popleft()
            for other in range(self.size):
                self._theirs.pop((launched.number, other), None)
        return True

    def _find(self, number: int) -> tuple[Launched, int]:
        """Which collective a piece belongs to."""
        for launched in self._active:
            if number < launched.last:
                return launched, number - launched.first
        raise AssertionError(f"no such piece: {number}")

    def _write_note(self, launched: Launched) -> None:
        text = launched.collective.text.encode()
        at = self._note_at(launched.number, self.rank)
        _NOTE.pack_into(self._notes, at, self._base(launched), launched.area, text)

    def _base(self, launched: Launched) -> int:
        """Where this rank's part begins, or its areas do."""
        place = launched.collective.place or self._staging
        assert place is not None
        return place.offset

    def _read_notes(self, launched: Launched) -> None:
        """See where the others' parts are, and that they mean the same collective."""
        own = _NOTE.unpack_from(self._notes, self._note_at(launched.number, self.rank))[2]
        for other in range(self.size):
            at = self._note_at(launched.number, other)
            offset, area, text = _NOTE.unpack_from(self._notes, at)
            if text != own:
                self._failed = UnmatchedError(
                    f"ranks called different collectives: {_words(own)} on rank {self._ranks[self.rank]}, "
                    f"{_words(text)} on rank {self._ranks[other]}"
                )
                raise self._failed
            self._theirs[launched.number, other] = (offset, area)

    def _note_at(self, number: int, rank: int) -> int:
        return (rank * _NOTES + number % _NOTES) * _NOTE.size

    def _area(self, launched: Launched, piece: int, rank: int) -> Tensor:
        offset, area = self._theirs.get((launched.number, rank)) or (self._base(launched), launched.area)
        at = piece if area == _IN_PLACE else (area + piece) % _AREAS
        return self._segment.at(offset + at * PIECE_BYTES, launched.collective.nbytes(piece, rank))

    def _look_around(self, words: _Words, count: int, patience: "_Patience") -> None:
        """A wait takes long: see whether it can still end."""
        missing = words.all_missing(count)
        if ended := [other for other in missing if self._life.has_ended(other)]:
            # What it said before it ended may have come meanwhile.
            if words.missing(count) in ended:
                names = [self._ranks[other] for other in ended]
                self._failed = LostRankError(
                    f"a collective cannot end, because ranks of this host have ended (ranks: {names}, "
                    f"here: rank {self._ranks[self.rank]}, {self._active[0].collective.text})"
                )
                raise self._failed
        elif patience.is_over():
            names = [self._ranks[other] for other in missing]
            raise LateRankError(
                f"a collective did not end within {patience.seconds:g} s (ranks that are missing: {names}, "
                f"here: rank {self._ranks[self.rank]}, {self._active[0].collective.text})"
            )

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


def layout(number: int, size: int) -> tuple[int, int]:
    """Where a channel's semaphores and notes are in the segment, and how long they are."""
    nbytes = round_up(2 * _words_bytes(size) + size * _NOTES * _NOTE.size)
    return CHANNELS + number * nbytes, nbytes


def open_channel(segment: Segment, number: int, size: int) -> None:
    """Make a channel's semaphores; done by one rank, before any other looks."""
    offset, nbytes = layout(number, size)
    segment.reserve(offset, nbytes)
    address = segment.at(offset, nbytes).data_ptr()
    for semaphore in range(2 * size * size):
        libc.make_semaphore(address + semaphore * libc.SEMAPHORE_BYTES)


def _words_bytes(size: int) -> int:
    return size * size * libc.SEMAPHORE_BYTES


def _words(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")
