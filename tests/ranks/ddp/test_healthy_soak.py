"""A short run of tests/soak/healthy.py: uneven work is no fault, and a fault is one."""

from healthy import RankResult, alarms, run, wrong_with


def test_uneven_work_of_healthy_ranks_raises_no_alarm() -> None:
    assert wrong_with(run(20, "auto")) == []


def test_stalls_and_differences_are_alarms_and_other_lines_are_not() -> None:
    stalled = "paceline: rank 1 has not come for 6 s (step 20)"
    differs = "file.py:3: UserWarning: first.weight differs between ranks"
    assert alarms([stalled, "Downloading rows", differs]) == [stalled, differs]


def test_a_rank_that_fails_or_differs_is_wrong() -> None:
    fine = RankResult(0, "a", [])
    assert wrong_with([fine, fine]) == []
    assert wrong_with([fine, RankResult(1, "a", [])]) == ["rank 1 ended with 1"]
    assert wrong_with([fine, RankResult(0, "b", ["x"])]) == ["ranks have different parameters"]
    assert wrong_with([fine, RankResult(0, "a", ["rank 0 is late"])]) == ["rank 1 says: rank 0 is late"]
