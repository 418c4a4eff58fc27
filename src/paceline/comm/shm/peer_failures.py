"""Why a collective cannot end, checked when a wait takes long: ranks that have ended, failed or are late."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from paceline.comm import pending
from paceline.comm.pending import OnSlow
from paceline.comm.shm.collective import Headers, Launched, decoded
from paceline.comm.shm.segment import RankLocks
from paceline.comm.shm.semaphores import Signal
from paceline.errors import CollectiveError, LateRankError, LostRankError, UnmatchedError


class WaitTimer:
    """How long a wait has taken.

    Args:
        timeout: the seconds after which it is over.
        on_slow: called from time to time after the wait has taken unusually long.
    """

    def __init__(self, timeout: float, on_slow: OnSlow) -> None:
        now = time.monotonic()
        self.timeout = timeout
        self._end = now + timeout
        self._next = now + pending.SLOW_AFTER.total_seconds()
        self._on_slow = on_slow

    def tick(self) -> None:
        """Call ``on_slow`` if it is time for that."""
        now = time.monotonic()
        if now > self._next:
            self._next = now + pending.SLOW_EVERY.total_seconds()
            self._on_slow()

    @property
    def is_over(self) -> bool:
        """Whether the wait has taken longer than the timeout."""
        return time.monotonic() > self._end


class PeerFailures:
    """What went wrong in a channel, on this rank or on another one.

    Args:
        rank: this rank's number among those of the channel.
        names: the ranks of the channel as users know them.
        signal: that a rank has failed.
        headers: has the reason.
        locks: tell which ranks have ended.
        in_flight: the channel's collectives.

    Attributes:
        error: why no collective can end in this channel any more; None as long as they can.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        signal: Signal,
        headers: Headers,
        locks: RankLocks,
        in_flight: deque[Launched],
    ) -> None:
        self.error: CollectiveError | None = None
        self._rank = rank
        self._names = names
        self._signal = signal
        self._headers = headers
        self._locks = locks
        self._in_flight = in_flight

    def raise_again(self) -> NoReturn:
        """Raise the error, in a new object: a traceback in the one that is kept would keep frames alive."""
        assert self.error is not None
        raise type(self.error)(str(self.error), self.error.what)

    def fail(self, error: BaseException) -> None:
        """Give up because of an error of this rank, unless it had failed before, and tell the others."""
        if self.error is None:
            name = self._names[self._rank]
            self.error = CollectiveError(f"a collective failed (rank: {name}, {error!r})")
            words = f"rank {name} raised {error!r}"
            if isinstance(error, CollectiveError) and error.what != str(error):
                words = error.what
            self._headers.write_failure(self._rank, words)
            self._signal.post()

    def give_up(self, launched: Launched) -> None:
        """Give up a collective because other ranks are late, and tell them."""
        name = self._names[self._rank]
        self.fail(
            LateRankError(f"rank {name} has given up a collective that others are late for ({launched.text})")
        )

    def raise_unmatched(self, launched: Launched, text: bytes, other: int) -> NoReturn:
        """Raise because another rank has launched another collective, by the text of its header."""
        self.error = UnmatchedError(
            f"ranks called different collectives: {launched.text} on rank {self._names[self._rank]}, "
            f"{decoded(text)} on rank {self._names[other]}"
        )
        self.raise_again()

    def check(self, find_missing: Callable[[], Sequence[int]], timer: WaitTimer) -> None:
        """Raise if ranks that are missing have ended, failed, or are late."""
        missing = find_missing()
        if ended := [other for other in missing if self._locks.has_ended(other)]:
            # What a rank sent before it ended may have come meanwhile.
            missing = find_missing()
            if lost := [other for other in ended if other in missing]:
                self.error = LostRankError(*self._describe("cannot end, because ranks have ended", lost))
                self.raise_again()
        self.check_failed(missing)
        timer.tick()
        if timer.is_over:
            raise LateRankError(
                *self._describe(f"did not end within the timeout of {timer.timeout:g} s", missing)
            )

    def check_failed(self, others: Sequence[int]) -> None:
        """Raise if one of some ranks has failed."""
        for other in others:
            if self._signal.has_come(other, 1):
                what = f"cannot end, because a rank failed: {self._headers.read_failure(other)}"
                self.error = CollectiveError(*self._describe(what, [other]))
                self.raise_again()

    def _describe(self, what: str, others: Sequence[int]) -> tuple[str, str]:
        """The message, and the same without ranks."""
        names, here = [self._names[other] for other in others], self._names[self._rank]
        text = self._in_flight[0].text if self._in_flight else "nothing"
        return (
            f"a collective {what} (missing ranks: {names}, here: rank {here}, {text})",
            f"a collective {what}: {text}",
        )
