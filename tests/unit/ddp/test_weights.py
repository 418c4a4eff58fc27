from collections.abc import Sequence

import pytest
import torch
from scripted_steps import (
    GradsBySlot,
    OtherRank,
    arrive,
    assert_grads,
    begun_step,
    finish,
    random_grads,
    random_parameters,
    scripted_context,
    sent_report,
)
from torch import Tensor, nn

from paceline.ddp.buckets.dense import LARGE_NUMEL
from paceline.ddp.reducer.accumulation import Accumulation
from paceline.ddp.reducer.step_context import StepContext
from paceline.ddp.reducer.step_report import RankReport, StepSummary
from paceline.errors import OptionError, UnsupportedError, WeightsError

SIZES = (5, 3, LARGE_NUMEL)
PLAN = ((2,), (1,), (0,))
Pass = tuple[float, GradsBySlot]


def accumulate(
    accumulation: Accumulation, parameters: Sequence[nn.Parameter], weight: float, grads: GradsBySlot
) -> None:
    """A weighted pass that is not synced."""
    with accumulation.weigh(weight):
        accumulation.weights.begin()
        add(parameters, grads)
        accumulation.add(grads)


def fail(accumulation: Accumulation, parameters: Sequence[nn.Parameter], weight: float) -> None:
    """A weighted pass that raises in the midst of its backward."""
    with accumulation.weigh(weight):
        accumulation.weights.begin()
        add(parameters, random_grads(parameters))
        raise ZeroDivisionError


def add(parameters: Sequence[nn.Parameter], grads: GradsBySlot) -> None:
    for slot, grad in grads.items():
        old = parameters[slot].grad
        parameters[slot].grad = grad.clone() if old is None else old + grad


def sync(accumulation: Accumulation, context: StepContext, weight: float, grads: GradsBySlot) -> StepSummary:
    """A weighted pass that is synced, with all that has been accumulated."""
    with accumulation.weigh(weight):
        accumulation.weights.begin()
        slots = [slot for slot, is_left in enumerate(accumulation.slots) if is_left]
        step = begun_step(context, accumulated=slots)
        arrive(context, step, grads)
        summary = finish(step)
    accumulation.clear()
    return summary


def weighted_sum(passes: Sequence[Pass], slot: int) -> Tensor:
    parts = [weight * grads[slot].double() for weight, grads in passes if slot in grads]
    return torch.stack(parts).sum(0)


def average(passes: Sequence[Pass]) -> dict[int, Tensor]:
    """What every rank should have: sum(n * g) / sum(n)."""
    total = sum(weight for weight, _ in passes)
    used = {slot for _, grads in passes for slot in grads}
    return {slot: weighted_sum(passes, slot) / total for slot in used}


def other_rank(*passes: Pass) -> OtherRank:
    """A rank that accumulated these passes."""
    used = {slot for _, grads in passes for slot in grads}
    total = float(sum(weight for weight, _ in passes))
    return OtherRank({slot: weighted_sum(passes, slot) for slot in used}, report=RankReport(weight=total))


def scripted(parameters: Sequence[nn.Parameter], *others: OtherRank) -> tuple[Accumulation, StepContext]:
    accumulation = Accumulation(parameters)
    context, *_ = scripted_context(parameters, *PLAN, others=others, weights=accumulation.weights)
    return accumulation, context


def test_ranks_count_by_their_weights() -> None:
    parameters = random_parameters(*SIZES)
    passes = [(weight, random_grads(parameters)) for weight in (3.0, 1.0, 0.5)]
    accumulation, context = scripted(parameters, other_rank(passes[1]), other_rank(passes[2]))
    assert sync(accumulation, context, *passes[0]).total_weight == 4.5
    assert_grads(parameters, average(passes))


def test_accumulated_passes_count_by_their_weights() -> None:
    parameters = random_parameters(*SIZES)
    here = [
        (weight, random_grads(parameters, *slots)) for weight, *slots in ((3, 0, 1, 2), (2, 1), (7, 0, 2))
    ]
    there = [(weight, random_grads(parameters)) for weight in (5.0, 1.0)]
    accumulation, context = scripted(parameters, other_rank(*there))
    for weight, grads in here[:-1]:
        accumulate(accumulation, parameters, weight, grads)
    assert_grads(parameters, {slot: weighted_sum(here[:2], slot) for slot in range(3)})
    assert sync(accumulation, context, *here[-1]).weights == [12, 6]
    assert_grads(parameters, average([*here, *there]))
    assert not accumulation.weights.has_earlier


