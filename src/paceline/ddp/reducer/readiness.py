"""Which slots and buckets are ready in a step, and which bucket is launched next. Pure: no tensors here.

Note [A step like the last]. In most steps the same gradients arrive in the same order as in the step before.
As long as that is so, nothing is counted slot by slot. The new arrivals are compared with those of the last
step, as one list, and the buckets that were full at this point then are full now. At the first difference the
slots are counted after all, from the first arrival of the step.
"""

import enum
from collections.abc import Iterable, Sequence
from operator import or_

from paceline.ddp.buckets.plan import BucketPlan, Slot


class _Arrivals(enum.Enum):
    """What is known of a step's arrivals, see Note [A step like the last]."""

    AS_BEFORE = enum.auto()  # so far they are those of the last step
    ALL_AS_BEFORE = enum.auto()  # the same, and all of them came
    COUNTED = enum.auto()


class Readiness:
    """Counts the gradients that arrived against those that are expected, slot by slot.

    How often a slot's gradient arrives in one backward is learned: once for most, more often where re-entrant
    checkpoints go over one module several times. A slot is ready when its last expected gradient is there. A
    bucket is full when all its slots are ready.

    Attributes:
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
        # Of the last step: its arrivals, after how many of them which bucket was full, which slots it used.
        self._last_arrivals: list[int] = []
        self._last_full: list[tuple[int, int]] = []
        self._last_used = b""
        self._may_be_like_last = False
        self.begin(bytearray(slots))

    def begin(self, accumulated: bytearray) -> None:
        """Start a step: nothing has arrived, but slots may have gradients from accumulation."""
        self._used = bytearray(accumulated)
        self._launched = bytearray(len(self._sizes))
        self.late: set[int] = set()
        self.last_slot: dict[int, int] = {}
        self._matched = self._matched_full = 0
        self._extra: set[int] = set()
        if self._may_be_like_last:
            self._state = _Arrivals.AS_BEFORE
        else:
            self._begin_counting()

    def _begin_counting(self) -> None:
        self._state = _Arrivals.COUNTED
        self._missing = [*self._expected]
        self._unready = [*self._sizes]
        self._arrivals: list[int] = []
        self._full: list[tuple[int, int]] = []
        self._order: list[int] = []

    def mark(self, slots: Sequence[int]) -> list[int]:
        """Count one gradient for each slot; returns the buckets that they made full."""
        if self._state is not _Arrivals.COUNTED:
            end = self._matched + len(slots)
            if slots == self._last_arrivals[self._matched : end]:
                self._matched = end
                return self._full_as_before()
            self._count_instead()
        return self._count(slots)

    @property
    def is_like_last(self) -> bool:
        """Whether all that has arrived is what arrived in the last step."""
        return self._state is not _Arrivals.COUNTED

    def _full_as_before(self) -> list[int]:
        first = self._matched_full
        while (
            self._matched_full < len(self._last_full)
            and self._last_full[self._matched_full][0] <= self._matched
        ):
            self._matched_full += 1
        full = self._last_full[first : self._matched_full]
        self.last_slot.update((bucket, self._last_arrivals[arrivals - 1]) for arrivals, bucket in full)
        return [bucket for _, bucket in full]

    def _count_instead(self) -> None:
        """Count what was only compared so far."""
        self._begin_counting()
        self._count(self._last_arrivals[: self._matched])

    def _count(self, slots: Sequence[int]) -> list[int]:
        missing, used, unready, bucket_of = self._missing, self._used, self._unready, self._bucket_of
        full = []
        before = len(self._arrivals)
        self._arrivals += slots
        for arrivals, slot in enumerate(slots, start=before + 1):
            used[slot] = True
            missing[slot] -= 1
            if missing[slot]:
                if missing[slot] < 0:
                    self._mark_extra(slot)
                continue
            self._order.append(slot)
            bucket = bucket_of[slot]
            if bucket is not None:
                unready[bucket] -= 1
                if not unready[bucket]:
                    full.append(bucket)
                    self._full.append((arrivals, bucket))
                    self.last_slot[bucket] = slot
        return full

    @property
    def used(self) -> bytearray:
        """A 1 for each slot that has a gradient on this rank."""
        if self._state is _Arrivals.AS_BEFORE:
            if self._matched == len(self._last_arrivals):
                self._state = _Arrivals.ALL_AS_BEFORE
                self._set_used_as_before()
            else:
                self._count_instead()
        return self._used

    def _set_used_as_before(self) -> None:
        if 1 in self._used:  # there are gradients from accumulation
            self._used = bytearray(map(or_, self._used, self._last_used))
        else:
            self._used = bytearray(self._last_used)

    @property
    def order(self) -> list[int]:
        """Slots in the order in which they became ready."""
        if self._state is _Arrivals.COUNTED:
            return self._order
        return self._last_arrivals[: self._matched]

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
        missing = self._counted()
        return [slot for slot in slots if not missing[slot]]

    def unused(self, slots: Iterable[int]) -> list[int]:
        """Those slots for which no gradient arrived in this step."""
        missing = self._counted()
        return [slot for slot in slots if missing[slot] == self._expected[slot]]

    def unready(self) -> list[int]:
        """Those slots of the plan of which a gradient is still expected in this step."""
        return [slot for slot, count in enumerate(self._counted()) if count > 0 and self._is_planned(slot)]

    def _counted(self) -> list[int]:
        """For each slot the number of gradients that are still expected."""
        if self._state is not _Arrivals.COUNTED:
            used = self._used if self._state is _Arrivals.ALL_AS_BEFORE else None
            self._count_instead()
            if used is not None:  # it may have been corrected
                self._used = used
        return self._missing

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
        if self._state is _Arrivals.COUNTED:
            return self._unready[bucket] == 0 and not self._extra
        return any(bucket == full for _, full in self._last_full[: self._matched_full])

    def mark_launched(self, bucket: int) -> None:
        """Note that the bucket was launched: what arrives for it now is late."""
        self._launched[bucket] = True

    def learn(self) -> bool:
        """Learn from a step that has ended; returns whether its arrivals were not those of the last one."""
        used = bytes(self.used)
        self.steady = self.steady and self._used_before in (None, used)
        self._used_before = used
        if self._state is _Arrivals.ALL_AS_BEFORE or not self._arrivals:  # a rank without inputs has none
            return False
        self._remember(self._arrivals, used)
        # Expect for each slot at least as many gradients as it got.
        for slot in self._extra:
            self._expected[slot] -= self._missing[slot]
            self._missing[slot] = 0
        self._extra.clear()
        return True

    def _remember(self, arrivals: list[int], used: bytes) -> None:
        self._last_arrivals, self._last_full, self._last_used = arrivals, self._full, used
        # Only where each arrival made its slot ready, and there is no other gradient.
        with_gradient = {slot for slot, is_used in enumerate(used) if is_used}
        self._may_be_like_last = bool(arrivals) and self._order == arrivals and {*arrivals} == with_gradient

    def expect_as(self, other: "Readiness") -> None:
        """Take over what was learned under another plan."""
        self._expected = [*other._expected]
        self.steady, self._used_before = other.steady, other._used_before
        self._may_be_like_last = False
        self.begin(bytearray(len(self._expected)))
        self._count(other._last_arrivals)
        self._remember(self._arrivals, other._last_used)
        self.begin(bytearray(len(self._expected)))

    def slots_to_act_on(self, is_large: Sequence[int], most: int) -> set[int]:
        """Slots at whose arrival there is something to do, if arrivals are those of the last step.

        Args:
            is_large: a 1 for each slot whose gradient is copied at once.
            most: the largest number of arrivals in between.
        """
        ends = {arrivals for arrivals, _ in self._last_full}
        # Also those that have not arrived: in the first step too, their memory is needed for what follows.
        found, since = {slot for slot, large in enumerate(is_large) if large}, 0
        for arrivals, slot in enumerate(self._last_arrivals, start=1):
            since += 1
            if is_large[slot] or arrivals in ends or since == most:
                found.add(slot)
                since = 0
        return found

    def _mark_extra(self, slot: int) -> None:
        """Count a gradient that was not expected."""
        self._extra.add(slot)
        self._order.remove(slot)
        self._order.append(slot)
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
