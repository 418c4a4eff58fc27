from hypothesis import given
from hypothesis import strategies as st

from paceline.tools.report.host_clocks import ClockOffset, clock_offset


def test_the_offset_is_the_middle_of_the_tightest_bounds() -> None:
    # The other host's clock is 1000 behind: what it shows as 40 is 1040 here.
    ours = {0: [(1000, 1100)], 1: [(1200, 1260)]}
    theirs = {0: [(40, 110)], 1: [(190, 250)]}
    # A bucket is reduced after all launches: at least 950 and 890, at most 1060 and 1070.
    found = clock_offset(ours, theirs, guess=0)
    assert (found.values, found.errors) == ([(950 + 1060) // 2], [55])
    assert found.uncertainty == 55


def test_windows_follow_a_drift_and_between_them_the_offset_is_interpolated() -> None:
    ours = {step: [(1000 * step + 10, 1000 * step + 30)] for step in range(8)}
    theirs = {step: [(990 * step + 10, 990 * step + 30)] for step in range(8)}
    found = clock_offset(ours, theirs, guess=0, window=1)
    assert [found.at(step) for step in range(8)] == [10 * step for step in range(8)]
    sparse = ClockOffset([0, 10], [0, 100], [1, 1])
    assert [sparse.at(step) for step in (-5, 0, 3, 10, 99)] == [0, 0, 30, 100, 100]


def test_without_a_shared_bucket_the_wall_clocks_are_used() -> None:
    found = clock_offset({0: [(5, 9)]}, {1: [(5, 9)]}, guess=77)
    assert found.at(3) == 77
    assert found.uncertainty is None
    assert clock_offset({0: [(5, 9)]}, {0: [(0, 0)]}, guess=77).uncertainty is None


times = st.integers(1, 10**6)


@given(
    st.lists(st.tuples(times, times, times, times, times), min_size=1, max_size=20),
    st.integers(-(10**12), 10**12),
)
def test_the_true_offset_is_within_the_uncertainty(
    steps: list[tuple[int, int, int, int, int]], behind: int
) -> None:
    ours, theirs, now = {}, {}, 10**13
    for number, (first, second, transfer, seen, gap) in enumerate(steps):
        launches = now + first, now + second
        back = max(launches) + transfer
        ours[number] = [(launches[0], back)]
        theirs[number] = [(launches[1] - behind, back + seen - behind)]
        now = back + seen + gap
    found = clock_offset(ours, theirs, guess=0)
    assert abs(found.values[0] - behind) <= found.errors[0] + 1
