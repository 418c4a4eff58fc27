"""The reducer of a small module, built as the wrapper builds it, with real backward passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted_reducers import ALL, Rank, assert_weighted_step, assert_works, rows
from scripted_steps import (
    OtherRank,
    OtherRanks,
    assert_grads,
    mean,
    random_grads,
    sent_numels,
    sent_report,
)
from torch import Tensor

from paceline.ddp.exchange.average import Average
from paceline.ddp.exchange.comm_hook import FutureHookExchange
from paceline.ddp.exchange.generator_hook import GeneratorHookExchange
from paceline.ddp.reducer.planner import PlanStage
from paceline.ddp.reducer.step_report import RankReport, StepOutcome
from paceline.errors import PeerError, StepError, WeightsError
from paceline.hooks import average
from paceline.testing import ScriptedGroup


def test_gradients_are_averaged_step_after_step() -> None:
    this = Rank(OtherRank(), OtherRank(), rank=1)
    for _ in range(4):
        x, one, two = rows(), random_grads(this.parameters), random_grads(this.parameters)
        this.step(x, OtherRank(one), OtherRank(two))
        this.assert_mean(this.alone(x), one, two)
    assert this.reducer.step_number == 4


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"rebuild_plan": False}])
def test_gradients_are_averaged_with_options_too(options: dict[str, Any]) -> None:
    this = Rank(**options)
    for _ in range(3):
        x, other = rows(), random_grads(this.parameters)
        this.step(x, OtherRank(other))
        this.assert_mean(this.alone(x), other)


def test_a_second_backward_adds_its_average() -> None:
    this = Rank()
    x, y, one, two = rows(), rows(), random_grads(this.parameters), random_grads(this.parameters)
    this.step(x, OtherRank(one))
    first = {slot: mean(grad, one[slot]) for slot, grad in this.alone(x).items()}
    # The other rank has that average in its ``.grad`` too.
    this.others.in_next_step(OtherRank({slot: first[slot] + two[slot] for slot in ALL}))
    this.loss(y).backward()
    second = this.alone(y)
    assert_grads(this.parameters, {slot: first[slot] + mean(second[slot], two[slot]) for slot in ALL})


def test_the_plan_follows_the_first_backward() -> None:
    this = Rank()
    arrived: list[int] = []
    for slot, parameter in enumerate(this.parameters):
        parameter.register_hook(lambda _, slot=slot: arrived.append(slot))
    assert this.reducer.planner.learns_order
    this.step(rows(), OtherRank(random_grads(this.parameters)))
    assert len(this.group.calls) == 1
    assert this.reducer.planner.order == arrived == [1, 0, 3, 2]
    assert not this.reducer.uses_rebuilt_plan
    this.step(rows(), OtherRank(random_grads(this.parameters)))
    assert this.reducer.uses_rebuilt_plan
    sizes = [this.parameters[slot].numel() for slot in arrived[:4]]
    sizes[-1] += this.reducer.context.layout.numel
    assert sent_numels(this.group)[1:] == sizes


def test_the_order_is_the_one_that_rank_0_reports() -> None:
    this = Rank(rank=1)
    this.step(rows(), OtherRank(random_grads(this.parameters), report=RankReport(order=[1, 3, 0, 2])))
    assert this.reducer.planner.plan.buckets == ((1,), (3,), (0,), (2,))
    x, other = rows(), random_grads(this.parameters)
    this.step(x, OtherRank(other))
    this.assert_mean(this.alone(x), other)


def test_once_the_plan_is_learned_buckets_are_launched_while_backward_runs() -> None:
    this = Rank()
    launched: list[int] = []
    this.net.first.weight.register_hook(lambda _: launched.append(len(this.group.calls)))
    for _ in range(2):
        this.step(rows(), OtherRank(random_grads(this.parameters)))
        launched.append(len(this.group.calls))
    assert launched == [0, 1, 1 + 3, 1 + 4]  # the first layer's weight comes last
    assert this.reducer.launched == 4


def test_an_unused_parameter_gets_what_other_ranks_have() -> None:
    this = Rank()
    for used in (ALL, (0, 2), ()):
        x, other = rows(), random_grads(this.parameters, *used) if used else {}
        this.step(x, OtherRank(other), skip=True)
        own = this.alone(x, skip=True)
        assert sorted(own) == [0, 1]
        this.assert_mean(own, other)


def test_passes_that_are_not_synced_are_averaged_with_the_next_one_that_is() -> None:
    this = Rank()
    for _ in range(2):
        this.zero_grad()
        inputs, other = [rows() for _ in range(3)], random_grads(this.parameters)
        this.others.in_next_step(OtherRank(other))
        calls = len(this.group.calls)
        for x in inputs[:2]:
            this.accumulate(x)
        own = [this.alone(x) for x in inputs]
        assert len(this.group.calls) == calls
        assert_grads(this.parameters, {slot: own[0][slot] + own[1][slot] for slot in ALL})
        assert [*this.reducer.accumulation.slots] == [1, 1, 1, 1]
        this.loss(inputs[2]).backward()
        this.assert_mean({slot: sum(each[slot] for each in own) for slot in ALL}, other)
        assert not any(this.reducer.accumulation.slots)


def test_the_backward_of_a_forward_without_sync_can_be_synced() -> None:
    this = Rank()
    x, other = rows(), random_grads(this.parameters)
    this.others.in_next_step(OtherRank(other))
    this.reducer.syncs = False
    loss = this.loss(x)
    this.reducer.syncs = True
    this.reducer.sync_next_backward()
    loss.backward()
    this.assert_mean(this.alone(x), other)


def test_weighted_passes_and_ranks() -> None:
    this = Rank()
    for _ in range(2):
        assert_weighted_step(this)


def test_a_pass_without_a_weight_after_a_weighted_one_is_refused_and_told() -> None:
    this = Rank()
    with this.reducer.weigh(3):
        this.accumulate(rows())
    loss = this.loss(rows())
    with pytest.raises(WeightsError, match="weigh every pass, or none"):
        loss.backward()
    told = sent_report(this.reducer.context, this.group.calls[-1])
    assert told.lost == {0: StepOutcome.RAISED_IN_BACKWARD}
    assert_works(this)


def test_an_empty_step_sends_zeros_and_takes_the_average() -> None:
    this = Rank()
    for _ in range(2):
        this.zero_grad()
        other = random_grads(this.parameters)
        this.others.in_next_step(OtherRank(other))
        calls = len(this.group.calls)
        this.reducer.ranks = 1
        this.reducer.run_empty_step()
        sent = this.group.calls[calls:]
        assert sent_report(this.reducer.context, sent[-1]).without_inputs == [0]
        assert not any(call.given[: this.parameters[1].numel()].any() for call in sent)
        assert_grads(this.parameters, {slot: grad / 2 for slot, grad in other.items()})
        assert this.reducer.ranks == 2
    assert_works(this)


def test_the_sum_is_divided_by_the_ranks_that_have_inputs() -> None:
    this = Rank()
    x = rows()
    this.reducer.ranks = 1
    this.step(x, OtherRank(report=RankReport(outcome=StepOutcome.NO_INPUTS)))
    assert_grads(this.parameters, this.alone(x))
    assert this.reducer.last_summary.without_inputs == [1]


def test_another_group_begins_anew() -> None:
    this = Rank()
    for _ in range(3):
        this.step(rows(), OtherRank(random_grads(this.parameters)))
    before = len(this.group.calls)
    x, one, two = rows(), random_grads(this.parameters), random_grads(this.parameters)
    script = OtherRanks(OtherRank(one), OtherRank(two))
    script.context = this.others.context
    group = ScriptedGroup(2, 3, script)
    this.reducer.move_to(group)
    assert this.reducer.step_number == 0
    assert this.reducer.planner.stage is PlanStage.GUESS
    this.step(x)
    this.assert_mean(this.alone(x), one, two)
    assert [len(this.group.calls) - before, len(group.calls)] == [0, 1]
    script.in_next_step(OtherRank(one), OtherRank(two))
    this.step(x)
    this.assert_mean(this.alone(x), one, two)


def averaging(group: ScriptedGroup) -> FutureHookExchange:
    """torch's kind of hook: a future of the average."""

    def hook(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
        return group.all_reduce_future(bucket.buffer().div_(group.size)).then(lambda done: done.value()[0])

    return FutureHookExchange(group, None, hook)


EXCHANGES: dict[str, Callable[[ScriptedGroup], Any]] = {
    "a comm hook": averaging,
    "a hook of ours": lambda group: GeneratorHookExchange(group, average()),
}


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("when", [0, 1, 3])
def test_another_exchange_may_be_used_from_any_step_on(name: str, when: int) -> None:
    this = Rank()
    for step in range(5):
        x, other = rows(), random_grads(this.parameters)
        if step == when:
            this.reducer.use(EXCHANGES[name](this.group))
        calls = len(this.group.calls)
        this.step(x, OtherRank(other))
        this.assert_mean(this.alone(x), other)
        buckets = 1 if step == 0 else 4
        assert len(this.group.calls) - calls == buckets + (step >= when)
    this.reducer.use(Average(this.group))  # type: ignore[arg-type]
    assert_works(this)


def test_an_unfrozen_parameter_is_averaged_at_once_and_planned_afterwards() -> None:
    this = Rank(frozen="first")
    this.step(rows(), OtherRank(random_grads(this.parameters, 0, 1)))
    assert this.reducer.planner.outside() == [2, 3]
    this.net.requires_grad_(True)
    x, other = rows(), random_grads(this.parameters)
    flat = torch.cat([other[2].flatten(), other[3]])
    this.step(x, OtherRank(other, again=[flat], report=RankReport(unfrozen=True)))
    this.assert_mean(this.alone(x), other)
    assert this.reducer.planner.outside() == []
    assert this.reducer.planner.order[2:] == [2, 3]
    x, other = rows(), random_grads(this.parameters)
    calls = len(this.group.calls)
    this.step(x, OtherRank(other))
    this.assert_mean(this.alone(x), other)
    assert len(this.group.calls) - calls == len(this.reducer.planner.plan.buckets) == 4


def fail(_: Tensor) -> None:
    raise ZeroDivisionError("planned")


@pytest.mark.parametrize("steps", [0, 2])
def test_a_backward_that_raises_here_is_told_and_the_next_step_works(steps: int) -> None:
    this = Rank()
    for _ in range(steps):
        this.step(rows(), OtherRank(random_grads(this.parameters)))
    before = len(this.group.calls)
    this.others.in_next_step(OtherRank(random_grads(this.parameters)))
    loss = this.loss(rows())
    hook = this.net.first.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError, match="planned"):
        loss.backward()
    hook.remove()
    sent = this.group.calls[before:]
    assert len(sent) == len(this.reducer.context.bucket_set.buckets)
    told = sent_report(this.reducer.context, sent[-1])
    assert told.lost == {0: StepOutcome.RAISED_IN_BACKWARD}
    assert_grads(this.parameters, {})
    assert this.reducer.last_error == f"an exception in backward of step {steps}"
    assert_works(this)
    assert {call.number for call in this.group.calls} == {*this.group.waits}


