"""What ranks that share memory tell each other: that a piece is here, or done. See Note [Here and done]."""

from paceline.comm.shm import libc


class Words:
    """One word's semaphores: whom to tell, whom to hear it from, and how often that was.

    Args:
        address: where the semaphores are.
        rank: this rank's number among those that share the memory.
        size: how many they are.
    """

    def __init__(self, address: int, rank: int, size: int) -> None:
        def semaphore(teller: int, hearer: int) -> int:
            return address + (teller * size + hearer) * libc.SEMAPHORE_BYTES

        self._others = [other for other in range(size) if other != rank]
        self._tell = [semaphore(rank, other) for other in self._others]
        # Those that were taken without and with sleep: see Note [Counted at once].
        self._tries = {other: libc.tries(semaphore(other, rank)) for other in self._others}
        self._naps = {other: libc.Naps(semaphore(other, rank)) for other in self._others}
        self._tried = dict.fromkeys(self._others, 0)
        self._slept = dict.fromkeys(self._others, 0)

    def say(self) -> None:
        """Tell every other rank."""
        for semaphore in self._tell:
            libc.post(semaphore)

    def missing(self, count: int) -> int | None:
        """The first rank that has not said it so often; None if all have."""
        # As has_said, without the call: this is what small collectives spend their time on.
        tried, slept = self._tried, self._slept
        for other, tries in self._tries.items():
            while (before := tried[other]) + slept[other] < count:
                tried[other] = now = next(tries)
                if now == before:
                    return other
        return None

    def all_missing(self, count: int) -> list[int]:
        """Every rank that has not said it so often."""
        return [other for other in self._others if not self.has_said(other, count)]

    def has_said(self, other: int, count: int) -> bool:
        """Whether a rank has said it so often."""
        tried, slept = self._tried, self._slept
        while tried[other] + slept[other] < count:
            before = tried[other]
            tried[other] = now = next(self._tries[other])
            if now == before:
                return False
        return True

    def nap(self, other: int, count: int, seconds: float) -> bool:
        """Sleep until a rank has said it once more; whether it has said it so often. One thread at a time."""
        self._slept[other] = self._naps[other].nap(seconds)
        return self.has_said(other, count)


def words_bytes(size: int) -> int:
    """How much memory one word takes among so many ranks."""
    return size * size * libc.SEMAPHORE_BYTES


def make_words(address: int, size: int) -> None:
    """Make one word's semaphores; done by one rank, before any other looks."""
    for offset in range(0, words_bytes(size), libc.SEMAPHORE_BYTES):
        libc.make_semaphore(address + offset)
