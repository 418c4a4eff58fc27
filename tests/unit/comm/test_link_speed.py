"""How many round trips are made to learn a link's latency, and which pairs measure at the same time."""

import pytest

from paceline.comm import link_speed


@pytest.mark.parametrize(
    ("milliseconds", "pings"),
    [
        (0.1, 500),  # 50 ms of them
        (1.0, 50),
        (5.0, 30),  # no fewer: under load, most are late
        (40.0, 13),  # half a second of them
        (400.0, 10),
    ],
)
def test_latency_is_the_least_of_many_round_trips_that_take_half_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch, milliseconds: float, pings: int
) -> None:
    made = 0
    monkeypatch.setattr(link_speed.time, "perf_counter", lambda: made * milliseconds / 1e3)
    while link_speed._wants_more(made, 0.0):
        made += 1
    assert made == pytest.approx(pings, abs=1)


@pytest.mark.parametrize("size", [9, 10, 16, 1001])
def test_of_many_members_nobody_waits_for_more_than_two_other_pairs(size: int) -> None:
    free = [0] * size
    pairs = link_speed._pairs(size)
    for pair in pairs:
        end = 1 + max(free[member] for member in pair)
        for member in pair:
            free[member] = end
    assert {*pairs} == {tuple(sorted((member, (member + 1) % size))) for member in range(size)}
    assert max(free) <= 3