def test_a_backward_that_raises_and_is_not_synced_keeps_what_was_accumulated() -> None:
    this = Rank()
    x = rows()
    this.accumulate(x)
    hook = this.net.last.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError, match="planned"):
        this.accumulate(rows())
    hook.remove()
    assert this.group.calls == []
    assert [*this.reducer.accumulation.slots] == [1, 1, 1, 1]
    this.reducer.check_finished()


def test_a_forward_that_raises_here_is_told_and_the_next_step_works() -> None:
    this = Rank()
    this.reducer.prepare()
    this.reducer.turns.fail_forward(this.reducer, "ValueError('planned')")
    assert sent_report(this.reducer.context, this.group.calls[-1]).lost == {0: StepOutcome.RAISED_IN_FORWARD}
    assert this.group.notes_of(1).reason(0, 0) == "ValueError('planned')"
    assert_works(this)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_rank_that_raised_elsewhere_loses_the_step_here(steps: int) -> None:
    this = Rank()
    for _ in range(steps):
        this.step(rows(), OtherRank(random_grads(this.parameters)))
    this.others.in_next_step(OtherRank(report=RankReport(outcome=StepOutcome.RAISED_IN_BACKWARD)))
    this.group.notes_of(1).note_reason(steps, "KeyError('k')")
    loss = this.loss(rows())
    with pytest.raises(PeerError, match=rf"rank 1 raised KeyError\('k'\) in backward of step {steps}"):
        loss.backward()
    assert_grads(this.parameters, {})
    assert "rank 1 raised" in str(this.reducer.last_error)
    assert_works(this)


