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

from paceline.ddp.buckets.dense import LARGE_NUMEL
from paceline.ddp.exchange.comm_hook import FutureHookExchange
from paceline.ddp.reducer.step_report import RankReport, StepOutcome
from paceline.errors import PeerError, WeightsError
from paceline.testing import ScriptedGroup

# Each bucket has its own number of elements, so that calls can be told apart.
SIZES = (5, 3, 2)
PLAN = ((2,), (1,), (0,))


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_become_the_mean_over_the_ranks(rank: int, dtype: torch.dtype) -> None:
    parameters = random_parameters(*SIZES, LARGE_NUMEL, dtype=dtype)
    own, one, two = (random_grads(parameters) for _ in range(3))
    others = [OtherRank(one), OtherRank(two)]
    context, *_ = scripted_context(parameters, (2, 3), (1, 0), others=others, rank=rank)
    summary = run_step(context, own)
    assert_grads(parameters, {slot: mean(own[slot], one[slot], two[slot]) for slot in own})
    assert summary.used == [3, 3, 3, 3]


def test_a_sparse_gradient_becomes_the_mean_too() -> None:
    parameters = random_parameters((4, 2), 3)
    own, other = random_grads(parameters), random_grads(parameters)
    own[0][:2], other[0][1:3] = 0, 0
    context, *_ = scripted_context(parameters, (0,), (1,), others=[OtherRank(other)], sparse=[0])
    run_step(context, {0: own[0].to_sparse(1), 1: own[1]})
    assert parameters[0].grad is not None
    assert parameters[0].grad.is_sparse
    torch.testing.assert_close(parameters[0].grad.to_dense(), mean(own[0], other[0]))


def test_what_only_others_used_gets_their_average() -> None:
    parameters = random_parameters(*SIZES)
    one, two = random_grads(parameters, 1), random_grads(parameters, 0, 1)
    context, *_ = scripted_context(parameters, (2, 1), (0,), others=[OtherRank(one), OtherRank(two)])
    own = random_grads(parameters, 2)
    assert run_step(context, own).used == [1, 2, 1]
    nothing = torch.zeros(3)
    assert_grads(parameters, {0: two[0] / 3, 1: mean(nothing, one[1], two[1]), 2: own[2] / 3})


@pytest.mark.parametrize("has_grad", [True, False])
def test_what_no_rank_used_keeps_its_old_gradient(has_grad: bool) -> None:
    parameters = random_parameters(*SIZES)
    old = torch.ones_like(parameters[1]) if has_grad else None
    parameters[1].grad = old
    context, *_ = scripted_context(parameters, (2, 1), (0,), others=[OtherRank()])
    run_step(context, random_grads(parameters, 2))
    assert parameters[0].grad is None
    assert parameters[1].grad is old
    assert old is None or old.equal(torch.ones(3))


def test_an_average_that_no_rank_adds_to_in_the_next_step_stays() -> None:
    parameters = random_parameters(*SIZES)
    own, other = random_grads(parameters), random_grads(parameters)
    context, _, script = scripted_context(parameters, (2, 1), (0,), others=[OtherRank(other)])
    run_step(context, own)
    average = parameters[1].grad
    script.in_next_step(OtherRank())
    run_step(context, {})
    assert parameters[1].grad is average
    assert_grads(parameters, {slot: mean(own[slot], other[slot]) for slot in own})


def test_gradients_from_accumulation_count_as_used() -> None:
    parameters = random_parameters(*SIZES)
    other, old = random_grads(parameters), torch.ones_like(parameters[1])
    parameters[1].grad = old.clone()
    context, *_ = scripted_context(parameters, *PLAN, others=[OtherRank(other)])
    own = random_grads(parameters, 0, 2)
    assert run_step(context, own, accumulated=[1]).used == [2, 2, 2]
    assert_grads(parameters, {slot: mean({1: old, **own}[slot], other[slot]) for slot in other})


def test_a_hook_that_ran_without_a_gradient_is_not_a_use() -> None:
    parameters = random_parameters(*SIZES)
    context, group, _ = scripted_context(parameters, *PLAN, others=[OtherRank()])
    step = begun_step(context)
    step.add([2])
    assert finish(step).used == [0, 0, 0]
    assert group.calls[0].given.tolist() == [0, 0]
    assert_grads(parameters, {})


