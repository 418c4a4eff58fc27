"""Steps that the user ends: what backward leaves, what ends a step, and what is refused until then."""

import gc
import weakref
from typing import Any

import pytest
import torch
from scripted_reducers import ALL, Rank, assert_weighted_step, assert_works, rows
from scripted_steps import OtherRank, assert_grads, random_grads, sent_report
from torch import Tensor, nn

from paceline.ddp.build import manual_finalization
from paceline.ddp.exchange.generator_hook import GeneratorHookExchange
from paceline.ddp.reducer.manual_finalization import ManualFinalization
from paceline.ddp.reducer.step_report import RankReport, StepOutcome
from paceline.errors import PeerError, StepError, UnsupportedError
from paceline.hooks import average
from paceline.options import CapOptions, WrapperOptions
from paceline.testing import ScriptedGroup

UNFINALIZED = r"Expected to have finalized the prior backward pass.*step: \d, rank: 0"
NOTHING_TO_END = r"no gradient reduction requires finalization.*step: \d, rank: 0"


def finalization_of(this: Rank, **how: Any) -> ManualFinalization:
    options = WrapperOptions(caps=CapOptions(None, None, 1), **how)
    return manual_finalization(this.reducer, options, in_graph=False, required=True)


def manual_rank(*others: OtherRank, **options: Any) -> tuple[Rank, ManualFinalization]:
    this = Rank(*others, **options)
    return this, finalization_of(this)


def taught(**options: Any) -> tuple[Rank, ManualFinalization]:
    """A rank whose first step has taught the order."""
    this, manual = manual_rank(**options)
    this.step(rows(), OtherRank(random_grads(this.parameters)))
    manual.finalize()
    return this, manual


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"lazy_bucket_allocation": True}])
def test_backward_launches_everything_and_finalize_makes_the_averages_grad(options: dict[str, Any]) -> None:
    this, manual = manual_rank(**options)
    for _ in range(4):
        x, other, calls = rows(), random_grads(this.parameters), len(this.group.calls)
        this.step(x, OtherRank(other))
        assert len(this.group.calls) - calls == len(this.reducer.context.bucket_set.buckets)
        assert_grads(this.parameters, {})
        manual.finalize()
        this.assert_mean(this.alone(x), other)
        assert len(this.group.calls) - calls == len(this.reducer.context.bucket_set.buckets)
    assert this.reducer.step_number == 4


def test_a_hooks_report_is_sent_when_the_step_ends() -> None:
    this, manual = manual_rank()
    this.reducer.use(GeneratorHookExchange(this.group, average()))  # type: ignore[arg-type]  # stands in
    for _ in range(3):
        x, other = rows(), random_grads(this.parameters)
        this.step(x, OtherRank(other))
        calls = len(this.group.calls)
        manual.finalize()
        assert len(this.group.calls) == calls + 1
        assert [*sent_report(this.reducer.context, this.group.calls[-1]).used] == [1, 1, 1, 1]
        this.assert_mean(this.alone(x), other)


def test_gradients_that_came_late_or_from_accumulation_are_averaged_too() -> None:
    this, manual = taught()
    x, y, other = rows(), rows(), random_grads(this.parameters)
    this.zero_grad()
    this.accumulate(x)
    this.others.in_next_step(OtherRank(other))
    this.loss(y).backward()
    manual.finalize()
    first, second = this.alone(x), this.alone(y)
    this.assert_mean({slot: first[slot] + second[slot] for slot in ALL}, other)
    assert not any(this.reducer.accumulation.slots)


def test_weights_hold_until_the_step_ends() -> None:
    this, manual = manual_rank()
    for _ in range(2):
        assert_weighted_step(this, finalize=manual.finalize)


def test_a_weighted_step_may_end_inside_its_with_block_and_after_an_exception_there() -> None:
    this, manual = manual_rank()

    def weighted(x: Tensor, *, ends_inside: bool) -> None:
        with this.reducer.weigh(2):
            this.loss(x).backward()
            if ends_inside:
                manual.finalize()
            raise ZeroDivisionError

    for ends_inside in (True, False):
        this.zero_grad()
        x, other = rows(3), random_grads(this.parameters)
        sums = {slot: 4 * grad for slot, grad in other.items()}
        this.others.in_next_step(OtherRank(sums, report=RankReport(weight=4.0)))
        with pytest.raises(ZeroDivisionError):
            weighted(x, ends_inside=ends_inside)
        if not ends_inside:
            manual.finalize()
        own = this.alone(x)
        assert_grads(this.parameters, {slot: (2 * own[slot] + 4 * other[slot]) / 6 for slot in ALL})


