import random
from collections.abc import Iterator

import pytest

from paceline.ddp.buckets.plan import BucketPlan
from paceline.ddp.reducer.readiness import LaunchOrder, Readiness

PLAN = BucketPlan(((0, 1), (2,)))


def begun(plan: BucketPlan = PLAN, slots: int = 4) -> Readiness:
    readiness = Readiness(plan, slots)
    readiness.begin(bytearray(slots))
    return readiness


def test_the_last_slot_fills_its_bucket() -> None:
    readiness = begun()
    assert [readiness.mark([slot]) for slot in (1, 2, 0)] == [[], [1], [0]]
    assert readiness.order == [1, 2, 0]
    assert bytes(readiness.used) == b"\1\1\1\0"


def test_a_slot_outside_the_plan_fills_nothing() -> None:
    readiness = begun()
    assert readiness.mark([3]) == []
    assert readiness.used[3]


def test_slots_with_gradients_from_before_are_used_but_not_ready() -> None:
    readiness = Readiness(PLAN, 4)
    readiness.begin(bytearray(b"\1\0\0\0"))
    assert readiness.used[0]
    assert readiness.mark([1]) == []
    assert not readiness.is_complete(0)


def test_a_gradient_after_the_launch_is_late_and_one_before_is_not() -> None:
    readiness = begun()
    readiness.mark([2])
    readiness.mark([2])
    assert not readiness.late
    readiness.mark_launched(1)
    readiness.mark([2])
    assert readiness.late == {1}
    assert not readiness.is_complete(1)


def test_what_arrived_twice_is_expected_twice() -> None:
    readiness = begun()
    readiness.mark((0, 1, 0, 2))
    assert readiness.order == [1, 0, 2]
    readiness.learn()
    readiness.begin(bytearray(4))
    assert readiness.mark([0, 1]) == []
    assert readiness.ready([0, 1]) == [1]
    assert readiness.mark([0]) == [0]
    assert readiness.is_complete(0)


def test_fewer_than_expected_leave_the_bucket_open() -> None:
    readiness = begun()
    readiness.mark((0, 0, 1, 2))
    readiness.learn()
    readiness.begin(bytearray(4))
    assert readiness.mark([0, 1, 2]) == [1]


def test_another_plan_takes_over_what_was_learned() -> None:
    readiness = begun()
    readiness.mark((0, 0, 1, 2))
    readiness.learn()
    other = Readiness(BucketPlan(((2, 1, 0),)), 4)
    other.expect_as(readiness)
    assert other.mark([2, 1, 0]) == []
    assert other.mark([0]) == [0]


def test_steps_are_steady_while_they_use_the_same_slots() -> None:
    readiness = begun()
    for used in ((0, 1, 2), (0, 1, 2)):
        readiness.begin(bytearray(4))
        readiness.mark(used)
        readiness.learn()
    assert readiness.steady
    readiness.begin(bytearray(4))
    readiness.mark([0])
    readiness.learn()
    assert not readiness.steady


def test_planned_slots_are_awaited_until_their_last_gradient_is_there() -> None:
    readiness = Readiness(BucketPlan(((0, 1), (3,))), 4)
    assert readiness.unready() == [0, 1, 3]
    readiness.mark([1, 2])
    assert readiness.unready() == [0, 3]
    readiness.mark([0, 3, 3])
    assert readiness.unready() == []


def test_it_is_known_whether_the_last_step_used_every_planned_slot() -> None:
    readiness = Readiness(BucketPlan(((0, 1), (3,))), 4)
    assert not readiness.used_all
    for used, all_of_them in (([0, 1, 3], True), ([0, 1, 2], False), ([0, 1, 2, 3], True)):
        readiness.begin(bytearray(4))
        readiness.mark(used)
        readiness.learn()
        assert readiness.used_all == all_of_them


def step(readiness: Readiness, *arrivals: list[int]) -> list[list[int]]:
    """A step whose gradients come in these batches; returns the buckets that each made full."""
    readiness.begin(bytearray(4))
    full = [readiness.mark(batch) for batch in arrivals]
    readiness.learn()
    return full


def test_a_step_like_the_last_is_not_counted() -> None:
    readiness = begun()
    step(readiness, [1, 0, 2])
    readiness.begin(bytearray(b"\0\0\0\1"))
    assert [readiness.mark([1]), readiness.mark([0]), readiness.mark([2])] == [[], [0], [1]]
    assert readiness.is_like_last
    assert readiness.last_slot == {0: 0, 1: 2}
    assert readiness.is_complete(0)
    assert readiness.order == [1, 0, 2]
    assert bytes(readiness.used) == b"\1\1\1\1"
    assert not readiness.learn()


