from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from scripted_steps import (
    OtherRank,
    arrive,
    assert_grads,
    begun_step,
    finish,
    mean,
    random_grads,
    random_parameters,
    run_step,
    scripted_context,
    sent_numels,
    sent_report,
    step_context,
)
from torch import Tensor

from paceline.comm import peer_notes
from paceline.ddp.exchange.average import Average
from paceline.ddp.exchange.comm_hook import FutureHookExchange
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.exchange.generator_hook import GeneratorHookExchange
from paceline.ddp.reducer import in_flight as in_flight_file
from paceline.ddp.reducer.in_flight import InFlight
from paceline.ddp.reducer.report_checks import check_reports
from paceline.ddp.reducer.step_context import StepContext
from paceline.ddp.reducer.step_report import RankReport, StepOutcome
from paceline.errors import BrokenHookError, HookError, LostRankError, PeerError, StalledError, StepError
from paceline.hooks import Hook
from paceline.testing import NEVER, ScriptedCall, ScriptedGroup, ScriptedReply

SIZES = (5, 3, 2)
PLAN = ((2,), (1,), (0,))
STEP = 6


class ReportBeside(Average):
    """The average, with the report in a reduction of its own as for hooks."""

    carries_report = False


class OneAtATime(Average):
    """The average, one bucket after the other as for hooks."""

    one_at_a_time = True


def make(group: ScriptedGroup, exchange: Callable[[ScriptedGroup], Exchange] = Average) -> StepContext:
    return step_context(random_parameters(*SIZES), group, *PLAN, exchange=exchange)


def in_flight_of(context: StepContext) -> InFlight:
    context.recorder.backward_began(STEP)
    return InFlight(
        context.bucket_set, context.layout, context.exchange, context.group, STEP, context.recorder
    )


def launch(in_flight: InFlight, context: StepContext, *numbers: int) -> None:
    """Launch buckets of ones."""
    for number in numbers:
        context.bucket_set.buckets[number].storage.fill_(1)
        in_flight.launch(number, RankReport(used=b"\1\1\1"))


def never(*numbers: int) -> Callable[[ScriptedCall], ScriptedReply | None]:
    return lambda call: NEVER if call.number in numbers else None


def returning(result: Callable[[Any], Any]) -> Callable[[ScriptedGroup], FutureHookExchange]:
    """A hook whose future holds what ``result`` makes of the bucket."""

    def hook(_: object, bucket: Any) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result(bucket))
        return future

    return lambda group: FutureHookExchange(group, None, hook, name="wrong")


def test_buckets_are_given_in_launch_order_once_they_hold_the_sum() -> None:
    group = ScriptedGroup(others=lambda call: [call.given * 2])
    context = make(group)
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0, 1)
    for number, bucket in enumerate(in_flight.finished()):
        assert bucket is context.bucket_set.buckets[number]
        assert bucket.storage.unique().tolist() == [3]
        assert group.waits == [*range(number + 1)]
    assert group.waits == [0, 1]


@pytest.mark.parametrize(
    ("outcome", "where"),
    [(StepOutcome.RAISED_IN_FORWARD, "forward"), (StepOutcome.RAISED_IN_BACKWARD, "backward")],
)
def test_a_rank_that_raised_is_named_with_its_reason(outcome: StepOutcome, where: str) -> None:
    parameters = random_parameters(*SIZES)
    others = [OtherRank(), OtherRank(report=RankReport(outcome=outcome))]
    context, group, _ = scripted_context(parameters, *PLAN, others=others, rank=1)
    group.notes_of(2).note_reason(STEP, "ValueError('no such row')")
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0, 1, 2)
    assert len([*in_flight.finished()]) == 3
    summary = in_flight.read_report(RankReport())
    text = rf"rank 2 raised ValueError\('no such row'\) in {where} of step 6; .*\(here: rank 1\)"
    with pytest.raises(PeerError, match=text):
        check_reports(summary, context.group, STEP)


