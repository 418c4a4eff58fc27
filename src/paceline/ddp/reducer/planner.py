"""Which bucket plan is in force, and when the next one takes over. Pure: no tensors here.

The first backward teaches: no bucket is launched before its end, and the order in which gradients became
ready on rank 0 becomes the order of the second plan. A parameter that is unfrozen later gets a place at the
end of that order.
"""

import enum
from collections.abc import Sequence

from paceline.ddp.buckets.plan import BucketCaps, Slot, make_plan, plan_in_reverse


class PlanStage(enum.Enum):
    """What the plan in force is based on."""

    GUESS = enum.auto()  # the order of the parameters; no step has ended yet
    KEPT = enum.auto()  # the same, after the first step: the order is not to be learned
    LEARNED = enum.auto()  # the order in which the first backward made gradients ready on rank 0


class Planner:
    """Makes plans, the same on every rank, from what all ranks know.

    Args:
        slots: every slot.
        trainable: slots that are reduced from the start, by index.
        first_caps: bucket caps while the order is guessed, if it is to be learned.
        caps: bucket caps of every other plan.
        rebuild: whether to learn the order; if not, plans follow the order of the parameters.

    Attributes:
        caps: the bucket caps of plans whose order is known.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        trainable: Sequence[int],
        *,
        first_caps: BucketCaps,
        caps: BucketCaps,
        rebuild: bool,
    ) -> None:
        self._slots = slots
        self._trainable = [*trainable]
        self.caps = caps
        self._first_caps = first_caps if rebuild else caps
        self._rebuild = rebuild
        self.restart()
        self.first_sizes = [
            sum(slots[slot].nbytes for slot in members) for members in self.plan.buckets if members
        ]

    def restart(self) -> None:
        """Learn again from the start, as when the group has changed."""
        self.stage = PlanStage.GUESS
        self.order = [*reversed(self._trainable)]
        self.plan = plan_in_reverse(self._slots, self._trainable, self._first_caps)

    @property
    def learns_order(self) -> bool:
        """Whether the next step's ready order becomes the plan's."""
        return self._rebuild and self.stage is PlanStage.GUESS

    def learn(self, order: Sequence[int]) -> bool:
        """Take in the ready order of a finished step; returns whether there is a new plan."""
        if self.stage is not PlanStage.GUESS:
            return False
        if not self._rebuild:
            self.stage = PlanStage.KEPT
            return False
        self.stage = PlanStage.LEARNED
        planned, ready = set(self.order), set(order)
        self.order = [
            *(slot for slot in order if slot in planned),
            *(slot for slot in self.order if slot not in ready),
        ]
        self.plan = make_plan(self._slots, self.order, self.caps)
        return True

    def add(self, slots: Sequence[int]) -> None:
        """Give slots that were outside the plan a place in it."""
        self.order = [*self.order, *slots]
        caps = self._first_caps if self.learns_order else self.caps
        self.plan = make_plan(self._slots, self.order, caps)

    def use_caps(self, caps: BucketCaps) -> None:
        """Use other bucket caps from now on, with the order that was learned."""
        self.caps = caps
        if self.stage is PlanStage.LEARNED:
            self.plan = make_plan(self._slots, self.order, caps)

    def outside(self) -> list[int]:
        """Slots that the plan does not cover."""
        inside = set(self.order)
        return [slot.index for slot in self._slots if slot.index not in inside]