def test_finalize_needs_a_synced_backward_each_time() -> None:
    this = Rank()
    manual = manual_finalization(
        this.reducer, WrapperOptions(caps=CapOptions(None, None, 1)), in_graph=False, required=False
    )
    with pytest.raises(StepError, match="manual backward finalization is not required"):
        manual.finalize()
    manual.require(required=True)
    with pytest.raises(StepError, match=NOTHING_TO_END):
        manual.finalize()
    this.accumulate(rows())
    with pytest.raises(StepError, match=NOTHING_TO_END):
        manual.finalize()
    loss = this.loss(rows())
    with pytest.raises(StepError, match=NOTHING_TO_END):
        manual.finalize()
    loss.backward()
    manual.finalize()
    with pytest.raises(StepError, match=NOTHING_TO_END):
        manual.finalize()


def test_until_finalize_nothing_else_can_be_done() -> None:
    this, manual = taught()
    x, other = rows(), random_grads(this.parameters)
    this.zero_grad()
    this.others.in_next_step(OtherRank(other))
    loss = this.loss(x)
    loss.backward(retain_graph=True)
    for refused in (
        loss.backward,
        this.reducer.check_finalized,
        this.reducer.check_finished,
        lambda: this.reducer.use(this.reducer.exchange),
        lambda: this.reducer.move_to(ScriptedGroup()),  # type: ignore[arg-type]  # stands in for a group
    ):
        with pytest.raises(StepError, match=UNFINALIZED):
            refused()
    manual.finalize()
    this.assert_mean(this.alone(x), other)
    this.reducer.check_finished()


def test_an_optimizer_of_these_parameters_waits_for_finalize_and_others_do_not() -> None:
    this, manual = taught()
    own = torch.optim.SGD([*this.net.last.parameters()], lr=0.1)
    another = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    own.step()
    this.step(rows(), OtherRank(random_grads(this.parameters)))
    another.step()
    with pytest.raises(StepError, match=r"SGD\.step\(\) called before finalize_backward.*step: 1, rank: 0"):
        own.step()
    manual.finalize()
    own.step()
    manual.require(required=False)
    this.step(rows(), OtherRank(random_grads(this.parameters)))
    own.step()


def test_the_mode_changes_only_between_steps() -> None:
    this, manual = manual_rank()
    this.accumulate(rows())
    manual.require(required=False)
    manual.require(required=True)
    this.others.in_next_step(OtherRank(random_grads(this.parameters)))
    loss = this.loss(rows())
    match = "cannot be called after forward while a backward pass is expected or in progress"
    with pytest.raises(StepError, match=match):
        manual.require(required=False)
    refused: list[str] = []

    def inside(_: Tensor) -> None:
        with pytest.raises(StepError, match=match):
            manual.require(required=False)
        refused.append("inside")

    hook = this.net.first.weight.register_hook(inside)
    loss.backward()
    hook.remove()
    assert refused == ["inside"]
    with pytest.raises(StepError, match=match):
        manual.require(required=False)
    manual.finalize()
    manual.require(required=False)
    x, other = rows(), random_grads(this.parameters)
    this.step(x, OtherRank(other))
    this.assert_mean(this.alone(x), other)


def test_another_ranks_exception_is_raised_by_finalize_and_the_next_step_works() -> None:
    this, manual = taught()
    this.step(rows(), OtherRank(report=RankReport(outcome=StepOutcome.RAISED_IN_BACKWARD)))
    with pytest.raises(PeerError, match="rank 1 raised an exception in backward of step 1"):
        manual.finalize()
    assert_grads(this.parameters, {})
    with pytest.raises(StepError, match=NOTHING_TO_END):
        manual.finalize()
    manual.require(required=False)
    assert_works(this)


def test_an_exception_in_backward_leaves_nothing_to_end() -> None:
    this, manual = taught()
    this.others.in_next_step(OtherRank())
    loss = this.loss(rows())
    hook = this.net.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    with pytest.raises(StepError, match=NOTHING_TO_END):
        manual.finalize()
    manual.require(required=False)
    assert_works(this)


def test_a_rank_without_inputs_ends_its_steps_itself() -> None:
    this, manual = taught()
    this.zero_grad()
    other = random_grads(this.parameters)
    this.others.in_next_step(OtherRank(other))
    this.reducer.run_empty_step()
    assert_grads(this.parameters, {slot: grad / 2 for slot, grad in other.items()})
    with pytest.raises(StepError, match=NOTHING_TO_END):
        manual.finalize()


def test_it_is_known_after_forward_whether_a_step_may_end_inside_backward() -> None:
    this, manual = manual_rank()
    this.loss(rows())
    assert manual.comes_after_backward  # the order is not known yet
    this, manual = taught()
    this.loss(rows())
    assert not manual.comes_after_backward
    assert finalization_of(taught()[0], mixed_precision=object()).comes_after_backward
    manual._reducer.finalizes_manually = False
    assert not manual.comes_after_backward


def test_a_step_with_unused_or_unfrozen_parameters_ends_after_backward() -> None:
    this, manual = taught()
    this.step(rows(), OtherRank(), skip=True)
    manual.finalize()
    this.loss(rows())
    assert manual.comes_after_backward
    this, manual = taught(frozen="last")
    assert not manual.comes_after_backward
    this.net.last.weight.requires_grad_(True)
    assert manual.comes_after_backward