def test_buckets_are_launched_in_plan_order_and_the_reports_bucket_last() -> None:
    parameters = random_parameters(*SIZES)
    context, group, _ = scripted_context(parameters, *PLAN, others=[OtherRank()])
    own = random_grads(parameters)
    step = begun_step(context)
    seen = []
    for slot in (0, 1, 2):
        arrive(context, step, {slot: own[slot]})
        seen.append(sent_numels(group))
    finish(step)
    assert seen == [[], [], [2, 3]]
    assert sent_numels(group) == [2, 3, 5 + context.layout.numel]
    assert group.waits == [0, 1, 2]
    assert sent_report(context, group.calls[2]).used == [1, 1, 1]


def test_a_step_on_hold_launches_nothing_before_its_end() -> None:
    parameters = random_parameters(*SIZES)
    context, group, _ = scripted_context(parameters, *PLAN, others=[OtherRank()])
    step = begun_step(context, launch_late=True)
    arrive(context, step, random_grads(parameters))
    assert group.calls == []
    finish(step)
    assert sent_numels(group) == [2, 3, 5 + context.layout.numel]


@pytest.mark.parametrize("late", [True, False])
def test_gradients_are_copied_at_once_unless_others_look_at_them(late: bool) -> None:
    parameters = random_parameters(LARGE_NUMEL, 3)
    own, other = random_grads(parameters), random_grads(parameters)
    context, *_ = scripted_context(parameters, (0, 1), others=[OtherRank(other)])
    step = begun_step(context, launch_late=late, copy_late=late)
    arrive(context, step, own)
    assert [parameter.grad is not None for parameter in parameters] == [late, late]
    finish(step)
    assert_grads(parameters, {slot: mean(own[slot], other[slot]) for slot in own})


@pytest.mark.parametrize("numel", [2, LARGE_NUMEL])
@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_gradient_after_the_launch_is_reduced_once_more(numel: int, here: bool, there: bool) -> None:
    parameters = random_parameters(5, 3, numel)
    own, more, other, others_more = (random_grads(parameters) for _ in range(4))
    other_rank = OtherRank(
        other,
        again=[others_more[2] if there else torch.zeros(numel)],
        report=RankReport(late=[0] if there else []),
    )
    context, group, _ = scripted_context(parameters, *PLAN, others=[other_rank])
    step = begun_step(context)
    arrive(context, step, {2: own[2]})
    assert sent_numels(group) == [numel]
    if here:
        arrive(context, step, {2: more[2]})
    arrive(context, step, {1: own[1], 0: own[0]})
    summary = finish(step)
    assert summary.late == ([0] if here or there else [])
    assert sent_numels(group)[3:] == ([numel] if here or there else [])
    if not here and there:
        assert not group.calls[3].given.any()
    total = own[2] + here * more[2], other[2] + there * others_more[2]
    assert_grads(parameters, {0: mean(own[0], other[0]), 1: mean(own[1], other[1]), 2: mean(*total)})


def test_a_second_gradient_before_the_launch_goes_with_the_first() -> None:
    parameters = random_parameters(LARGE_NUMEL, 3)
    own, more, other = (random_grads(parameters) for _ in range(3))
    context, group, _ = scripted_context(parameters, (0, 1), others=[OtherRank(other)])
    step = begun_step(context)
    arrive(context, step, own)
    arrive(context, step, more)
    assert finish(step).late == []
    assert len(group.calls) == 1
    assert_grads(parameters, {slot: mean(own[slot] + more[slot], other[slot]) for slot in own})


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_an_unfrozen_parameter_outside_the_plan_is_reduced_too(here: bool, there: bool) -> None:
    parameters = random_parameters(*SIZES)
    own, other = random_grads(parameters), random_grads(parameters)
    if not there:
        other[2].zero_()
    other_rank = OtherRank(
        {slot: other[slot] for slot in ((0, 1, 2) if there else (0, 1))},
        again=[other[2]],
        report=RankReport(unfrozen=there),
    )
    context, group, _ = scripted_context(parameters, (1,), (0,), others=[other_rank])
    assert context.outside == [2]
    step = begun_step(context)
    arrive(context, step, {0: own[0], 1: own[1]})
    if here:
        parameters[2].grad = own[2].clone()
    else:
        own[2].zero_()
    summary = finish(step)
    assert summary.unfrozen == (here or there)
    assert summary.used == [2, 2, here + there]
    assert sent_numels(group)[2:] == ([2] if here or there else [])
    used = (0, 1, 2) if here or there else (0, 1)
    assert_grads(parameters, {slot: mean(own[slot], other[slot]) for slot in used})