def test_a_rank_that_never_comes_is_missing() -> None:
    group = ScriptedGroup(rank=1, size=3, others=never(1))
    group.notes_of(2).note_waiting(STEP, 1)
    context = make(group)
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0, 1, 2)
    finished = in_flight.finished()
    assert next(finished) is context.bucket_set.buckets[0]
    text = r"bucket 1 \(p1\) of step 6 was not reduced on rank 1; ranks that have not come to it: \[0\];"
    with pytest.raises(StalledError, match=text):
        next(finished)
    assert group.notes_of(0).missing(STEP, 1) == []
    assert group.notes_of(0).missing(STEP, 2) == [1, 2]
    assert group.peer_notes.stopped(STEP) == {}


def test_of_a_stalled_bucket_with_many_parameters_a_few_are_named() -> None:
    group = ScriptedGroup(others=never(0))
    context = step_context(random_parameters(*range(1, 8)), group, (0, 1, 2, 3, 4, 5), (6,))
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0)
    with pytest.raises(StalledError, match=r"bucket 0 \(p0, p1, …, p5\) of step 6"):
        next(in_flight.finished())


def test_a_rank_that_has_died_is_told_to_those_that_cannot_see_it() -> None:
    died = ScriptedReply(error=LostRankError("rank 1 has ended"))
    group = ScriptedGroup(size=3, others=lambda _: died)
    context = make(group)
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0)
    with pytest.raises(StalledError, match="rank 1 has ended"):
        next(in_flight.finished())
    assert group.notes_of(2).stopped(STEP) == {0: "bucket 0"}
    assert (group.notes_of(2).said_missing(STEP, 0) or "").endswith("(rank 1 has ended)")


def test_what_another_rank_says_of_a_missing_one_is_passed_on() -> None:
    group = ScriptedGroup(others=never(0))
    context = make(group)
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0)
    notes = group.notes_of(0)
    notes.note_missing(STEP, "rank 5 is missing: it has ended")
    notes.note_stopped(STEP, "bucket 0")
    with pytest.raises(StalledError, match=r"^step 6: rank 5 is missing: it has ended; the step is lost"):
        next(in_flight.finished())


def test_a_wait_ends_if_another_rank_notes_that_it_has_stopped() -> None:
    group = ScriptedGroup(others=never(0))
    context = make(group)
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0)
    theirs = group.notes_of(1)
    theirs.note_reason(STEP, "KeyError('x') in the hook for bucket 0")
    theirs.note_stopped(STEP, "bucket 0")
    text = r"rank 1 raised KeyError\('x'\) in the hook for bucket 0 of step 6; .*0, waiting for bucket 0\)"
    with pytest.raises(PeerError, match=text):
        next(in_flight.finished())
    assert group.notes_of(1).stopped(STEP)[0] == "waiting for bucket 0"
    with pytest.raises(StepError, match="collectives no longer match: rank 1 raised KeyError"):
        in_flight.wait_for_remaining()


def test_zeros_are_launched_for_what_is_left_with_the_outcome() -> None:
    group = ScriptedGroup()
    context = make(group)
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0)
    for bucket in context.bucket_set.buckets:
        bucket.storage.fill_(7)
    in_flight.launch_zeros(StepOutcome.RAISED_IN_BACKWARD)
    first, second, last = (call.given for call in group.calls)
    assert [first.tolist(), second.tolist(), last[:5].tolist()] == [[1, 1], [0] * 3, [0] * 5]
    report = sent_report(context, group.calls[2])
    assert report.lost == {0: StepOutcome.RAISED_IN_BACKWARD}
    assert report.used == [0, 0, 0]
    assert group.waits == []


def test_zeros_leave_alone_the_storage_that_parameters_have_parts_of() -> None:
    context = make(ScriptedGroup())
    parameters = context.parameters.local
    run_step(context, random_grads(parameters))
    before = [parameter.grad.clone() for parameter in parameters]
    in_flight_of(context).launch_zeros(StepOutcome.RAISED_IN_FORWARD)
    assert all(parameter.grad.equal(old) for parameter, old in zip(parameters, before, strict=True))