@pytest.mark.parametrize("arrivals", [[0, 1, 2], [1, 0], [1, 0, 2, 2], [1, 0, 2, 3], [1, 1, 0, 2], [3]])
def test_a_step_unlike_the_last_is_counted(arrivals: list[int]) -> None:
    readiness = begun()
    step(readiness, [1, 0, 2])
    readiness.begin(bytearray(4))
    for slot in arrivals:
        readiness.mark([slot])
    assert bytes(readiness.used) == bytes(slot in arrivals for slot in range(4))
    assert readiness.learn()
    assert not readiness.is_like_last


@pytest.mark.parametrize("arrivals", [[0, 1, 0, 2], [1, 0, 2]])
def test_a_step_that_was_lost_leaves_what_the_last_one_taught(arrivals: list[int]) -> None:
    readiness = begun()
    step(readiness, [1, 0, 2])
    readiness.begin(bytearray(4))
    readiness.mark(arrivals)
    readiness.begin(bytearray(4))
    assert [readiness.mark([1, 0]), readiness.mark([2])] == [[0], [1]]
    assert readiness.last_slot == {0: 0, 1: 2}


def batches(arrivals: list[int], draw: random.Random) -> Iterator[list[int]]:
    while arrivals:
        size = draw.randint(1, len(arrivals))
        yield arrivals[:size]
        arrivals = arrivals[size:]


@pytest.mark.parametrize("seed", range(200))
def test_remembering_the_last_step_changes_nothing(seed: int) -> None:
    draw = random.Random(seed)
    plan = BucketPlan(((0, 2), (1, 3, 5), (4,)))
    remembers, counts = Readiness(plan, 7), Readiness(plan, 7)
    usual = draw.sample(range(7), 6)
    for _ in range(6):
        accumulated = bytearray(draw.random() < 0.1 for _ in range(7))
        counts._may_be_like_last = False
        remembers.begin(accumulated)
        counts.begin(accumulated)
        arrivals = [*usual]
        if draw.random() < 0.5:
            arrivals[draw.randrange(6)] = draw.randrange(7)
        launched: set[int] = set()
        for batch in batches(arrivals, draw):
            full = remembers.mark(batch)
            assert full == counts.mark(batch)
            if draw.random() < 0.5:
                for bucket in {*full} - launched:
                    launched.add(bucket)
                    remembers.mark_launched(bucket)
                    counts.mark_launched(bucket)
            assert [*map(remembers.is_complete, range(3))] == [*map(counts.is_complete, range(3))]
            assert remembers.last_slot == counts.last_slot
        if draw.random() < 0.2:
            assert remembers.unready() == counts.unready()
        assert remembers.used == counts.used
        assert remembers.late == counts.late
        assert remembers.order == counts.order
        remembers.learn()
        counts.learn()
        assert remembers._expected == counts._expected
        assert remembers.steady == counts.steady


def test_what_was_learned_holds_for_the_next_plan() -> None:
    readiness = begun()
    step(readiness, [1, 0, 2])
    other = Readiness(BucketPlan(((1,), (2, 0))), 4)
    other.expect_as(readiness)
    other.begin(bytearray(4))
    assert [other.mark([1]), other.mark([0]), other.mark([2])] == [[0], [], [1]]
    assert other.is_like_last


def test_there_is_something_to_do_where_a_bucket_is_full_or_a_gradient_large_or_many_have_come() -> None:
    readiness = Readiness(BucketPlan(((0, 1, 2, 3), (4, 5))), 6)
    readiness.mark([5, 0, 2, 1, 3, 4])
    readiness.learn()
    assert readiness.slots_to_act_on(bytearray(6), most=10) == {3, 4}
    assert readiness.slots_to_act_on(bytearray(b"\0\0\1\0\0\0"), most=10) == {2, 3, 4}
    assert readiness.slots_to_act_on(bytearray(6), most=2) == {0, 1, 3, 4}
    never_run = Readiness(BucketPlan(((0, 1, 2), (3,))), 4)
    assert never_run.slots_to_act_on(bytearray(b"\0\1\0\1"), most=1) == {1, 3}


def test_buckets_are_launched_in_plan_order_and_the_reports_last() -> None:
    order = LaunchOrder(4, launch_late=False)
    order.mark_full(1)
    order.mark_full(3)
    assert order.pop() is None
    order.mark_full(0)
    assert [order.pop(), order.pop(), order.pop()] == [0, 1, None]
    assert list(order.pop_remaining()) == [2, 3]
    assert list(order.pop_remaining()) == []


def test_none_is_launched_early_while_the_first_step_teaches() -> None:
    order = LaunchOrder(3, launch_late=True)
    for number in (0, 1, 2):
        order.mark_full(number)
        assert order.pop() is None
    assert list(order.pop_remaining()) == [0, 1, 2]
