"""How numbers are written: the same way by all tools, and never as a power of ten."""

import pytest

from paceline.tools.doctor.host_resources import CoreFacts, judge_cores
from paceline.tools.doctor.rank_measurements import judge_pairs
from paceline.tools.doctor.requested_run import RequestedRun
from paceline.tools.formatting import milliseconds, percent, plain_number, plural


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1"), (7.0, "7"), (0.01234, "0.0123"), (0.00001234, "0.0000123"), (8.154, "8.15"),
        (-43.66, "-43.7"), (99.4, "99.4"), (99.96, "100"), (999.6, "1,000"), (1012.3, "1,012"),
        (2e7, "20,000,000"),
    ],
)  # fmt: skip
def test_a_number_is_never_a_power_of_ten(value: float, text: str) -> None:
    assert plain_number(value) == text


@pytest.mark.parametrize(
    ("many", "text"),
    [(0, "0 steps"), (1, "1 step"), (1.0, "1 step"), (1.5, "1.5 steps"), (1200, "1,200 steps")],
)
def test_one_is_not_plural(many: float, text: str) -> None:
    assert plural(many, "step") == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0%"), (0.0044, "0.4%"), (0.054, "5.4%"), (0.434, "43%"), (1, "100%")]
)
def test_a_small_share_has_one_more_digit(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.0423, "42 µs"),
        (0.123, "0.12 ms"),
        (43.21, "43.2 ms"),
        (432.1, "432 ms"),
        (12345, "12.3 s"),
    ],
)
def test_a_time_has_a_unit_that_suits_it(value: float, text: str) -> None:
    assert milliseconds(value) == text


def test_the_doctor_writes_one_of_a_thing_in_the_singular() -> None:
    cores = judge_cores(CoreFacts(8, 1, 1.0, {}), RequestedRun(1))
    assert cores.found == "1 rank x 1 thread on 1 core"
    [speed] = judge_pairs(
        [{"ranks": [0, 1], "transport": "gloo", "latency_us": 20.0, "mb_per_s": 1.25e6}], ["a", "a"]
    )
    assert speed.found == "gloo inside hosts: 20 us, 1,250,000 MB/s (all-reduce of two ranks, 1 pair)"
