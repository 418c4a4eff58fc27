"""Signals between ranks that share memory: counted semaphores. See Note [Ready and done] in stages.py."""

from paceline.comm.shm import libc


class Signal:
    """One kind of signal that every rank sends to every other rank; receivers count what has come.

    Only one thread at a time may receive, and only one at a time may sleep.

    Args:
        address: where its semaphores are.
        rank: this rank's number among those that share the memory.
        size: the number of those ranks.
    """

    def __init__(self, address: int, rank: int, size: int) -> None:
        def semaphore(sender: int, receiver: int) -> int:
            return address + (sender * size + receiver) * libc.SEMAPHORE_BYTES

        self._others = [other for other in range(size) if other != rank]
        self._to_post = [semaphore(rank, other) for other in self._others]
        # Those that were received without and with sleeping: see Note [Counted at once] in libc.py.
        self._polls = {other: libc.poll_counts(semaphore(other, rank)) for other in self._others}
        self._sleepers = {other: libc.SleepingCounter(semaphore(other, rank)) for other in self._others}
        self._polled = dict.fromkeys(self._others, 0)
        self._slept = dict.fromkeys(self._others, 0)
        self._all_sent = 0  # how often every rank has sent it, as far as is known
        # Each rank's semaphore as a hint, see Note [Hints] in libc.py.
        self.hints = {other: libc.value_hint(semaphore(other, rank)) for other in self._others}

    def post(self) -> None:
        """Send it to every other rank."""
        for semaphore in self._to_post:
            libc.post(semaphore)

    def first_missing(self, count: int) -> int | None:
        """The first rank that has not sent it ``count`` times, as far as hints tell; None if all have."""
        if count <= self._all_sent:
            return None
        polled, slept = self._polled, self._slept
        for other, hint in self.hints.items():
            while (before := polled[other]) + slept[other] < count:
                if not hint[0]:
                    return other
                polled[other] = now = next(self._polls[other])
                if now == before:
                    return other
        self._all_sent = count
        return None

    def all_missing(self, count: int) -> list[int]:
        """Every rank that has not sent it ``count`` times."""
        return [other for other in self._others if not self.has_come(other, count)]

    def has_come(self, other: int, count: int) -> bool:
        """Whether a rank has sent it ``count`` times."""
        polled, slept = self._polled, self._slept
        while polled[other] + slept[other] < count:
            before = polled[other]
            polled[other] = now = next(self._polls[other])
            if now == before:
                return False
        return True

    def sleep(self, other: int, count: int, seconds: float) -> bool:
        """Sleep until a rank sends it once more; whether it is known to have sent it ``count`` times."""
        self._slept[other] = self._sleepers[other].sleep(seconds)
        return self._polled[other] + self._slept[other] >= count


def signal_bytes(size: int) -> int:
    """How much memory the semaphores of one signal take for that many ranks."""
    return size * size * libc.SEMAPHORE_BYTES


def make_signal(address: int, size: int) -> None:
    """Make the semaphores of one signal; one rank does this, before any other rank looks at them."""
    for offset in range(0, signal_bytes(size), libc.SEMAPHORE_BYTES):
        libc.make_semaphore(address + offset)
