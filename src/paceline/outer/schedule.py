"""When each fragment of the parameters is exchanged between hosts. Pure: no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.errors import OptionError


@dataclass(frozen=True)
class Schedule:
    """Rounds of outer steps: round k is about fragment ``k % fragments``.

    Args:
        period: steps from one outer step of a fragment to its next.
        fragments: the number of fragments; their outer steps are spread evenly over the period.
        overlap: steps from the time when a fragment is sent until its result is used.
    """

    period: int
    fragments: int
    overlap: int

    def __post_init__(self) -> None:
        if self.period < 1:
            raise OptionError(f"period must be a positive number of steps (period: {self.period})")
        if not 1 <= self.fragments <= self.period:
            raise OptionError(
                "fragments must be at least 1 and at most the period, so that each has a step of its own "
                f"(fragments: {self.fragments}, period: {self.period})"
            )
        if not 0 <= self.overlap < self.period:
            raise OptionError(
                "overlap must not be negative, and less than the period: a fragment's result is used before "
                f"the fragment is sent again (overlap: {self.overlap}, period: {self.period})"
            )

    def fragment(self, number: int) -> int:
        """The fragment of a round."""
        return number % self.fragments

    def send_step(self, number: int) -> int:
        """The step after which a round's fragment is sent; steps count from 1."""
        turn, fragment = divmod(number, self.fragments)
        return turn * self.period + (fragment + 1) * self.period // self.fragments

    def use_step(self, number: int) -> int:
        """The step after which a round's result is used, if it has come."""
        return self.send_step(number) + self.overlap

    def first_round_after(self, step: int) -> int:
        """The first round that is sent after a later step than this one."""
        number = step // self.period * self.fragments
        while self.send_step(number) <= step:
            number += 1
        return number


def cut_evenly(sizes: Sequence[int], count: int) -> list[range]:
    """Neighbours of about equal sums: the ranges of ``count`` parts, of which none is empty.

    Args:
        sizes: what each element counts.
        count: the number of parts; there are at least as many elements.
    """
    total = sum(sizes)
    ends: list[int] = []
    reached = 0
    for index, size in enumerate(sizes):
        reached += size
        left = len(sizes) - index - 1
        wanted = count - len(ends) - 1
        is_full = reached * count >= total * (len(ends) + 1)
        if wanted and (is_full or left == wanted):
            ends.append(index + 1)
    bounds = [0, *ends, len(sizes)]
    return [range(first, last) for first, last in pairwise(bounds)]
