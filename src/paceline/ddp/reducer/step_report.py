"""The waybill: what each rank says of its step, carried behind the gradients of the last bucket.

It travels in the reduction that leaves last, so it costs no collective. A reduction adds, in the data type
of the bucket, so everything is written as numbers that survive a sum: a count a place, or a byte in a place
that belongs to one rank alone. A byte is exact in every type a gradient can have, bfloat16 included.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

_WEIGHT = struct.Struct("<d")
_WEIGHED = 16  # beside the outcome in a rank's status byte
_PLACE_BYTES = 3  # for a place in the arrival order: 16 million parameters


class Outcome(IntEnum):
    """How a rank's step went."""

    FINE = 0
    RAISED_IN_FORWARD = 1
    RAISED_IN_BACKWARD = 2
    EXHAUSTED = 3


RAISED = (Outcome.RAISED_IN_FORWARD, Outcome.RAISED_IN_BACKWARD)


@dataclass(frozen=True)
class Report:
    """What one rank writes.

    Attributes:
        used: a 1 for each slot that has a gradient to give; empty for none.
        late: buckets that must be reduced once more.
        thawed: whether a slot outside the plan has a gradient.
        buffers_changed: whether a module buffer has changed since buffers were last made equal.
        outcome: how the step went.
        weight: what the rank's contribution counts; None for the plain mean.
        order: slots in order of arrival, told by rank 0 while the plan is being learned.
    """

    used: bytes | bytearray = b""
    late: Iterable[int] = ()
    thawed: bool = False
    buffers_changed: bool = False
    outcome: Outcome = Outcome.FINE
    weight: float | None = None
    order: Sequence[int] = ()


@dataclass(frozen=True)
class Summary:
    """What all ranks wrote, the same on every rank.

    Attributes:
        used: by how many ranks each slot was used.
        late: buckets that some rank needs reduced once more.
        thawed: whether some rank has a gradient outside the plan.
        buffers_changed: whether some rank's module buffers changed.
        raised: ranks whose step was lost, and where.
        exhausted: ranks that had no inputs left, and took part with nothing.
        weights: each rank's weight; None for a rank that gave none.
        order: rank 0's order of arrival; empty unless the plan is being learned.
    """

    used: list[int]
    late: list[int] = field(default_factory=list)
    thawed: bool = False
    buffers_changed: bool = False
    raised: dict[int, Outcome] = field(default_factory=dict)
    exhausted: list[int] = field(default_factory=list)
    weights: list[float | None] = field(default_factory=list)
    order: list[int] = field(default_factory=list)

    @property
    def total_weight(self) -> float | None:
        """What all contributions count together; None for the plain mean."""
        given = [weight for weight in self.weights if weight is not None]
        return sum(given) if given else None


class Waybill:
    """Where each entry stands, for a given plan and group.

    Args:
        slots: how many slots there are.
        buckets: how many buckets the plan has.
        world: how many ranks there are.
        teaching: whether the order of arrival is told.
    """

    def __init__(self, *, slots: int, buckets: int, world: int, teaching: bool) -> None:
        self._slots = slots
        self._buckets = buckets
        self._world = world
        self._late = slots
        self._flags = self._late + buckets
        self._status = self._flags + 2
        self._weights = self._status + world
        self._order = self._weights + _WEIGHT.size * world
        self.size = self._order + (_PLACE_BYTES * slots if teaching else 0)
        self._last: tuple[list[float], Summary] | None = None

    def write(self, tail: Tensor, rank: int, report: Report) -> None:
        """Put this rank's entries where the reduction will add them up."""
        entries = bytearray(self.size)
        entries[: len(report.used)] = report.used
        for bucket in report.late:
            entries[self._late + bucket] = 1
        entries[self._flags] = report.thawed
        entries[self._flags + 1] = report.buffers_changed
        entries[self._status + rank] = report.outcome | (0 if report.weight is None else _WEIGHED)
        if report.weight is not None:
            _WEIGHT.pack_into(entries, self._weights + _WEIGHT.size * rank, report.weight)
        if self.size > self._order and rank == 0:
            self._write_order(entries, report.order)
        tail.copy_(torch.frombuffer(entries, dtype=torch.uint8))

    def read(self, tail: Tensor) -> Summary:
        """What all ranks wrote; most steps are like the one before."""
        sums = tail.tolist()
        if self._last is None or self._last[0] != sums:
            self._last = sums, self._summarise([*map(round, sums)])
        return self._last[1]

    def _summarise(self, sums: list[int]) -> Summary:
        few = sums[self._slots : self._order]
        flags = self._flags - self._slots
        status = few[flags + 2 : flags + 2 + self._world]
        outcomes = {rank: Outcome(entry & ~_WEIGHED) for rank, entry in enumerate(status) if entry}
        return Summary(
            used=sums[: self._slots],
            late=[bucket for bucket in range(self._buckets) if few[bucket]],
            thawed=few[flags] > 0,
            buffers_changed=few[flags + 1] > 0,
            raised={rank: outcome for rank, outcome in outcomes.items() if outcome in RAISED},
            exhausted=[rank for rank, outcome in outcomes.items() if outcome is Outcome.EXHAUSTED],
            weights=self._read_weights(status, few[self._weights - self._slots :]),
            order=self._read_order(sums[self._order :]),
        )

    def _read_weights(self, status: list[int], entries: list[int]) -> list[float | None]:
        if not any(status):  # the usual case
            return [None] * self._world
        found: list[float | None] = []
        for rank, entry in enumerate(status):
            own = bytes(entries[_WEIGHT.size * rank : _WEIGHT.size * (rank + 1)])
            found.append(_WEIGHT.unpack(own)[0] if entry & _WEIGHED else None)
        return found

    def _write_order(self, entries: bytearray, order: Sequence[int]) -> None:
        # A slot's place counts from 1, so that 0 says that it never arrived.
        for place, slot in enumerate(order, start=1):
            start = self._order + _PLACE_BYTES * slot
            entries[start : start + _PLACE_BYTES] = place.to_bytes(_PLACE_BYTES, "little")

    def _read_order(self, entries: list[int]) -> list[int]:
        places = {}
        for slot in range(len(entries) // _PLACE_BYTES):
            own = bytes(entries[_PLACE_BYTES * slot : _PLACE_BYTES * (slot + 1)])
            if place := int.from_bytes(own, "little"):
                places[place] = slot
        return [places[place] for place in sorted(places)]
