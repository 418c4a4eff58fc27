"""Which bucket cap makes steps shortest, by prediction from recorded ready times. Pure: no tensors here."""

from collections.abc import Sequence

from paceline.comm.link_speed import Link
from paceline.ddp.buckets.plan import BucketCaps, BucketPlan, Slot, make_plan
from paceline.hooks.choice import HookCost, ReadyBucket, StepWork, predict

_MIB = 1 << 20
_CAPS = tuple(mib * _MIB for mib in (1, 2, 4, 8, 16, 25, 50, 100, 200))
# A trial costs some steps with new buckets, so it must promise something.
_WORTH = 0.03


class ReadyTimes:
    """When each slot's gradient is ready, by the recorded times of buckets.

    Between two buckets, gradients are taken to come at an even rate, in bytes per second.

    Args:
        slots: every slot.
        plan: the plan of the recorded steps.
        ready: when each of its buckets was ready, in seconds after the start of backward.
    """

    def __init__(self, slots: Sequence[Slot], plan: BucketPlan, ready: Sequence[float]) -> None:
        self._of: dict[int, float] = {}
        before = 0.0
        for members, at in zip(plan.buckets, ready, strict=True):
            total, done = sum(slots[slot].nbytes for slot in members), 0
            for slot in members:
                done += slots[slot].nbytes
                self._of[slot] = before + (max(at, before) - before) * (done / total if total else 1)
            before = max(at, before)

    def work(self, slots: Sequence[Slot], plan: BucketPlan, backward: float) -> StepWork:
        """What a step has to do with another plan of the same slots."""
        buckets = [
            ReadyBucket(
                sum(slots[slot].nbytes for slot in members), max(self._of.get(slot, 0.0) for slot in members)
            )
            for members in plan.buckets
            if members
        ]
        # The last bucket is launched when backward has ended, because the step report follows it.
        *early, last = buckets
        return StepWork([*early, ReadyBucket(last.nbytes, backward)], backward)


def choose_caps(
    slots: Sequence[Slot],
    order: Sequence[int],
    now: BucketPlan,
    work: StepWork,
    times: ReadyTimes,
    cost: HookCost,
    link: Link,
    *,
    first: int,
) -> BucketCaps | None:
    """The caps that promise shorter steps than the plan in force; None if none do.

    Args:
        slots: every slot.
        order: the order of the gradients.
        now: the plan in force.
        work: what a step has to do with it.
        times: when gradients are ready.
        cost: of the hook in force.
        link: the slowest link.
        first: the cap of the first bucket, in bytes.
    """
    best, least = None, (1 - _WORTH) * predict(work, cost, link)
    for cap in _CAPS:
        caps = BucketCaps((min(first, cap), cap))
        plan = make_plan(slots, order, caps)
        if plan == now:
            continue
        took = predict(times.work(slots, plan, work.backward), cost, link)
        if took < least:
            best, least = caps, took
    return best
