import pytest

from paceline.ddp.buckets.plan import BucketCaps, Slot, make_plan, plan_in_reverse
from paceline.ddp.reducer.planner import Planner
from paceline.errors import OptionError
from paceline.options import CapOptions


def slot(index: int, nbytes: int = 4, kind: str = "float", *, sparse: bool = False) -> Slot:
    return Slot(index, f"p{index}", nbytes // 4, nbytes, kind, sparse)


def test_a_bucket_is_closed_once_it_has_reached_its_cap() -> None:
    slots = [slot(0, 40), slot(1, 60), slot(2, 500), slot(3, 40)]
    assert make_plan(slots, [0, 1, 2, 3], BucketCaps((100,))).buckets == ((0, 1), (2,), (3,))


def test_caps_go_by_bucket_and_the_last_goes_on() -> None:
    slots = [slot(index, 10) for index in range(7)]
    plan = make_plan(slots, range(7), BucketCaps((10, 20, 30)))
    assert plan.buckets == ((0,), (1, 2), (3, 4, 5), (6,))


def test_kinds_do_not_share_a_bucket_and_count_their_caps_apart() -> None:
    slots = [slot(index, 10, "float" if index % 2 else "double") for index in range(6)]
    plan = make_plan(slots, range(6), BucketCaps((10, 20)))
    assert plan.buckets == ((0,), (1,), (2, 4), (3, 5))


def test_a_sparse_slot_is_alone_and_never_has_the_report() -> None:
    slots = [slot(0), slot(1, sparse=True), slot(2, sparse=True)]
    plan = make_plan(slots, [0, 1, 2], BucketCaps((4,)))
    assert plan.buckets == ((1,), (2,), (0,))
    assert plan.report_bucket == 2


def test_where_all_is_sparse_the_reports_bucket_has_no_slot() -> None:
    assert make_plan([slot(0, sparse=True)], [0], BucketCaps((4,))).buckets == ((0,), ())


def test_the_guess_sends_the_last_parameters_first() -> None:
    slots = [slot(index, 10) for index in range(5)]
    assert plan_in_reverse(slots, range(5), BucketCaps((20,))).buckets == ((4,), (2, 3), (0, 1))


def planner(count: int, trainable: list[int], *, rebuild: bool = True) -> Planner:
    slots = [slot(index, 10) for index in range(count)]
    return Planner(slots, trainable, first_caps=BucketCaps((1000,)), caps=BucketCaps((10,)), rebuild=rebuild)


def test_the_second_plan_goes_by_arrival_and_what_never_arrived_comes_last() -> None:
    plans = planner(4, [0, 1, 2, 3])
    assert plans.plan.buckets == ((0, 1, 2, 3),)
    assert plans.learns_order
    assert plans.learn([1, 3])
    assert plans.plan.buckets == ((1,), (3,), (2,), (0,))
    assert not plans.learns_order
    assert not plans.learn([0, 1, 2, 3])


def test_without_rebuilding_the_first_plan_stays() -> None:
    plans = planner(2, [0, 1], rebuild=False)
    assert not plans.learns_order
    assert not plans.learn([])
    assert plans.plan.buckets == ((1,), (0,))


def test_an_unfrozen_slot_gets_the_last_place() -> None:
    plans = planner(3, [0, 2])
    plans.learn([2, 0])
    assert plans.outside() == [1]
    plans.add([1])
    assert plans.plan.buckets == ((2,), (0,), (1,))
    assert plans.outside() == []


def test_a_restart_begins_as_the_first_plan_did() -> None:
    plans = planner(3, [0, 2])
    plans.learn([2, 0])
    plans.add([1])
    plans.restart()
    assert plans.learns_order
    assert plans.plan.buckets == ((0, 2),)


def test_caps_by_default_start_small() -> None:
    caps = CapOptions(None, None, 1024)
    assert caps.sizes == (1024, 25 * 1024 * 1024)
    assert CapOptions(2, None, 1024).sizes == (2 * 1024 * 1024,)
    assert CapOptions(None, [1, 0.5], 1024).sizes == (1024 * 1024, 512 * 1024)
    assert CapOptions(None, [1, 0.5], 1024).cap == 1024 * 1024


@pytest.mark.parametrize(("cap", "listed"), [(-1, None), (None, [1, -1]), (float("nan"), None)])
def test_a_cap_must_not_be_negative(cap: float | None, listed: list[float] | None) -> None:
    with pytest.raises(OptionError, match="must not be negative"):
        CapOptions(cap, listed, 1024)
