"""When fragments are exchanged, and how parameters are cut into them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import OptionError
from paceline.outer.schedule import Schedule, cut_evenly


def test_the_rounds_of_a_period_are_spread_evenly_over_it() -> None:
    schedule = Schedule(period=64, fragments=4, overlap=16)
    assert [schedule.send_step(number) for number in range(6)] == [16, 32, 48, 64, 80, 96]
    assert [schedule.fragment(number) for number in range(6)] == [0, 1, 2, 3, 0, 1]
    assert schedule.use_step(0) == 32


@given(st.integers(1, 50), st.data())
def test_a_fragment_is_sent_once_per_period_and_used_before_it_is_sent_again(
    period: int, data: st.DataObject
) -> None:
    fragments = data.draw(st.integers(1, period))
    schedule = Schedule(period, fragments, data.draw(st.integers(0, period - 1)))
    for number in range(3 * fragments):
        again = number + fragments
        assert schedule.fragment(again) == schedule.fragment(number)
        assert schedule.send_step(again) == schedule.send_step(number) + period
        assert schedule.send_step(number) <= schedule.use_step(number) < schedule.send_step(again)


@given(st.integers(1, 20), st.integers(0, 100), st.data())
def test_the_first_round_after_a_step_is_the_first_that_is_sent_later(
    period: int, step: int, data: st.DataObject
) -> None:
    schedule = Schedule(period, data.draw(st.integers(1, period)), 0)
    number = schedule.first_round_after(step)
    assert schedule.send_step(number) > step
    assert number == 0 or schedule.send_step(number - 1) <= step


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_parts_cover_all_elements_in_order_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    parts = cut_evenly(sizes, count)
    assert len(parts) == count
    assert all(parts)
    assert [index for part in parts for index in part] == [*range(len(sizes))]


def test_parts_are_of_about_equal_size() -> None:
    sizes = [100, 1, 1, 98, 50, 50, 100]
    assert [sum(sizes[index] for index in part) for part in cut_evenly(sizes, 4)] == [100, 100, 100, 100]


@pytest.mark.parametrize(
    ("period", "fragments", "overlap", "words"),
    [
        (0, 1, 0, "period must be a positive number of steps"),
        (4, 0, 0, "fragments must be at least 1"),
        (4, 5, 0, "at most the period"),
        (4, 2, -1, "overlap must not be negative"),
        (4, 2, 4, "less than the period"),
    ],
)
def test_impossible_schedules_are_refused(period: int, fragments: int, overlap: int, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Schedule(period, fragments, overlap)
