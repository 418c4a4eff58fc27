"""Hosts' clocks, set by each other: from when buckets left and came back.

A bucket cannot be back anywhere before every rank has launched it. So each step gives two bounds for what
must be added to one host's times to have the other's: at least what makes its first return as late as the
other's last launch, and at most what leaves its last launch as early as the other's first return. The
tightest of many steps are used, and the offset is the middle between them.
"""

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# Clocks drift by some microseconds a second: what many steps say together must still be one number.
WINDOW = 64

# Of one bucket on one host: when its last rank launched it, and when its first rank had it back.
Crossing = tuple[int, int]


@dataclass(frozen=True)
class Offset:
    """What one host's clock lacks to another's, in nanoseconds.

    Attributes:
        steps: the middles of the windows, by number of the step.
        values: the offset there; between them it changes steadily.
        halves: by how much it may be wrong; none if only the wall clocks are known.
    """

    steps: Sequence[int]
    values: Sequence[int]
    halves: Sequence[int]

    def at(self, step: int) -> int:
        """At one step."""
        after = bisect_right(self.steps, step)
        if after == 0 or after == len(self.steps):
            return self.values[min(after, len(self.steps) - 1)]
        left, right = self.steps[after - 1], self.steps[after]
        low, high = self.values[after - 1], self.values[after]
        return low + (high - low) * (step - left) // (right - left)

    @property
    def uncertainty(self) -> int | None:
        """By how much it may be wrong, in most windows; None if nobody can say."""
        return int(statistics.median(self.halves)) if self.halves else None


SAME = Offset((0,), (0,), (0,))


def offset(
    reference: Mapping[int, Sequence[Crossing]],
    other: Mapping[int, Sequence[Crossing]],
    *,
    guess: int,
    window: int = WINDOW,
) -> Offset:
    """What the other host's clock lacks to the reference's.

    Args:
        reference: its crossings of each step, by bucket.
        other: the same of the other host.
        guess: the answer where no bucket bounds it; what the wall clocks say.
        window: how many steps give one answer.
    """
    shared = sorted(reference.keys() & other.keys())
    steps, values, halves = [], [], []
    for start in range(0, len(shared), window):
        some = shared[start : start + window]
        bounds = [pair for step in some for pair in _bounds(reference[step], other[step])]
        if bounds:
            low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
            steps.append(some[len(some) // 2])
            values.append((low + high) // 2)
            halves.append(abs(high - low) // 2)
    return Offset(steps, values, halves) if steps else Offset((0,), (guess,), ())


def _bounds(reference: Sequence[Crossing], other: Sequence[Crossing]) -> Iterator[tuple[int, int]]:
    for (our_launch, our_return), (their_launch, their_return) in zip(reference, other, strict=False):
        if our_launch and our_return and their_launch and their_return:
            yield our_launch - their_return, our_return - their_launch
