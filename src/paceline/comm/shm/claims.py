"""Which rank reduces which slice of a chunk: its own rank, or one that would otherwise wait.

Note [Help]. In an all-reduce in place each rank has a slice, which it reduces when it sees that all ranks are
ready. It may not see that for a while: it is in backward, asleep, or has to wait for a core. A rank that
waits meanwhile helps: it reduces slices that their own ranks have not begun. So the rank that comes last need
not wait until the others wake up. Before a rank touches a slice, its own too, it claims it. A claim is a
semaphore of value 1, which one rank can decrement. A helper then posts *finished* to the slice's own rank.
What is computed, and from what, does not depend on who does it.

Note [Claims are used again]. There are claims for _SLOTS chunks. A rank signals that chunk n is ready only
when all ranks are done with chunk n - MAX_CHUNKS_AHEAD, which is half as many before. So when all ranks are
ready for chunk n, nobody looks at the claims of that earlier chunk any more, and each rank frees its own. It
does so before it is ready for the next chunk that has the same claims, which is n + MAX_CHUNKS_AHEAD.
"""

import ctypes
from collections import deque

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

    def claim(self, chunk: int, rank: int) -> bool:
        """Claim a slice, if nobody has; each rank claims its own of every chunk that has slices."""
        if rank == self._rank:
            self._free_until(chunk - MAX_CHUNKS_AHEAD)
            self._used.append(chunk)
        slot = self._slot(chunk, rank)
        if libc.try_wait(self._claims + slot * libc.SEMAPHORE_BYTES):
            return False
        if rank != self._rank:
            self._helpers[slot] = self._rank + 1
        return True

    def post_finished(self, chunk: int, rank: int) -> None:
        """Tell a rank that its slice is reduced."""
        libc.post(self._finished + self._slot(chunk, rank) * libc.SEMAPHORE_BYTES)

    def receive_finished(self, chunk: int) -> bool:
        """Whether a helper has finished this rank's slice; True once."""
        slot = self._slot(chunk, self._rank)
        return not libc.try_wait(self._finished + slot * libc.SEMAPHORE_BYTES)

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
            libc.post(self._claims + slot * libc.SEMAPHORE_BYTES)

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
