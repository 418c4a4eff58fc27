"""What ranks that share memory tell each other: that a piece is here, or done. See Note [Here and done]."""

from paceline.comm.shm import libc

# How long to sleep before looking around, in seconds.
_NAP = 0.1


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
        heard = self._heard
        for other, semaphore in self._hear.items():
            while heard[other] < count:
                if libc.try_wait(semaphore):
                    return other
                heard[other] += 1
        return None

    def all_missing(self, count: int) -> list[int]:
        """Every rank that has not said it so often, as far as was heard."""
        return [other for other, heard in self._heard.items() if heard < count]

    def listen(self, other: int, spins: int) -> bool:
        """Wait for a rank's next word, for a short time; whether it came. It is to be counted then."""
        semaphore = self._hear[other]
        for _ in range(spins):
            if not libc.try_wait(semaphore):
                return True
        return libc.wait(semaphore, _NAP)

    def count(self, other: int) -> None:
        """Count a word that was listened to."""
        self._heard[other] += 1


def words_bytes(size: int) -> int:
    """How much memory one word takes among so many ranks."""
    return size * size * libc.SEMAPHORE_BYTES


def make_words(address: int, size: int) -> None:
    """Make one word's semaphores; done by one rank, before any other looks."""
    for offset in range(0, words_bytes(size), libc.SEMAPHORE_BYTES):
        libc.make_semaphore(address + offset)
