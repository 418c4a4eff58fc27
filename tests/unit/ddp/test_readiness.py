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
