"""A step's record of which slots are ready. Pure: no tensors here."""

from collections.abc import Iterable, Sequence

from paceline.ddp.buckets.plan import Plan


class Ledger:
    """Counts the gradients that arrived against those that are expected, slot by slot.

    How often a slot's gradient arrives in one backward is learned: once for most, more often where re-entrant
    checkpoints go over one module several times. A slot whose last expected gradient is there is ready, and
    a bucket whose slots are all ready is full.

    Attributes:
        used: a 1 for each slot that has a gradient to give.
        order: slots in the order in which they became ready.
        late: buckets that got a gradient after they had left.
        closing: the slot that made each full bucket full.
        steady: whether every step so far used the same slots.
    """

    def __init__(self, plan: Plan, slots: int) -> None:
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
        """Start a step: nothing has arrived, but some slots have gradients from before."""
        self._missing = [*self._expected]
        self._unready = [*self._sizes]
        self._left = bytearray(len(self._sizes))
        self.used = bytearray(accumulated)
        self.order: list[int] = []
        self.late: set[int] = set()
        self.closing: dict[int, int] = {}
        self._extra: set[int] = set()

    def mark(self, slots: Iterable[int]) -> list[int]:
        """Note one gradient of each; returns the buckets that they made full."""
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
                    self.closing[bucket] = slot
        return full

    def ready(self, slots: Iterable[int]) -> list[int]:
        """Those of the slots whose last expected gradient has arrived, and no more than that."""
        missing = self._missing
        return [slot for slot in slots if not missing[slot]]

    def fired(self) -> list[bool]:
        """For each slot whether a gradient arrived in this step."""
        return [missing < expected for missing, expected in zip(self._missing, self._expected, strict=True)]

    def is_as_expected(self, bucket: int) -> bool:
        """Whether the bucket is full, and nothing arrived that was not expected."""
        return self._unready[bucket] == 0 and not self._extra

    def mark_left(self, bucket: int) -> None:
        """Note that the bucket was launched: what arrives for it now is late."""
        self._left[bucket] = True

    def learn(self) -> None:
        """Expect of each slot at least as many gradients as it got in this step."""
        used = bytes(self.used)
        self.steady = self.steady and self._used_before in (None, used)
        self._used_before = used
        for slot in self._extra:
            self._expected[slot] -= self._missing[slot]
            self._missing[slot] = 0
        self._extra.clear()

    def expect_as(self, other: "Ledger") -> None:
        """Take over what another ledger has learned."""
        self._expected = [*other._expected]
        self.steady, self._used_before = other.steady, other._used_before
        self.begin(bytearray(len(self._expected)))

    def _mark_extra(self, slot: int) -> None:
        """Note a gradient more than the slot was expected to get."""
        self._extra.add(slot)
        self.order.remove(slot)
        self.order.append(slot)
        bucket = self._bucket_of[slot]
        if bucket is not None and self._left[bucket]:
            self.late.add(bucket)


class Schedule:
    """Lets buckets leave strictly in plan order, so that every rank issues the same collectives.

    Args:
        buckets: how many there are; the last, the carrier, leaves only at the end of backward.
        hold: let none leave before that; so it is while the first backward teaches what to expect.
    """

    def __init__(self, buckets: int, *, hold: bool) -> None:
        self._full = bytearray(buckets)
        self._early = 0 if hold else buckets - 1
        self._next = 0

    def release(self, bucket: int) -> None:
        """Note that the bucket is full."""
        self._full[bucket] = True

    def pop(self) -> int | None:
        """The bucket that is to leave next, if it may leave now."""
        if self._next == self._early or not self._full[self._next]:
            return None
        self._next += 1
        return self._next - 1

    def rest(self) -> Sequence[int]:
        """Every bucket that has not left yet, the carrier last."""
        first, self._next = self._next, len(self._full)
        return range(first, self._next)