def test_gradients_from_before_the_first_pass_are_added_to() -> None:
    parameters = random_parameters(*SIZES)
    old = random_grads(parameters, 0, 2)
    for slot, grad in old.items():
        parameters[slot].grad = grad.clone()
    here = [(2.0, random_grads(parameters)), (4.0, random_grads(parameters, 0))]
    there = (1.0, random_grads(parameters))
    accumulation, context = scripted(parameters, other_rank(there))
    accumulate(accumulation, parameters, *here[0])
    sync(accumulation, context, *here[1])
    wanted = average([*here, there])
    assert_grads(parameters, {slot: wanted[slot] + old.get(slot, 0) for slot in wanted})


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_pass_that_counts_nothing_may_have_nans(accumulates: bool) -> None:
    parameters = random_parameters(*SIZES)
    nans = {slot: torch.full_like(each, torch.nan).detach() for slot, each in enumerate(parameters)}
    there = (2.0, random_grads(parameters, 1, 2))
    here = (3.0, random_grads(parameters, 2))
    accumulation, context = scripted(parameters, other_rank(there))
    if accumulates:
        accumulate(accumulation, parameters, *here)
    summary = sync(accumulation, context, 0, nans)
    assert summary.weights == [3.0 if accumulates else 0.0, 2.0]
    assert summary.used == [0, 1, 2 if accumulates else 1]
    assert_grads(parameters, average([here, there] if accumulates else [there]))


def test_a_nan_of_a_pass_that_counts_nothing_is_not_accumulated() -> None:
    parameters = random_parameters(*SIZES)
    accumulation = Accumulation(parameters)
    first = random_grads(parameters, 0)
    accumulate(accumulation, parameters, 2, first)
    accumulate(accumulation, parameters, 0, {0: torch.full_like(first[0], torch.nan)})
    assert_grads(parameters, {0: 2 * first[0]})


def test_if_all_ranks_count_nothing_gradients_are_zeros() -> None:
    parameters = random_parameters(*SIZES)
    used_without_weight = OtherRank({1: torch.zeros(3, dtype=torch.double)}, report=RankReport(weight=0.0))
    accumulation, context = scripted(parameters, used_without_weight)
    sync(accumulation, context, 0, {1: torch.full((3,), torch.nan, dtype=torch.double)})
    assert_grads(parameters, {1: torch.zeros(3)})


def test_a_large_gradient_is_weighted_once_although_it_is_copied_early() -> None:
    parameters = random_parameters(*SIZES)
    own = random_grads(parameters)
    accumulation, context = scripted(parameters, other_rank((1.0, {})))
    with accumulation.weigh(3):
        accumulation.weights.begin()
        step = begun_step(context)
        arrive(context, step, {0: own[0], 2: own[2]})
        assert parameters[2].grad is None
        assert parameters[0].grad.equal(own[0])
        finish(step)
    group = context.group
    torch.testing.assert_close(group.calls[0].given, 3 * own[2])
    torch.testing.assert_close(group.calls[2].given[:5], 3 * own[0])
    assert sent_report(context, group.calls[2]).weights == [3, None]
    assert_grads(parameters, {0: own[0] * 3 / 4, 2: own[2] * 3 / 4})


def test_a_late_gradient_and_one_outside_the_plan_are_weighted_too() -> None:
    parameters = random_parameters(5, 3, 2)
    own, more, other = random_grads(parameters), random_grads(parameters), random_grads(parameters, 0, 2)
    accumulation = Accumulation(parameters)
    quiet = OtherRank(
        {0: other[0], 2: other[2]}, again=[torch.zeros(2), torch.zeros(3)], report=RankReport(weight=1.0)
    )
    context, *_ = scripted_context(parameters, (2,), (0,), others=[quiet], weights=accumulation.weights)
    with accumulation.weigh(3):
        accumulation.weights.begin()
        step = begun_step(context)
        arrive(context, step, {2: own[2]})
        arrive(context, step, {2: more[2], 0: own[0]})
        parameters[1].grad = own[1].clone()
        summary = finish(step)
    assert summary.late == [0]
    assert summary.unfrozen
    wanted = average([(3.0, {**own, 2: own[2] + more[2]}), (1.0, other)])
    assert_grads(parameters, wanted)


@pytest.mark.parametrize("to_none", [True, False])
def test_cleared_gradients_take_their_weight_along(to_none: bool) -> None:
    parameters = random_parameters(*SIZES)
    here, there = (2.0, random_grads(parameters)), (5.0, random_grads(parameters))
    accumulation, context = scripted(parameters, other_rank(there))
    accumulate(accumulation, parameters, 100, random_grads(parameters))
    for parameter in parameters:
        if to_none:
            parameter.grad = None
        else:
            parameter.grad.zero_()
    assert sync(accumulation, context, *here).weights == [2, 5]
    assert_grads(parameters, average([here, there]))


