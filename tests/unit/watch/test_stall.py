import json
from dataclasses import replace

import pytest

from paceline.watch.process_state import ProcessState
from paceline.watch.rank_page import Activity, Doing, Told
from paceline.watch.stacks import CodeLine
from paceline.watch.stall import (
    Patience,
    RankStatus,
    Wait,
    describe_end,
    describe_missing,
    describe_rank,
    describe_stall,
    missing_ranks,
)

HERE = Doing(Activity.BUCKET, wrapper=1, step=5, bucket=2)
LINE = CodeLine("train.py", 31, "main")


def other(
    rank: int, activity: Activity | None = Activity.OUTSIDE, step: int = 5, **given: object
) -> RankStatus:
    values = {"state": ProcessState.SLEEPING, "wrapper": 1, "bucket": -1, **given}
    return RankStatus(rank, activity=activity, step=step, **values)  # type: ignore[arg-type]


def missing(*others: RankStatus) -> list[int]:
    return [status.rank for status in missing_ranks(HERE, others)]


def test_a_rank_that_does_something_else_is_missing_and_one_that_waits_for_the_same_is_not() -> None:
    assert missing(other(1), other(2, Activity.BUCKET, bucket=2)) == [1]


@pytest.mark.parametrize("activity", [Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER, None])
def test_a_rank_in_any_part_of_a_step_may_be_missing(activity: Activity | None) -> None:
    assert missing(other(1, activity)) == [1]


def test_a_rank_that_waits_for_a_later_bucket_or_is_in_a_later_step_has_come() -> None:
    assert missing(other(1, Activity.BUCKET, bucket=3), other(2, step=6)) == []


def test_a_rank_that_waits_for_something_earlier_is_named_only_if_nobody_else_is_missing() -> None:
    earlier = other(2, Activity.BUFFERS)
    assert missing(other(1), earlier) == [1]
    assert missing(other(1, Activity.BUCKET, bucket=2), earlier) == [2]
    assert "wait for different things: rank 2 waits for 0 s for the module buffers" in describe_missing(
        [earlier]
    )


def test_a_rank_that_waits_for_another_wrapper_waits_for_something_else() -> None:
    assert missing(other(1, Activity.BUCKET, bucket=2, wrapper=7)) == [1]


@pytest.mark.parametrize("activity", [Activity.TUNING, Activity.WRAPPING])
@pytest.mark.parametrize("state", [ProcessState.STOPPED, ProcessState.TRACED, ProcessState.SILENT])
def test_a_rank_that_cannot_run_is_missing_where_ranks_work_while_they_wait(
    activity: Activity, state: ProcessState
) -> None:
    doing = Doing(activity, wrapper=1, step=5)
    [found] = missing_ranks(doing, [other(1, activity, state=state), other(2, activity)])
    assert found.rank == 1
    assert f"rank 1 is missing: it {state}" in describe_missing([found])


def test_a_rank_that_is_stopped_while_it_waits_for_a_bucket_has_come() -> None:
    assert missing(other(1, Activity.BUCKET, bucket=2, state=ProcessState.STOPPED)) == []


def test_a_rank_that_has_ended_is_the_one_to_name() -> None:
    assert missing(other(1), other(2, state=ProcessState.ENDED)) == [2]
    assert missing(other(1), other(2, Activity.BUCKET, bucket=2, state=ProcessState.ENDED)) == [2]


def test_a_rank_that_raised_because_of_another_is_not_the_cause() -> None:
    follower = other(1, state=ProcessState.ENDED, is_consequence=True)
    assert missing(follower, other(2, state=ProcessState.ENDED)) == [2]
    assert missing(follower, other(2, step=4)) == [2]
    assert missing(follower) == [1]


def test_a_rank_that_gave_up_its_step_and_then_ended_is_named() -> None:
    assert missing(other(1, step=6, state=ProcessState.ENDED), other(2, Activity.BUCKET, bucket=2)) == [1]