def test_after_a_lost_step_the_next_one_works() -> None:
    parameters = random_parameters(*SIZES)
    own, other = random_grads(parameters), random_grads(parameters)
    context, group, script = scripted_context(parameters, *PLAN, others=[OtherRank(other)])
    step = begun_step(context)
    arrive(context, step, {2: own[2]})
    with torch.no_grad():
        step.in_flight.launch_zeros(StepOutcome.RAISED_IN_BACKWARD)
    step.in_flight.wait_for_remaining()
    assert group.waits == [0, 1, 2]
    assert len(group.calls) == 3
    script.in_next_step(OtherRank(other))
    for parameter in parameters:
        parameter.grad = None
    run_step(context, own, number=1)
    assert_grads(parameters, {slot: mean(own[slot], other[slot]) for slot in own})


def test_a_report_beside_the_buckets_follows_the_zeros() -> None:
    group = ScriptedGroup()
    context = make(group, ReportBeside)
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0)
    in_flight.launch_zeros(StepOutcome.RAISED_IN_FORWARD)
    assert sent_numels(group) == [2, 3, 5, context.layout.numel]
    assert group.waits == [0, 1, 2, 3]
    assert sent_report(context, group.calls[3]).lost == {0: StepOutcome.RAISED_IN_FORWARD}
    in_flight.wait_for_remaining()
    assert len(group.calls) == 4


