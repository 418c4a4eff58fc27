"""Whether to poll for a signal before sleeping, learnt from how long waits took.

Note [Giving the core away]. The rank that a rank waits for may need the very core on which it polls. So a
rank that polls calls ``sched_yield`` again and again. Among ranks that costs less than to sleep and to wake
up. But if other programs want the core too, Linux lets those run for milliseconds. Once that has happened, a
rank sleeps without polling, for so many waits that trying again costs little.
"""

import time
from itertools import repeat

from paceline.comm.shm import libc

# How often a hint is looked at in a round, which takes 2 us.
_LOOKS = 32
# As many rounds as take as long as it takes to sleep and to wake up.
_MAX_ROUNDS = 20
# Polling pays as long as waits are shorter than that, also when ranks that share a core take turns.
_LONG_WAIT = 0.0005
# For this many waits a rank does not give the core away, after somebody kept it.
_WAITS_WITHOUT_POLLING = 1000


class Poller:
    """Polls for signals, less if that does not pay."""

    def __init__(self) -> None:
        self._rounds = _MAX_ROUNDS
        self._waits_without = 0

    def poll(self, hint: memoryview) -> bool:
        """Poll until a hint is not zero; False if it is time to sleep."""
        if self._waits_without:
            self._waits_without -= 1
            return _has_come(hint)
        start = time.perf_counter()
        has_come = _has_come(hint)
        for _ in repeat(None, self._rounds):
            if has_come:
                break
            libc.yield_core()
            has_come = _has_come(hint)
        if time.perf_counter() - start > _LONG_WAIT:  # see Note [Giving the core away]
            self._waits_without = _WAITS_WITHOUT_POLLING
        return has_come

    def learn(self, seconds: float) -> None:
        """Learn from how long a rank had to sleep."""
        if seconds < _LONG_WAIT:
            self._rounds = min(_MAX_ROUNDS, 2 * self._rounds + 1)
        else:
            self._rounds //= 2


def _has_come(hint: memoryview) -> bool:
    for _ in repeat(None, _LOOKS):  # noqa: SIM110  # a generator would take twice as long
        if hint[0]:
            return True
    return False
