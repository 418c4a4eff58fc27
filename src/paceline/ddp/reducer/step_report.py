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

from paceline.ddp.reducer.pairing import StepCounts

_WEIGHT = struct.Struct("<d")
_COUNTS = struct.Struct("<BBBH")
# In the first byte of a rank's counts.
_TOLD = 1  # so that they are not all zeros, as in a group for tests that does not add up
_THROUGH_FORWARD = 2
_HOOK_SHIFT = 2
HOOK_NUMBERS = 64  # what is left of the byte
_DIGEST = struct.Struct("<Q")
_NO_COUNTS = StepCounts()
# Beside the outcome in a rank's status byte.
_HAS_WEIGHT = 16
_NON_FINITE = 32
_FLAGS = _HAS_WEIGHT | _NON_FINITE
_ORDER_BYTES = 3  # for a slot's position in the ready order: up to 16 million parameters


class StepOutcome(IntEnum):
    """How a rank's step went."""

    FINE = 0
    RAISED_IN_FORWARD = 1
    RAISED_IN_BACKWARD = 2
    NO_INPUTS = 3  # under join: the rank took part with zeros
    ABANDONED = 4  # the rank called forward again without a backward
    SKIPPED = 5  # the user had the rank take part with zeros, which do not count


# The step is lost on every rank.
LOST = (StepOutcome.RAISED_IN_FORWARD, StepOutcome.RAISED_IN_BACKWARD, StepOutcome.ABANDONED)


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
        counts: what the user has done since the last step.
        digest: of the part of its replica that the rank has looked at; 0 for none.
        non_finite: whether the rank has found gradients that are not finite.
        hook: the number of the hook that it averages by; 0 for none.
    """

    used: bytes | bytearray = b""
    late: Iterable[int] = ()
    unfrozen: bool = False
    buffers_changed: bool = False
    outcome: StepOutcome = StepOutcome.FINE
    weight: float | None = None
    order: Sequence[int] = ()
    counts: StepCounts = _NO_COUNTS
    digest: int = 0
    non_finite: bool = False
    hook: int = 0


@dataclass(frozen=True)
class StepSummary:
    """What all ranks wrote; the same on every rank.

    Attributes:
        used: for each slot the number of ranks that used it.
        late: buckets that some rank needs reduced once more.
        unfrozen: whether some rank has a gradient outside the plan.
        buffers_changed: whether some rank's module buffers changed.
        lost: ranks whose step was lost, and how.
        without_inputs: ranks that had no inputs left, and took part with zeros.
        skipped: ranks whose zeros do not count.
        weights: each rank's weight; None for a rank that gave none.
        order: rank 0's ready order; empty unless the plan is being learned.
        non_finite: ranks that have found gradients of theirs that are not finite.
    """

    used: list[int]
    late: list[int] = field(default_factory=list)
    unfrozen: bool = False
    buffers_changed: bool = False
    lost: dict[int, StepOutcome] = field(default_factory=dict)
    without_inputs: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    weights: list[float | None] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    non_finite: list[int] = field(default_factory=list)

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
        with_digests: whether each rank tells a digest of its replica.
    """

    def __init__(
        self, *, slots: int, buckets: int, world: int, with_order: bool, with_digests: bool = False
    ) -> None:
        self._slots = slots
        self._buckets = buckets
        self._world = world
        self._late = slots
        self._flags = self._late + buckets
        self._status = self._flags + 2
        self._weights = self._status + world
        self._order = self._weights + _WEIGHT.size * world
        # What differs from step to step is last: the rest is compared as a whole.
        self._counts = self._order + (_ORDER_BYTES * slots if with_order else 0)
        self._digests = self._counts + _COUNTS.size * world
        self.numel = self._digests + (_DIGEST.size * world if with_digests else 0)
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
            has_weight = 0 if report.weight is None else _HAS_WEIGHT
            non_finite = _NON_FINITE if report.non_finite else 0
            entries[self._status + rank] = report.outcome | has_weight | non_finite
        if report.weight is not None:
            _WEIGHT.pack_into(entries, self._weights + _WEIGHT.size * rank, report.weight)
        if self._counts > self._order and rank == 0:
            self._write_order(entries, report.order)
        if self._world:
            through_forward, *numbers = report.counts
            limited = map(min, numbers, (255, 255, 65535))
            first = _TOLD | through_forward * _THROUGH_FORWARD | report.hook << _HOOK_SHIFT
            _COUNTS.pack_into(entries, self._counts + _COUNTS.size * rank, first, *limited)
        if self.numel > self._digests:
            _DIGEST.pack_into(entries, self._digests + _DIGEST.size * rank, report.digest)
        into.copy_(torch.frombuffer(entries, dtype=torch.uint8))

    def read(self, reduced: Tensor) -> StepSummary:
        """What all ranks wrote; most steps are like the one before, and then nothing is decoded again."""
        sums = reduced.tolist()
        del sums[self._counts :]
        if self._last is None or self._last[0] != sums:
            self._last = sums, self._summarise([*map(round, sums)])
        return self._last[1]

    def read_counts(self, reduced: Tensor) -> list[StepCounts | None]:
        """What the user has done on each rank since the last step; None for a rank that did not tell."""
        entries = reduced[self._counts : self._digests].tolist()
        return [
            StepCounts(bool(first & _THROUGH_FORWARD), *numbers) if first else None
            for first, *numbers in _COUNTS.iter_unpack(bytes(map(round, entries)))
        ]

    def read_hooks(self, reduced: Tensor) -> list[int]:
        """The number of each rank's hook."""
        entries = reduced[self._counts : self._digests : _COUNTS.size].tolist()
        return [round(first) >> _HOOK_SHIFT for first in entries]

    def read_digests(self, reduced: Tensor) -> list[int]:
        """Each rank's digest; one if all are equal, and none if some rank told none."""
        entries = reduced[self._digests :].tolist()
        if entries == entries[: _DIGEST.size] * self._world:  # the usual case
            entries = entries[: _DIGEST.size]
        digests = [each for (each,) in _DIGEST.iter_unpack(bytes(map(round, entries)))]
        return digests if all(digests) else []

    def _summarise(self, sums: list[int]) -> StepSummary:
        few = sums[self._slots : self._order]
        flags = self._flags - self._slots
        status = few[flags + 2 : flags + 2 + self._world]
        outcomes = {rank: StepOutcome(entry & ~_FLAGS) for rank, entry in enumerate(status) if entry}
        return StepSummary(
            used=sums[: self._slots],
            late=[bucket for bucket in range(self._buckets) if few[bucket]],
            unfrozen=few[flags] > 0,
            buffers_changed=few[flags + 1] > 0,
            lost={rank: outcome for rank, outcome in outcomes.items() if outcome in LOST},
            without_inputs=[rank for rank, outcome in outcomes.items() if outcome is StepOutcome.NO_INPUTS],
            skipped=[rank for rank, outcome in outcomes.items() if outcome is StepOutcome.SKIPPED],
            weights=self._read_weights(status, few[self._weights - self._slots :]),
            order=self._read_order(sums[self._order :]),
            non_finite=[rank for rank, entry in enumerate(status) if entry & _NON_FINITE],
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
