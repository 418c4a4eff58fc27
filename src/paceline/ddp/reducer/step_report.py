"""The step report: what each rank tells the others at the end of a step.

With plain averaging it travels behind the gradients of the bucket that is launched last, so it costs no
collective. A reduction adds, in the data type of the bucket, so everything is written as numbers that survive
a sum: a count, or a byte at a position that belongs to one rank alone. A byte is exact in every type that a
gradient can have, bfloat16 included.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

_WEIGHT = struct.Struct("<d")
_HAS_WEIGHT = 16  # beside the outcome in a rank's status byte
_ORDER_BYTES = 3  # for a slot's position in the ready order: up to 16 million parameters


class StepOutcome(IntEnum):
    """How a rank's step went."""

    FINE = 0
    RAISED_IN_FORWARD = 1
    RAISED_IN_BACKWARD = 2
    NO_INPUTS = 3  # under join: the rank took part with zeros


RAISED = (StepOutcome.RAISED_IN_FORWARD, StepOutcome.RAISED_IN_BACKWARD)


@dataclass(frozen=True)
class RankReport:
    """What one rank writes.

    Attributes:
        used: a 1 for each slot that has a gradient on this rank; empty for none.
        late: buckets that got a gradient after they were launched, and must be reduced once more.
        unfrozen: whether a slot outside the plan has a gradient.
        buffers_changed: whether a module buffer has changed since buffers were last made equal.
        outcome: how the step went.
        weight: what the rank's contribution counts; None for the plain mean.
        order: slots in the order in which they became ready; rank 0 tells it while the plan is learned.
    """

    used: bytes | bytearray = b""
    late: Iterable[int] = ()
    unfrozen: bool = False
    buffers_changed: bool = False
    outcome: StepOutcome = StepOutcome.FINE
    weight: float | None = None
    order: Sequence[int] = ()


@dataclass(frozen=True)
class StepSummary:
    """What all ranks wrote; the same on every rank.

    Attributes:
        used: for each slot the number of ranks that used it.
        late: buckets that some rank needs reduced once more.
        unfrozen: whether some rank has a gradient outside the plan.
        buffers_changed: whether some rank's module buffers changed.
        raised: ranks whose step was lost, and where.
        without_inputs: ranks that had no inputs left, and took part with zeros.
        weights: each rank's weight; None for a rank that gave none.
        order: rank 0's ready order; empty unless the plan is being learned.
    """

    used: list[int]
    late: list[int] = field(default_factory=list)
    unfrozen: bool = False
    buffers_changed: bool = False
    raised: dict[int, StepOutcome] = field(default_factory=dict)
    without_inputs: list[int] = field(default_factory=list)
    weights: list[float | None] = field(default_factory=list)
    order: list[int] = field(default_factory=list)

    @property
    def total_weight(self) -> float | None:
        """The sum of the ranks' weights; None for the plain mean."""
        given = [weight for weight in self.weights if weight is not None]
        return sum(given) if given else None


class ReportLayout:
    """The position of each entry in the report, for one plan and one group.

    Args:
        slots: the number of slots.
        buckets: the number of buckets in the plan.
        world: the number of ranks; 0 if they cannot be told apart, see Note [Ranks that change]. Then the
            report says nothing of single ranks.
        with_order: whether rank 0 tells its ready order.
    """

    def __init__(self, *, slots: int, buckets: int, world: int, with_order: bool) -> None:
        self._slots = slots
        self._buckets = buckets
        self._world = world
        self._late = slots
        self._flags = self._late + buckets
        self._status = self._flags + 2
        self._weights = self._status + world
        self._order = self._weights + _WEIGHT.size * world
        self.numel = self._order + (_ORDER_BYTES * slots if with_order else 0)
        self._last: tuple[list[float], StepSummary] | None = None

    def write(self, into: Tensor, rank: int, report: RankReport) -> None:
        """Put this rank's entries where the reduction will add them up."""
        entries = bytearray(self.numel)
        entries[: len(report.used)] = report.used
        for bucket in report.late:
            entries[self._late + bucket] = 1
        entries[self._flags] = report.unfrozen
        entries[self._flags + 1] = report.buffers_changed
        if self._world:
            entries[self._status + rank] = report.outcome | (0 if report.weight is None else _HAS_WEIGHT)
        if report.weight is not None:
            _WEIGHT.pack_into(entries, self._weights + _WEIGHT.size * rank, report.weight)
        if self.numel > self._order and rank == 0:
            self._write_order(entries, report.order)
        into.copy_(torch.frombuffer(entries, dtype=torch.uint8))

    def read(self, reduced: Tensor) -> StepSummary:
        """What all ranks wrote; most steps are like the one before, and then nothing is decoded again."""
        sums = reduced.tolist()
        if self._last is None or self._last[0] != sums:
            self._last = sums, self._summarise([*map(round, sums)])
        return self._last[1]

    def _summarise(self, sums: list[int]) -> StepSummary:
        few = sums[self._slots : self._order]
        flags = self._flags - self._slots
        status = few[flags + 2 : flags + 2 + self._world]
        outcomes = {rank: StepOutcome(entry & ~_HAS_WEIGHT) for rank, entry in enumerate(status) if entry}
        return StepSummary(
            used=sums[: self._slots],
            late=[bucket for bucket in range(self._buckets) if few[bucket]],
            unfrozen=few[flags] > 0,
            buffers_changed=few[flags + 1] > 0,
            raised={rank: outcome for rank, outcome in outcomes.items() if outcome in RAISED},
            without_inputs=[rank for rank, outcome in outcomes.items() if outcome is StepOutcome.NO_INPUTS],
            weights=self._read_weights(status, few[self._weights - self._slots :]),
            order=self._read_order(sums[self._order :]),
        )

    def _read_weights(self, status: list[int], entries: list[int]) -> list[float | None]:
        if not any(status):  # the usual case
            return [None] * self._world
        found: list[float | None] = []
        for rank, entry in enumerate(status):
            own = bytes(entries[_WEIGHT.size * rank : _WEIGHT.size * (rank + 1)])
            found.append(_WEIGHT.unpack(own)[0] if entry & _HAS_WEIGHT else None)
        return found

    def _write_order(self, entries: bytearray, order: Sequence[int]) -> None:
        # Positions count from 1, so that 0 says that the slot never became ready.
        for position, slot in enumerate(order, start=1):
            start = self._order + _ORDER_BYTES * slot
            entries[start : start + _ORDER_BYTES] = position.to_bytes(_ORDER_BYTES, "little")

    def _read_order(self, entries: list[int]) -> list[int]:
        slots = {}
        for slot in range(len(entries) // _ORDER_BYTES):
            own = bytes(entries[_ORDER_BYTES * slot : _ORDER_BYTES * (slot + 1)])
            if position := int.from_bytes(own, "little"):
                slots[position] = slot
        return [slots[position] for position in sorted(slots)]
