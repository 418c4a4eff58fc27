"""Which slots and buckets are ready in a step, and which bucket is launched next. Pure: no tensors here."""

from collections.abc import Iterable, Sequence

from paceline.ddp.buckets.plan import BucketPlan, Slot


class Readiness:
    """Counts the gradients that arrived against those that are expected, slot by slot.

    How often a slot's gradient arrives in one backward is learned: once for most, more often where re-entrant
    checkpoints go over one module several times. A slot is ready when its last expected gradient is there. A
    bucket is full when all its slots are ready.

    Attributes:
        used: a 1 for each slot that has a gradient on this rank.
        order: slots in the order in which they became ready.
        late: buckets that got a gradient after they were launched.
        last_slot: for each full bucket, the slot that made it full.
        steady: whether every step so far used the same slots.
    """

    def __init__(self, plan: BucketPlan, slots: int) -> None:
        self._expected = [1] * slots
        self._bucket_of: list[int | None] = [None] * slots
        for bucket, members in enumerate(plan.buckets):
            for slot in members:
                self._bucket_of[slot] = bucket
        self._sizes = [len(members) for members in plan.buckets]
        self.steady = True
        self._used_before: bytes | None = None
        self.begin(bytearray(slots))

    def begin(self, accumulated: bytearray) -> None:
        """Start a step: nothing has arrived, but slots may have gradients from accumulation."""
        self._missing = [*self._expected]
        self._unready = [*self._sizes]
        self._launched = bytearray(len(self._sizes))
        self.used = bytearray(accumulated)
        self.order: list[int] = []
        self.late: set[int] = set()
        self.last_slot: dict[int, int] = {}
        self._extra: set[int] = set()

    def mark(self, slots: Iterable[int]) -> list[int]:
        """Count one gradient for each slot; returns the buckets that they made full."""
        missing, used, unready, bucket_of = self._missing, self.used, self._unready, self._bucket_of
        full = []
        for slot in slots:
            used[slot] = True
            missing[slot] -= 1
            if missing[slot]:
                if missing[slot] < 0:
                    self._mark_extra(slot)
                continue
            self.order.append(slot)
            bucket = bucket_of[slot]
            if bucket is not None:
                unready[bucket] -= 1
                if not unready[bucket]:
                    full.append(bucket)
                    self.last_slot[bucket] = slot
        return full

    def set_used(self, slots: Iterable[int], *, used: bool) -> None:
        """Correct what the arrivals said: a hook may run without a gradient, or a gradient without a hook."""
        for slot in slots:
            self.used[slot] = used

    def set_used_as(self, used: Sequence[int], slots: Iterable[Slot]) -> None:
        """For these slots, use what is said of them elsewhere."""
        for slot in slots:
            self.used[slot.index] = used[slot.index]

    def ready(self, slots: Iterable[int]) -> list[int]:
        """Those slots whose last expected gradient has arrived, and none after it."""
        missing = self._missing
        return [slot for slot in slots if not missing[slot]]

    def unused(self, slots: Iterable[int]) -> list[int]:
        """Those slots for which no gradient arrived in this step."""
        return [slot for slot in slots if self._missing[slot] == self._expected[slot]]

    def unready(self) -> list[int]:
        """Those slots of the plan of which a gradient is still expected in this step."""
        return [slot for slot, count in enumerate(self._missing) if count > 0 and self._is_planned(slot)]

    @property
    def used_all(self) -> bool:
        """Whether the last step used every slot of the plan."""
        before = self._used_before
        return before is not None and all(
            before[slot] for slot in range(len(before)) if self._is_planned(slot)
        )

    def _is_planned(self, slot: int) -> bool:
        return self._bucket_of[slot] is not None

    def is_complete(self, bucket: int) -> bool:
        """Whether the bucket is full, and nothing arrived that was not expected."""
        return self._unready[bucket] == 0 and not self._extra

    def mark_launched(self, bucket: int) -> None:
        """Note that the bucket was launched: what arrives for it now is late."""
        self._launched[bucket] = True

    def learn(self) -> None:
        """Expect for each slot at least as many gradients as it got in this step."""
        used = bytes(self.used)
        self.steady = self.steady and self._used_before in (None, used)
        self._used_before = used
        for slot in self._extra:
            self._expected[slot] -= self._missing[slot]
            self._missing[slot] = 0
        self._extra.clear()

    def expect_as(self, other: "Readiness") -> None:
        """Take over what was learned under another plan."""
        self._expected = [*other._expected]
        self.steady, self._used_before = other.steady, other._used_before
        self.begin(bytearray(len(self._expected)))

    def _mark_extra(self, slot: int) -> None:
        """Count a gradient that was not expected."""
        self._extra.add(slot)
        self.order.remove(slot)
        self.order.append(slot)
        bucket = self._bucket_of[slot]
        if bucket is not None and self._launched[bucket]:
            self.late.add(bucket)


class LaunchOrder:
    """Has buckets launched strictly in plan order, so that every rank issues the same collectives.

    Args:
        buckets: the number of buckets; the last one is launched only at the end of backward, when this rank's
            report is complete.
        launch_late: launch none before the end of backward, as in the first step, which teaches what to
            expect.
    """

    def __init__(self, buckets: int, *, launch_late: bool) -> None:
        self._full = bytearray(buckets)
        self._early = 0 if launch_late else buckets - 1
        self._next = 0

    def mark_full(self, bucket: int) -> None:
        """Note that the bucket is full."""
        self._full[bucket] = True

    def pop(self) -> int | None:
        """The bucket that is launched next, if it may be launched now."""
        if self._next == self._early or not self._full[self._next]:
            return None
        self._next += 1
        return self._next - 1

    def pop_remaining(self) -> Sequence[int]:
        """Every bucket that is not launched yet, in plan order."""
        first, self._next = self._next, len(self._full)
        return range(first, self._next)