def test_gradients_of_zeros_that_nobody_cleared_still_count() -> None:
    parameters = random_parameters(*SIZES)
    zeros = {slot: torch.zeros_like(each).detach() for slot, each in enumerate(parameters)}
    accumulation, _ = scripted(parameters, other_rank((1.0, {})))
    accumulate(accumulation, parameters, 4, zeros)
    with accumulation.weigh(1):
        assert accumulation.weights.total == 5


def test_an_exception_in_the_first_pass_leaves_gradients_as_they_were() -> None:
    parameters = random_parameters(*SIZES)
    parameters[0].grad = old = torch.ones_like(parameters[0])
    accumulation = Accumulation(parameters)
    with pytest.raises(ZeroDivisionError):
        fail(accumulation, parameters, 2)
    assert parameters[0].grad is old
    assert_grads(parameters, {0: torch.ones(5)})
    assert not accumulation.is_weighted
    assert not accumulation.weights.has_earlier


def test_an_exception_in_a_later_pass_leaves_the_earlier_sums() -> None:
    parameters = random_parameters(*SIZES)
    here, there = (
        [(2.0, random_grads(parameters)), (3.0, random_grads(parameters))],
        (4.0, random_grads(parameters)),
    )
    accumulation, context = scripted(parameters, other_rank(there))
    accumulate(accumulation, parameters, *here[0])
    with pytest.raises(ZeroDivisionError):
        fail(accumulation, parameters, 50)
    assert_grads(parameters, {slot: 2 * grad for slot, grad in here[0][1].items()})
    assert sync(accumulation, context, *here[1]).weights == [5, 4]
    assert_grads(parameters, average([*here, there]))


def test_an_exception_before_any_backward_changes_nothing() -> None:
    parameters = random_parameters(*SIZES)
    parameters[0].grad = old = torch.ones_like(parameters[0])
    accumulation = Accumulation(parameters)
    with pytest.raises(ZeroDivisionError), accumulation.weigh(2):
        raise ZeroDivisionError
    assert parameters[0].grad is old


def test_a_weighted_pass_after_one_without_a_weight_is_refused() -> None:
    parameters = random_parameters(*SIZES)
    accumulation = Accumulation(parameters)
    add(parameters, grads := random_grads(parameters))
    accumulation.add(grads)
    with pytest.raises(OptionError, match="accumulated without a weight"), accumulation.weigh(1):
        pass
    for parameter in parameters:
        parameter.grad = None
    with accumulation.weigh(1):
        assert accumulation.is_weighted
    assert not any(accumulation.slots)


def test_a_pass_without_a_weight_after_a_weighted_one_is_refused() -> None:
    parameters = random_parameters(*SIZES)
    accumulation = Accumulation(parameters)
    accumulation.refuse_mixed()
    accumulate(accumulation, parameters, 2, random_grads(parameters))
    with pytest.raises(WeightsError, match="earlier passes were weighed and this one is not"):
        accumulation.refuse_mixed()
    with accumulation.weigh(1):
        accumulation.refuse_mixed()
    accumulation.drop()
    accumulation.refuse_mixed()


def test_one_weight_at_a_time() -> None:
    accumulation = Accumulation(random_parameters(*SIZES))
    with (
        accumulation.weigh(2),
        pytest.raises(OptionError, match=r"in force already \(outer: 2.0, inner: 3\)"),
        accumulation.weigh(3),
    ):
        pass


def test_weights_may_be_ruled_out() -> None:
    accumulation = Accumulation(random_parameters(*SIZES))
    accumulation.no_weights = "not with this hook"
    with pytest.raises(UnsupportedError, match="not with this hook"), accumulation.weigh(1):
        pass


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), True, "3", None, torch.tensor(-2.0)])
def test_what_is_no_weight_is_refused(weight: object) -> None:
    accumulation = Accumulation(random_parameters(*SIZES))
    with pytest.raises(OptionError, match="a weight must be"), accumulation.weigh(weight):  # type: ignore[arg-type]
        pass
    assert not accumulation.is_weighted


def test_a_tensor_of_one_element_is_a_weight() -> None:
    accumulation = Accumulation(random_parameters(*SIZES))
    with accumulation.weigh(torch.tensor(3)):  # type: ignore[arg-type]
        assert accumulation.weights.total == 3


@pytest.mark.parametrize("first_is_sparse", [True, False])
def test_sparse_and_dense_passes_add_up(first_is_sparse: bool) -> None:
    (parameter,) = parameters = random_parameters((4, 2))
    dense, sparse = torch.ones(4, 2, dtype=torch.double), torch.eye(4, 2, dtype=torch.double)
    passes = [{0: sparse.to_sparse(1)}, {0: dense}]
    accumulation = Accumulation(parameters)
    for grads in passes if first_is_sparse else reversed(passes):
        accumulate(accumulation, parameters, 2, grads)
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, 2 * (dense + sparse))
