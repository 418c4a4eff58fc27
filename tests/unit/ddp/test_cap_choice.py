"""Which bucket caps are predicted to make steps shorter."""

import pytest

from paceline.comm.link_speed import Link
from paceline.ddp.buckets.cap_choice import ReadyTimes, choose_caps
from paceline.ddp.buckets.plan import BucketCaps, Slot, make_plan
from paceline.hooks.choice import HookCost

MIB = 1 << 20
SLOTS = [Slot(index, f"weight{index}", MIB // 4, MIB, "float32") for index in range(32)]
ORDER = [*range(32)]
FREE = HookCost(before=0.0, after=0.0, sent=1.0, rounds=1)
# Gradients come within a second.
READY_ONE = [1.0]


def chosen(link: Link, caps: tuple[int, ...], ready: list[float]) -> BucketCaps | None:
    plan = make_plan(SLOTS, ORDER, BucketCaps(caps))
    times = ReadyTimes(SLOTS, plan, ready)
    work = times.work(SLOTS, plan, backward=1.0)
    return choose_caps(SLOTS, ORDER, plan, work, times, FREE, link, first=MIB)


def test_gradients_in_a_bucket_are_taken_to_come_at_an_even_rate() -> None:
    plan = make_plan(SLOTS, ORDER, BucketCaps((16 * MIB,)))
    times = ReadyTimes(SLOTS, plan, [0.2, 1.0])
    finer = times.work(SLOTS, make_plan(SLOTS, ORDER, BucketCaps((8 * MIB,))), backward=1.0)
    assert [bucket.ready for bucket in finer.buckets] == pytest.approx([0.1, 0.2, 0.6, 1.0])


def test_small_buckets_are_chosen_where_the_link_is_what_takes_long() -> None:
    caps = chosen(Link(0.0, 32 * MIB), (64 * MIB,), READY_ONE)
    assert caps == BucketCaps((MIB, MIB))


def test_large_buckets_are_chosen_where_messages_take_long_to_arrive() -> None:
    ready = [1 / 32 * (number + 1) for number in range(32)]
    caps = chosen(Link(1.0, 10_000 * MIB), (MIB,), ready)
    assert caps is not None
    assert caps[1] >= 25 * MIB


def test_nothing_is_chosen_where_nothing_is_to_be_gained() -> None:
    assert chosen(Link(0.0, 1e12), (25 * MIB,), [25 / 32, 1.0]) is None