def test_a_step_that_is_going_on_cannot_be_checked_as_finished() -> None:
    this = Rank()
    refused: list[str] = []

    def look(_: Tensor) -> None:
        with pytest.raises(StepError, match=r"step 0 has not been finished \(rank: 0\)"):
            this.reducer.check_finished()
        refused.append("inside")

    this.net.first.weight.register_hook(look)
    this.step(rows(), OtherRank())
    assert refused == ["inside"]
    this.reducer.check_finished()


def test_two_reducers_in_one_backward_take_turns() -> None:
    group = ScriptedGroup()
    first, second = Rank(group=group), Rank(group=group)
    for step in range(3):
        calls = len(group.calls)
        x = rows()
        second.zero_grad()
        first.zero_grad()
        (second.loss(x) + first.loss(2 * x)).backward()
        assert_grads(first.parameters, {slot: grad / 2 for slot, grad in first.alone(2 * x).items()})
        assert_grads(second.parameters, {slot: grad / 2 for slot, grad in second.alone(x).items()})
        buckets = [*first.reducer.context.bucket_set.buckets, *second.reducer.context.bucket_set.buckets]
        assert len(buckets) == (2 if step == 0 else 8)
        assert sent_numels(group)[calls:] == [bucket.storage.numel() for bucket in buckets]


def test_buffers_that_no_rank_changed_for_three_steps_are_constant() -> None:
    this = Rank()
    for changed in (False, False, True, False, False):
        this.step(rows(), OtherRank(report=RankReport(buffers_changed=changed)))
        assert not this.buffers.constant
    this.step(rows(), OtherRank())
    assert this.buffers.constant


def test_a_reducer_that_is_gone_takes_no_part_in_a_backward() -> None:
    this = Rank()
    this.step(rows(), OtherRank())
    calls = this.group.calls
    net = this.net
    this.others.context = lambda: None  # type: ignore[assignment,return-value]
    del this
    net(rows()).sum().backward()
    assert len(calls) == 1