def test_a_rank_with_an_exception_does_not_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {1: NEVER}
    group = ScriptedGroup(others=lambda call: replies.get(call.number))
    context = make(group, ReportBeside)
    in_flight = in_flight_of(context)
    monkeypatch.setattr(in_flight_file, "_GIVE_UP_SECONDS", -1.0)
    in_flight.launch_zeros(StepOutcome.RAISED_IN_BACKWARD)
    assert sent_numels(group) == [2, 3, 5]
    with pytest.raises(StalledError, match=r"bucket 1 \(p1\).*not come to it: \[1\]"):
        in_flight.wait_for_remaining()


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "too short": (
        lambda bucket: bucket.buffer()[:-1].clone(),
        "wanted: 2 elements of torch.float64, got: 1 elem",
    ),
    "of integers": (lambda bucket: bucket.buffer().long(), "got: torch.int64"),
    "no tensor": (lambda _: "result", "got: str"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_hook_with_a_wrong_result_raises_when_the_others_have_been_told(what: str) -> None:
    result, text = WRONG[what]
    group = ScriptedGroup()
    context = make(
        group, returning(lambda bucket: result(bucket) if bucket.index() == 0 else bucket.buffer())
    )
    step = begun_step(context, number=STEP)
    arrive(context, step, random_grads(context.parameters.local))
    with pytest.raises(HookError, match=rf"hook: wrong, bucket: 0, .*{text}") as raised:
        finish(step)
    assert len(group.calls) == 1
    assert sent_report(context, group.calls[0]).lost == {0: StepOutcome.RAISED_IN_BACKWARD}
    assert group.notes_of(1).reason(STEP, 0) == repr(raised.value)


def test_another_ranks_wrong_result_is_a_peers_error() -> None:
    told = OtherRank(report=RankReport(outcome=StepOutcome.RAISED_IN_BACKWARD))
    group = ScriptedGroup(others=lambda call: [told.written_report(context, 1, call.given)])
    context = make(group, returning(lambda bucket: bucket.buffer()))
    group.notes_of(1).note_reason(STEP, "HookError('got: str')")
    with pytest.raises(PeerError, match=r"rank 1 raised HookError\('got: str'\) in backward of step 6"):
        run_step(context, random_grads(context.parameters.local), number=STEP)


@pytest.mark.parametrize("mistaken", [0, 1])
def test_a_mistake_in_a_reduction_after_the_report_is_confirmed_on_all_ranks(mistaken: int) -> None:
    """The bucket is reduced once more, because the other rank had a late gradient; that is too short."""
    late = OtherRank(report=RankReport(late=[0]))
    calls = []

    def others(call: ScriptedCall) -> list[Tensor]:
        flags = torch.tensor([0.0, mistaken == 1])
        return [late.written_report(context, 1, call.given) if call.number == 0 else flags]

    def result(bucket: Any) -> Tensor:
        calls.append(bucket.index())
        return bucket.buffer()[: 1 if len(calls) == 4 and mistaken == 0 else None]

    group = ScriptedGroup(others=others)
    context = make(group, returning(result))
    kind, text = (HookError, "got: 1 elements") if mistaken == 0 else (PeerError, "rank 1 raised")
    with pytest.raises(kind, match=text):
        run_step(context, random_grads(context.parameters.local), number=STEP)
    assert calls == [0, 1, 2, 0]
    assert group.calls[1].given.tolist() == [mistaken == 0, 0]
    assert (group.notes_of(1).reason(STEP, 0) is not None) == (mistaken == 0)


class Fails(Hook):
    """Sums, and fails between two collectives of the bucket."""

    def reduce(self, bucket: Any, group: Any) -> Any:
        yield group.all_reduce(bucket.buffer())
        raise KeyError("forgotten")


@pytest.mark.parametrize("where", ["bucket 0", "bucket 1"])
def test_a_hook_that_raises_between_its_collectives_breaks_the_group_unless_all_do(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_notes, "_ALL_STOPPED_TIMEOUT", timedelta(seconds=0.1))
    group = ScriptedGroup()
    context = make(group, lambda group: GeneratorHookExchange(group, Fails()))
    step = begun_step(context, number=STEP)
    arrive(context, step, random_grads(context.parameters.local))
    with pytest.raises(BrokenHookError, match=r"a hook raised KeyError\('forgotten'\) \(hook: Fails\)"):
        finish(step)
    assert group.notes_of(1).stopped(STEP) == {0: "bucket 0"}
    assert "KeyError" in str(group.notes_of(1).reason(STEP, 0))
    with pytest.raises(StepError, match="Make a new process group"):
        step.in_flight.wait_for_remaining()
    group.notes_of(1).note_stopped(STEP, where)
    if where == "bucket 0":
        step.in_flight.wait_for_remaining()
    else:
        with pytest.raises(StepError, match="collectives no longer match"):
            step.in_flight.wait_for_remaining()


def test_a_hook_that_raises_at_once_is_told_to_the_others() -> None:
    group = ScriptedGroup()
    context = make(group, returning(lambda _: 1 / 0))
    in_flight = in_flight_of(context)
    with pytest.raises(ZeroDivisionError):
        launch(in_flight, context, 0)
    assert group.notes_of(1).stopped(STEP) == {0: "bucket 0"}
    assert "ZeroDivisionError" in str(group.notes_of(1).reason(STEP, 0))


def test_one_at_a_time_has_room_when_all_that_is_launched_is_done() -> None:
    group = ScriptedGroup(others=lambda _: ScriptedReply(asks=3))
    context = make(group, OneAtATime)
    in_flight = in_flight_of(context)
    assert in_flight.has_room
    launch(in_flight, context, 0)
    assert [in_flight.has_room, in_flight.has_room, in_flight.has_room] == [False, False, True]
    launch(in_flight, context, 1)
    in_flight.wait_for_room()
    assert group.waits == [1]
    assert in_flight.has_room


def test_a_bucket_that_failed_makes_room_and_raises_when_its_result_is_wanted() -> None:
    failed = ScriptedReply(error=RuntimeError("connection closed"), asks=2)
    group = ScriptedGroup(others=lambda call: failed if call.number == 0 else None)
    context = make(group, OneAtATime)
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0)
    in_flight.wait_for_room()
    launch(in_flight, context, 1)
    text = r"bucket 0 \(p2\) of step 6.*not come to it: \[1\].*\(connection closed\)"
    with pytest.raises(StalledError, match=text):
        next(in_flight.finished())


def test_waiting_for_room_ends_if_another_rank_has_stopped() -> None:
    group = ScriptedGroup(others=never(0))
    context = make(group, OneAtATime)
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0)
    group.notes_of(1).note_reason(STEP, "KeyError()")
    group.notes_of(1).note_stopped(STEP, "bucket 0")
    with pytest.raises(PeerError, match=r"rank 1 raised KeyError\(\) of step 6"):
        in_flight.wait_for_room()


def test_any_number_of_buckets_is_in_flight_otherwise() -> None:
    context = make(ScriptedGroup(others=never(0, 1)))
    in_flight = in_flight_of(context)
    launch(in_flight, context, 0, 1)
    assert in_flight.has_room
    in_flight.wait_for_room()