def test_a_frozen_parameter_outside_the_plan_is_left_alone() -> None:
    parameters = random_parameters(*SIZES)
    parameters[2].requires_grad_(False).grad = old = torch.ones_like(parameters[2])
    context, group, _ = scripted_context(parameters, (1,), (0,), others=[OtherRank()])
    assert not run_step(context, random_grads(parameters, 0, 1)).unfrozen
    assert len(group.calls) == 2
    assert parameters[2].grad is old


def test_a_rank_without_inputs_sends_zeros_and_gets_the_average() -> None:
    parameters = random_parameters(*SIZES)
    one, two = random_grads(parameters), random_grads(parameters)
    context, group, _ = scripted_context(parameters, *PLAN, others=[OtherRank(one), OtherRank(two)])
    step = begun_step(context)
    step.contribute_nothing(StepOutcome.NO_INPUTS)
    summary = finish(step)
    assert summary.without_inputs == [0]
    assert not any(call.given[:2].any() for call in group.calls)
    assert_grads(parameters, {slot: (one[slot] + two[slot]) / 3 for slot in one})


def test_the_sum_is_divided_by_the_number_of_ranks_that_the_step_was_given() -> None:
    parameters = random_parameters(*SIZES)
    own = random_grads(parameters)
    gone = OtherRank(report=RankReport(outcome=StepOutcome.NO_INPUTS))
    context, *_ = scripted_context(parameters, *PLAN, others=[gone])
    assert run_step(context, own, ranks=1).without_inputs == [1]
    assert_grads(parameters, own)


def test_a_bucket_that_this_rank_did_not_use_is_skipped_if_asked() -> None:
    parameters = random_parameters(*SIZES)
    own = random_grads(parameters, 1)
    group = ScriptedGroup()
    context = step_context(parameters, group, (2,), (1, 0), skip_unused=True)
    run_step(context, own)
    assert sent_numels(group) == [8 + context.layout.numel]
    assert_grads(parameters, {1: own[1] / 2})


def test_if_another_rank_raised_no_gradient_is_set_for_what_it_did_not_use() -> None:
    parameters = random_parameters(*SIZES)
    raised = OtherRank(report=RankReport(outcome=StepOutcome.RAISED_IN_FORWARD))
    context, *_ = scripted_context(parameters, *PLAN, others=[raised])
    with pytest.raises(PeerError, match=r"rank 1 raised an exception in forward of step 7"):
        run_step(context, random_grads(parameters, 0), number=7)
    assert parameters[1].grad is None


def test_weights_on_some_ranks_only_are_refused() -> None:
    parameters = random_parameters(*SIZES)
    weighted = OtherRank(random_grads(parameters), report=RankReport(weight=2.0))
    context, *_ = scripted_context(parameters, *PLAN, others=[weighted])
    with pytest.raises(WeightsError, match=r"step 4 was weighed on some ranks only.*weight: \[0\]"):
        run_step(context, random_grads(parameters), number=4)


def test_an_exchange_of_one_bucket_at_a_time_gets_the_next_when_one_is_done() -> None:
    parameters = random_parameters(*SIZES)
    futures: list[torch.futures.Future[torch.Tensor]] = []
    buckets = []

    def hook(_: object, bucket: object) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket)
        futures.append(torch.futures.Future())
        return futures[-1]

    context, group, _ = scripted_context(
        parameters, *PLAN, others=[OtherRank()], exchange=lambda group: FutureHookExchange(group, None, hook)
    )
    step = begun_step(context)
    own = random_grads(parameters)
    arrive(context, step, {2: own[2], 1: own[1]})
    assert [bucket.index() for bucket in buckets] == [0]
    futures[0].set_result(buckets[0].buffer() * 2)
    arrive(context, step, {0: own[0]})
    assert [bucket.index() for bucket in buckets] == [0, 1]
    assert group.calls == []
