"""How far clocks of hosts are apart, from what must have happened before what.

Each rank looks at its clock before it tells the others something, and again when it has heard of all of them.
Whatever the network did meanwhile, any rank's first look was before any other's second one. That bounds the
difference of their clocks from both sides, and what lies between the bounds is all that is not known.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.comm.group import Group
from paceline.tools.doctor.finding import Finding, fault, notice, ok

CHECK = "clocks"
ROUNDS = 8
# Seconds. Logs of hosts cannot be read side by side,
NOTICED = 0.05
# and certificates, caches and time limits go wrong.
WRONG = 1.0

# A rank's looks at its clock: before it told, and after it had heard, by round.
Looks = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bounds:
    """How much later one clock is than another: at least and at most."""

    least: float
    most: float

    @property
    def certain(self) -> float:
        """How far they are apart for certain."""
        return max(self.least, -self.most, 0.0)

    @property
    def possible(self) -> float:
        """How far they may be apart."""
        return max(abs(self.least), abs(self.most))


def look(group: Group, *, clock: Callable[[], float] = time.time) -> list[tuple[float, float]]:
    """Look at this rank's clock around some exchanges, which every rank makes at once."""
    group.gather_objects(None)
    return [_round(group, clock) for _ in range(ROUNDS)]


def _round(group: Group, clock: Callable[[], float]) -> tuple[float, float]:
    before = clock()
    group.gather_objects(None)
    return before, clock()


def bounds(own: Looks, theirs: Looks) -> Bounds:
    """How much later the first clock is than the second."""
    rounds = list(zip(own, theirs, strict=True))
    least = max(own_before - their_after for (own_before, _), (_, their_after) in rounds)
    most = min(own_after - their_before for (_, own_after), (their_before, _) in rounds)
    return Bounds(least, most)


def judge(looks: Sequence[Looks | None], hosts: Sequence[str]) -> list[Finding]:
    """Say whether the hosts' clocks agree; of each host, the first rank's is looked at."""
    first = {host: rank for rank, host in reversed(list(enumerate(hosts))) if looks[rank] is not None}
    pairs = [
        (a, b, bounds(looks[first[a]] or (), looks[first[b]] or ()))
        for a, b in itertools.combinations(sorted(first, key=first.__getitem__), 2)
    ]
    if not pairs:
        return []
    a, b, worst = max(pairs, key=lambda pair: pair[2].certain)
    data = {"hosts": [a, b], "least": worst.least, "most": worst.most}
    words = f"{b} is {'behind' if worst.least > 0 else 'ahead of'} {a} by {worst.certain:.3f} s at least"
    fix = f"sudo timedatectl set-ntp true || sudo chronyc makestep    # on {a} and {b}"
    if worst.certain > WRONG:
        return [fault(CHECK, f"clocks are apart ({words})", fix, **data)]
    if worst.certain > NOTICED:
        return [notice(CHECK, f"clocks are a little apart ({words})", fix, **data)]
    within = max(pair[2].possible for pair in pairs)
    return [ok(CHECK, f"clocks agree within {1000 * within:.1f} ms", within=within)]
