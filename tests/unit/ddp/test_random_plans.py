"""Whatever the slots, the order and the caps: a plan covers each slot once."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.ddp.buckets.plan import BucketCaps, Slot, make_plan, plan_in_reverse


@st.composite
def slots(draw: st.DrawFn) -> list[Slot]:
    kinds = st.sampled_from(["float cpu", "double cpu", "float toy"])
    found = []
    for index in range(draw(st.integers(1, 30))):
        numel = draw(st.integers(0, 100))
        found.append(Slot(index, f"p{index}", numel, 4 * numel, draw(kinds), draw(st.booleans())))
    return found


caps = st.lists(st.integers(1, 500), min_size=1, max_size=4).map(lambda sizes: BucketCaps(tuple(sizes)))


@given(slots=slots(), caps=caps, data=st.data())
def test_a_plan_covers_each_slot_once(slots: list[Slot], caps: BucketCaps, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(slots))))
    for plan in (make_plan(slots, order, caps), plan_in_reverse(slots, range(len(slots)), caps)):
        assert sorted(index for bucket in plan.buckets for index in bucket) == list(range(len(slots)))
        assert not any(slots[index].sparse for index in plan.buckets[plan.report_bucket])
        for bucket in plan.buckets:
            members = [slots[index] for index in bucket]
            assert len({slot.kind for slot in members}) <= 1
            assert len(members) == 1 or not any(slot.sparse for slot in members)


@given(slots=slots(), caps=caps, data=st.data())
def test_only_a_buckets_last_slot_takes_it_over_its_cap(
    slots: list[Slot], caps: BucketCaps, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(slots))))
    for bucket in make_plan(slots, order, caps).buckets:
        assert sum(slots[index].nbytes for index in bucket[:-1]) < max(caps.sizes)