def test_a_step_that_shares_a_backward_ends_after_it() -> None:
    group = ScriptedGroup()
    first, second = Rank(group=group), Rank(group=group)
    manual = finalization_of(first)
    first.step(rows())
    manual.finalize()
    second.loss(rows())
    first.loss(rows())
    assert manual.comes_after_backward


class Tail(torch.autograd.Function):
    """Calls something in backward, after the gradients of the layers behind it are there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Any) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.act()
        return grad, None


def inside_backward(this: Rank, act: Any) -> Tensor:
    """A loss whose backward calls ``act`` when all gradients have arrived."""
    x = rows().requires_grad_()
    tail = Tail.apply(x, act)  # type: ignore[no-untyped-call]
    this.zero_grad()
    return this.loss(tail), x


def test_a_step_may_end_inside_its_backward() -> None:
    this, manual = taught()
    other = random_grads(this.parameters)
    seen: list[bool] = []

    def end() -> None:
        manual.finalize()
        seen.append(all(each.grad is not None for each in this.parameters))

    loss, x = inside_backward(this, end)
    this.others.in_next_step(OtherRank(other))
    loss.backward()
    assert seen == [True]
    this.assert_mean(this.alone(x.detach()), other)
    with pytest.raises(StepError, match=NOTHING_TO_END):
        manual.finalize()
    manual.require(required=False)
    assert_works(this)


def test_a_step_that_is_not_ready_does_not_end_inside_its_backward() -> None:
    this, manual = taught()
    this.net.last.weight.register_hook(lambda _: manual.finalize())
    loss = this.loss(rows())
    with pytest.raises(StepError, match=r"before all DDP buckets were ready.*'first.weight'.*step: 1"):
        loss.backward()


def test_a_first_step_does_not_end_inside_its_backward() -> None:
    this, manual = manual_rank()
    loss, _ = inside_backward(this, manual.finalize)
    with pytest.raises(StepError, match="a step that has to be finalized after it"):
        loss.backward()


def test_a_gradient_after_the_end_of_its_step_is_refused() -> None:
    this, manual = taught()

    def end_and_go_on() -> None:
        manual.finalize()
        with torch.enable_grad():
            this.net.first.weight.sum().backward()

    loss, _ = inside_backward(this, end_and_go_on)
    this.others.in_next_step(OtherRank(random_grads(this.parameters)))
    with pytest.raises(StepError, match=r"finalize_backward.. had been called in the same backward.*step: 2"):
        loss.backward()
    manual.require(required=False)
    assert_works(this)


@pytest.mark.parametrize("strict", [False, True])
def test_what_torch_cannot_do_is_refused_in_strict_mode(strict: bool) -> None:
    this = Rank(delayed=["last.weight", "last.bias", "first.weight", "first.bias"])
    options = WrapperOptions(caps=CapOptions(None, None, 1), strict=strict)
    manual = manual_finalization(this.reducer, options, in_graph=False, required=False)
    if strict:
        with pytest.raises(UnsupportedError, match="when all DDP parameters use delay_all_reduce"):
            manual.require(required=True)
    else:
        manual.require(required=True)


def test_reductions_in_a_compiled_graph_are_refused() -> None:
    options = WrapperOptions(caps=CapOptions(None, None, 1))
    manual = manual_finalization(Rank().reducer, options, in_graph=True, required=False)
    manual.require(required=False)
    for refused in (manual.finalize, lambda: manual.require(required=True)):
        with pytest.raises(UnsupportedError, match="not supported with the Python reducer"):
            refused()


def test_distributed_autograd_is_refused() -> None:
    this, _ = taught()
    with pytest.raises(UnsupportedError, match="cannot be finalized manually in distributed autograd"):
        this.reducer.begin_distributed()


def test_a_reducer_that_is_gone_leaves_no_hook_on_optimizers() -> None:
    this, manual = taught()
    optimizer = torch.optim.SGD([*this.net.parameters()], lr=0.1)
    this.step(rows(), OtherRank(random_grads(this.parameters)))
    reducer = weakref.ref(this.reducer)
    this.others.context = lambda: None  # type: ignore[assignment,return-value]
    del this, manual
    gc.collect()
    assert reducer() is None
    optimizer.step()


def test_a_reducer_whose_lost_step_nobody_finalizes_is_not_kept() -> None:
    this, manual = taught()
    this.step(rows(), OtherRank(report=RankReport(outcome=StepOutcome.RAISED_IN_BACKWARD)))
    error = this.reducer.turns.finish_launched()
    assert isinstance(error, PeerError)
    reducer = weakref.ref(this.reducer)
    this.others.context = lambda: None  # type: ignore[assignment,return-value]
    del this, manual, error
    gc.collect()
    assert reducer() is None
