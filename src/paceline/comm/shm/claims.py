"""Which rank reduces which slice of a chunk, and who may still change what it gave.

Note [Help]. In an all-reduce in place each rank has a slice, which it reduces when it sees that all ranks are
ready. It may not see that for a while: it is in backward, asleep, or has to wait for a core. A rank that
waits meanwhile helps: it reduces slices that their own ranks have not begun. So the rank that comes last need
not wait until the others wake up. Before a rank touches a slice, its own too, it claims it. A claim is a
semaphore of value 1, which one rank can decrement. A helper then posts *finished* to the slice's own rank.
What is computed, and from what, does not depend on who does it.

Note [Second thoughts]. A rank that has waited for too long gives up. But its part of the collective is ready,
and the ranks that it waits for would read it when they come, and go on as if all were well. So in every
collective a rank claims its own slice of a chunk before it reads what the others gave. A rank that holds all
claims of a chunk knows that nobody has read anything. It may change its part then, and free the claims. Or it
keeps them, and nobody can ever end the collective. If it gets one claim less, all ranks have come, and there
is nothing to give up.

Note [Claims are used again]. There are claims for _SLOTS chunks. A rank signals that chunk n is ready only
when all ranks are done with chunk n - MAX_CHUNKS_AHEAD, which is half as many before. So when all ranks are
ready for chunk n, nobody looks at the claims of that earlier chunk any more, and each rank frees its own. It
does so before it is ready for the next chunk that has the same claims, which is n + MAX_CHUNKS_AHEAD.
"""

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence

from paceline.comm.shm import libc

MAX_CHUNKS_AHEAD = 128
_SLOTS = 2 * MAX_CHUNKS_AHEAD
_Helper = ctypes.c_int32


class SliceClaims:
    """The claims of one channel.

    Args:
        address: where they are.
        rank: this rank's number among those of the channel.
        size: the number of those ranks.
    """

    def __init__(self, address: int, rank: int, size: int) -> None:
        count = _SLOTS * size
        self._rank = rank
        self._size = size
        self._claims = address
        self._finished = address + count * libc.SEMAPHORE_BYTES
        # Each claim's helper, as its number plus one: only for errors, because nothing orders these reads.
        self._helpers = (_Helper * count).from_address(address + 2 * count * libc.SEMAPHORE_BYTES)
        self._used: deque[int] = deque()  # chunks whose claim of this rank's slice is to be freed

    def claim_own(self, chunk: int) -> bool:
        """Claim this rank's slice, if nobody has; each rank does so for every chunk, in order."""
        if not self._used or self._used[-1] < chunk:
            self._free_until(chunk - MAX_CHUNKS_AHEAD)
            self._used.append(chunk)
        return self._claim(self._slot(chunk, self._rank))

    def claim_own_again(self, chunk: int) -> bool:
        """Claim this rank's slice after all, if another rank had claimed it only for a moment."""
        return self._claim(self._slot(chunk, self._rank))

    def claim_to_help(self, chunk: int, rank: int) -> bool:
        """Claim another rank's slice, if nobody has."""
        slot = self._slot(chunk, rank)
        if not self._claim(slot):
            return False
        self._helpers[slot] = self._rank + 1
        return True

    def claim_all(self, chunks: Sequence[int]) -> bool:
        """Claim every slice of some chunks, or none if somebody has claimed one."""
        slots = self._slots(chunks)
        for number, slot in enumerate(slots):
            if not self._claim(slot):
                self._free(slots[:number])
                return False
        return True

    def free_all(self, chunks: Sequence[int]) -> None:
        """Free what ``claim_all`` has claimed."""
        self._free(self._slots(chunks))

    def _slots(self, chunks: Sequence[int]) -> list[int]:
        return [self._slot(chunk, rank) for chunk in chunks for rank in range(self._size)]

    def _claim(self, slot: int) -> bool:
        return not libc.try_wait(self._claims + slot * libc.SEMAPHORE_BYTES)

    def _free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            libc.post(self._claims + slot * libc.SEMAPHORE_BYTES)

    def post_finished(self, chunk: int, rank: int) -> None:
        """Tell a rank that its slice is reduced."""
        libc.post(self._finished + self._slot(chunk, rank) * libc.SEMAPHORE_BYTES)

    def receive_finished(self, chunk: int) -> bool:
        """Whether a helper has finished this rank's slice; True once."""
        slot = self._slot(chunk, self._rank)
        return not libc.try_wait(self._finished + slot * libc.SEMAPHORE_BYTES)

    def own_hint(self, chunk: int) -> memoryview:
        """Whether ``claim_own`` is worth calling, see Note [Hints]."""
        return libc.value_hint(self._claims + self._slot(chunk, self._rank) * libc.SEMAPHORE_BYTES)

    def finished_hint(self, chunk: int) -> memoryview:
        """Whether ``receive_finished`` is worth calling, see Note [Hints]."""
        return libc.value_hint(self._finished + self._slot(chunk, self._rank) * libc.SEMAPHORE_BYTES)

    def helper_of(self, chunk: int) -> int | None:
        """Which rank has claimed this rank's slice, for errors; None if it is not known."""
        helper = self._helpers[self._slot(chunk, self._rank)]
        return helper - 1 if helper else None

    def _free_until(self, chunk: int) -> None:
        """See Note [Claims are used again]."""
        while self._used and self._used[0] <= chunk:
            slot = self._slot(self._used.popleft(), self._rank)
            self._helpers[slot] = 0
            self._free([slot])

    def _slot(self, chunk: int, rank: int) -> int:
        return chunk % _SLOTS * self._size + rank


def claims_bytes(size: int) -> int:
    """How much memory the claims of that many ranks take."""
    return _SLOTS * size * (2 * libc.SEMAPHORE_BYTES + ctypes.sizeof(_Helper))


def make_claims(address: int, size: int) -> None:
    """Make the claims; one rank does this, before any other rank looks at them."""
    count = _SLOTS * size
    for number in range(2 * count):
        libc.make_semaphore(address + number * libc.SEMAPHORE_BYTES, 1 if number < count else 0)
    ctypes.memset(address + 2 * count * libc.SEMAPHORE_BYTES, 0, count * ctypes.sizeof(_Helper))
