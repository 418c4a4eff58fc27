from paceline.ddp.buckets.plan import Plan
from paceline.ddp.reducer.readiness import Ledger, Schedule

PLAN = Plan(((0, 1), (2,)))


def begun(plan: Plan = PLAN, slots: int = 4) -> Ledger:
    ledger = Ledger(plan, slots)
    ledger.begin(bytearray(slots))
    return ledger


def test_the_last_slot_fills_its_bucket() -> None:
    ledger = begun()
    assert [ledger.mark([slot]) for slot in (1, 2, 0)] == [[], [1], [0]]
    assert ledger.order == [1, 2, 0]
    assert bytes(ledger.used) == b"\1\1\1\0"


def test_a_slot_outside_the_plan_fills_nothing() -> None:
    ledger = begun()
    assert ledger.mark([3]) == []
    assert ledger.used[3]


def test_slots_with_gradients_from_before_are_used_but_not_ready() -> None:
    ledger = Ledger(PLAN, 4)
    ledger.begin(bytearray(b"\1\0\0\0"))
    assert ledger.used[0]
    assert ledger.mark([1]) == []
    assert not ledger.is_as_expected(0)


def test_a_gradient_after_the_bucket_left_is_late_and_one_before_is_not() -> None:
    ledger = begun()
    ledger.mark([2])
    ledger.mark([2])
    assert not ledger.late
    ledger.mark_left(1)
    ledger.mark([2])
    assert ledger.late == {1}
    assert not ledger.is_as_expected(1)


def test_what_arrived_twice_is_expected_twice() -> None:
    ledger = begun()
    ledger.mark((0, 1, 0, 2))
    assert ledger.order == [1, 0, 2]
    ledger.learn()
    ledger.begin(bytearray(4))
    assert ledger.mark([0, 1]) == []
    assert ledger.ready([0, 1]) == [1]
    assert ledger.mark([0]) == [0]
    assert ledger.is_as_expected(0)


def test_fewer_than_expected_leave_the_bucket_open() -> None:
    ledger = begun()
    ledger.mark((0, 0, 1, 2))
    ledger.learn()
    ledger.begin(bytearray(4))
    assert ledger.mark([0, 1, 2]) == [1]


def test_another_plan_takes_over_what_was_learned() -> None:
    ledger = begun()
    ledger.mark((0, 0, 1, 2))
    ledger.learn()
    other = Ledger(Plan(((2, 1, 0),)), 4)
    other.expect_as(ledger)
    assert other.mark([2, 1, 0]) == []
    assert other.mark([0]) == [0]


def test_steps_are_steady_while_they_use_the_same_slots() -> None:
    ledger = begun()
    for used in ((0, 1, 2), (0, 1, 2)):
        ledger.begin(bytearray(4))
        ledger.mark(used)
        ledger.learn()
    assert ledger.steady
    ledger.begin(bytearray(4))
    ledger.mark([0])
    ledger.learn()
    assert not ledger.steady


def test_buckets_leave_in_plan_order_and_the_carrier_last() -> None:
    schedule = Schedule(4, hold=False)
    schedule.release(1)
    schedule.release(3)
    assert schedule.pop() is None
    schedule.release(0)
    assert [schedule.pop(), schedule.pop(), schedule.pop()] == [0, 1, None]
    assert list(schedule.rest()) == [2, 3]
    assert list(schedule.rest()) == []


def test_none_leaves_early_while_the_first_step_teaches() -> None:
    schedule = Schedule(3, hold=True)
    for number in (0, 1, 2):
        schedule.release(number)
        assert schedule.pop() is None
    assert list(schedule.rest()) == [0, 1, 2]
