"""Which plan is in force, and when the next one takes over. Pure: no tensors here.

The first backward teaches: under the first plan nothing leaves before its end, and the order in which
gradients arrived on rank 0 becomes the second plan's. A slot that is thawed later gets a place at the end
of that order.
"""

from collections.abc import Sequence

from paceline.ddp.buckets.plan import BucketCaps, Slot, guess_plan, make_plan


class Planner:
    """Makes plans, the same on every rank, from what all ranks know.

    Args:
        slots: every slot.
        trainable: those that are to be reduced from the start, by index.
        first_caps: bucket caps of the first plan.
        caps: bucket caps of every other plan.
        rebuild: whether to learn the order of arrival; if not, plans go by the order of the slots.
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
        self._caps = caps
        self._first_caps = first_caps if rebuild else caps
        self._rebuild = rebuild
        self.restart()
        self.first_sizes = [
            sum(slots[slot].nbytes for slot in members) for members in self.plan.buckets if members
        ]

    def restart(self) -> None:
        """Learn anew, as when the group has changed."""
        self.teaching = self._rebuild
        self.learned = False
        self.rebuilt = False
        self.order = [*reversed(self._trainable)]
        self.plan = guess_plan(self._slots, self._trainable, self._first_caps)

    def learn(self, order: Sequence[int]) -> bool:
        """Take in what a finished step showed; returns whether there is a new plan."""
        self.learned = True
        if not self.teaching:
            return False
        self.teaching = False
        self.rebuilt = True
        planned, arrived = set(self.order), set(order)
        self.order = [
            *(slot for slot in order if slot in planned),
            *(slot for slot in self.order if slot not in arrived),
        ]
        self.plan = make_plan(self._slots, self.order, self._caps)
        return True

    def thaw(self, slots: Sequence[int]) -> None:
        """Give slots that were outside the plan a place in it."""
        self.order = [*self.order, *slots]
        self.plan = make_plan(self._slots, self.order, self._first_caps if self.teaching else self._caps)

    def outside(self) -> list[int]:
        """Slots that the plan does not cover."""
        inside = set(self.order)
        return [slot.index for slot in self._slots if slot.index not in inside]