def test_the_message_says_what_is_awaited_who_is_missing_and_where() -> None:
    wait = Wait(0, HERE, 5.4, ["a", "b", "c", "d", "e"])
    status = other(1, line=LINE, seconds=7.0, kind="is in the data loader")
    assert describe_stall(wait, [status]) == (
        "rank 0 has waited 5 s for bucket 2 (a, b, …, e) of step 5; rank 1 is missing: it sleeps or waits at "
        "train.py:31 in main (it is in the data loader; outside of forward and backward for 7 s, step 5)"
    )


def test_an_old_line_is_called_old() -> None:
    text = describe_rank(other(1, state=ProcessState.STOPPED, line=LINE, seen_seconds=9.0))
    assert text.startswith("is stopped by a signal, last seen 9 s ago at train.py:31 in main (")


def test_a_rank_that_has_not_wrapped_yet_is_named_as_such() -> None:
    text = describe_missing([RankStatus(1, ProcessState.UNKNOWN)])
    assert text == "rank 1 is missing: it has not wrapped its module yet"


def test_it_is_told_if_every_rank_has_come() -> None:
    assert "every rank has come" in describe_stall(Wait(0, HERE, 6.0), [])


def test_the_end_says_how_long_it_took() -> None:
    text = describe_end(Wait(0, HERE, 23.0), Told(rank=1))
    assert text == "rank 0 waited 23 s for bucket 2 of step 5; rank 1 has come"


def test_a_status_survives_json() -> None:
    status = other(1, Activity.BUCKET, bucket=3, line=LINE, place=LINE, kind="compiles")
    assert RankStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_a_rank_that_an_exception_has_ended_says_which_and_where() -> None:
    status = other(1, state=ProcessState.ENDED, raised="KeyError('x') (train.py:31 in main)", line=LINE)
    assert describe_missing([status]) == (
        "rank 1 is missing: it has ended by KeyError('x') (train.py:31 in main) "
        "(outside of forward and backward for 0 s, step 5)"
    )


def stepped(seconds: float, steps: int = 10) -> Patience:
    patience = Patience(5.0)
    for step in range(steps):
        patience.see(step, step * seconds)
    return patience


def test_patience_grows_with_the_usual_step() -> None:
    assert stepped(0.1).seconds(HERE, [other(1)]) == 5.0
    assert stepped(2.0).seconds(HERE, [other(1)]) == 10.0


def test_the_usual_step_is_right_if_several_steps_pass_between_two_looks() -> None:
    patience = Patience(5.0)
    for look in range(5):
        patience.see(look * 100, float(look))
    assert patience.usual_step == pytest.approx(0.01)


def test_a_slow_first_step_makes_nobody_more_patient_later() -> None:
    patience = Patience(5.0)
    for step, now in enumerate([0.0, 20.0, 21.0, 21.1, 21.2]):
        patience.see(step, now)
    assert patience.usual_step == pytest.approx(0.1)
    assert patience.seconds(HERE, [other(1)]) == 5.0


def test_patience_is_greater_in_the_first_steps_and_while_modules_are_wrapped() -> None:
    assert Patience(5.0).seconds(HERE, [other(1)]) == 5.0
    assert Patience(5.0).seconds(replace(HERE, step=1), [other(1)]) == 10.0
    assert stepped(0.1).seconds(Doing(Activity.WRAPPING), [other(1)]) == 30.0


def test_a_rank_that_came_back_from_a_place_is_told_after_twice_the_time() -> None:
    patience = stepped(0.1)
    patience.learn_end([other(1, place=LINE)], 20.0)
    assert patience.seconds(HERE, [other(1, place=LINE)]) == 40.0
    assert patience.seconds(HERE, [other(1, place=LINE._replace(line=32))]) == 5.0


def test_a_rank_is_gone_if_it_has_ended_is_about_to_or_if_its_host_falls_silent() -> None:
    assert other(1, state=ProcessState.ENDED).is_gone
    assert other(1, raised="KeyError('x')").is_gone
    assert other(1, state=ProcessState.SILENT).is_gone
    assert not other(1, None, state=ProcessState.SILENT).is_gone
    assert not other(1).is_gone
