"""Which rank of a host has which part of each parameter. Pure: no tensors here.

A part is a range of a parameter's elements, in the order in which they lie in memory. It never depends on the
bucket plan, because optimizer state belongs to it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.ddp.buckets.plan import Slot

# A parameter with fewer elements is not cut: each of its parts would cost a call.
SMALLEST_CUT = 1 << 15
# Ranges begin at multiples of this many elements, so that no two ranks write to one cache line.
_ALIGNED = 64
# To step a parameter takes as long as to step so many elements more.
_ELEMENTS_PER_CALL = 1 << 12


class Range(NamedTuple):
    """Some elements of a parameter, and the rank that has them."""

    owner: int
    start: int
    end: int


class Cut:
    """The parts of all parameters; the same on every rank.

    Args:
        slots: the parameters.
        ranks: the number of ranks that get parts.
    """

    def __init__(self, slots: Sequence[Slot], ranks: int) -> None:
        self._slots = slots
        self._ranges: list[list[Range]] = []
        total = sum(map(_cost_of_small, slots))
        before = 0
        for slot in slots:
            # Small ones that follow each other go to one rank, so that they are added up by one call.
            owner = ranks * before // max(1, total)
            before += _cost_of_small(slot)
            is_large = slot.numel >= SMALLEST_CUT
            self._ranges.append(_evenly(slot.numel, ranks) if is_large else [Range(owner, 0, slot.numel)])

    def __getitem__(self, slot: int) -> Sequence[Range]:
        return self._ranges[slot]

    def keep_whole(self, slot: int, owner: int) -> None:
        """Give all of a slot to one rank."""
        self._ranges[slot] = [Range(owner, 0, self._slots[slot].numel)]


def assign_owners(costs: Sequence[float], owned: Sequence[float]) -> list[int]:
    """The owner of each parameter, so that ranks end with about the same costs.

    The most expensive parameter goes first, each to the rank that has least by then; among equals, to the
    first. So every rank computes the same owners.

    Args:
        costs: of the parameters, such as their sizes in bytes.
        owned: what each rank has already.
    """
    totals = [*owned]
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        owner = min(range(len(totals)), key=lambda rank: (totals[rank], rank))
        owners[number] = owner
        totals[owner] += costs[number]
    return owners


def _cost_of_small(slot: Slot) -> int:
    return 0 if slot.numel >= SMALLEST_CUT else slot.numel + _ELEMENTS_PER_CALL


def _evenly(numel: int, ranks: int) -> list[Range]:
    length = -(-numel // ranks // _ALIGNED) * _ALIGNED
    bounds = [min(numel, rank * length) for rank in range(ranks)] + [numel]
    return [Range(rank, *bounds[rank : rank + 2]) for rank in range(ranks) if bounds[rank] < bounds[rank + 1]]
