"""Manual finalization with lazy buckets on real ranks: with every option, and when a rank makes a mistake."""

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from batches import rows
from manual_steps import assert_right, make, step
from torch import Tensor, distributed, nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint
from wrappers import LOW, Net, equal_on_all, grads, of_whole_batch, refusal, train, two_layers

from paceline import DistributedDataParallel, ShardedOptimizer, hooks
from paceline.errors import StepError
from paceline.testing import RankPool

STEPS = 4


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lazy": {"lazy_bucket_allocation": True},
    "views": {"gradient_as_bucket_view": True},
    "lazy views": {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
    "lazy, static graph": {"lazy_bucket_allocation": True, "static_graph": True},
    "lazy, finds unused": {"lazy_bucket_allocation": True, "find_unused_parameters": True},
    "strict": {"lazy_bucket_allocation": True, "strict": True},
    "one bucket": {"lazy_bucket_allocation": True, "bucket_cap_mb": 25},
    "kept plan": {"lazy_bucket_allocation": True, "rebuild_plan": False},
}
HOOKS: dict[str, Any] = {
    "no hook": None,
    "a hook of torch's": default_hooks.allreduce_hook,
    "a hook of ours": hooks.average(),
}


def with_options(rank: int, options: dict[str, Any], hook: Any) -> None:
    for transport in ("auto", "c10d"):
        ddp = make(transport=transport, **options)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        for number in range(STEPS):
            step(ddp, rank, number)
            assert_right(ddp, number)
        with ddp.no_sync():
            train(ddp, rank, 7)
        ddp(rows(rank, 8).double()).square().mean().backward()
        ddp.finalize_backward()
        net = Net().double()
        want = [a + b for a, b in zip(of_whole_batch(net, 7), of_whole_batch(net, 8), strict=True)]
        torch.testing.assert_close(grads(ddp), want, rtol=1e-12, atol=1e-15)
        # Gradients that nobody clears are added to.
        ddp(rows(rank, 9).double()).square().mean().backward()
        ddp.finalize_backward()
        want = [a + b for a, b in zip(want, of_whole_batch(net, 9), strict=True)]
        torch.testing.assert_close(grads(ddp), want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_those_of_one_process(pair: RankPool, options: str, hook: str) -> None:
    pair.run(with_options, OPTIONS[options], HOOKS[hook])


def low_precision(rank: int) -> None:
    lazy, same = (
        DistributedDataParallel(two_layers(), mixed_precision=LOW, lazy_bucket_allocation=lazy)
        for lazy in (True, False)
    )
    lazy.require_manual_backward_finalization = True
    for number in range(STEPS):
        step(lazy, rank, number)
        assert lazy.should_finalize_after_backward
        train(same, rank, number)
        assert [grad.dtype for grad in grads(lazy)] == [torch.float32] * 4
        for mine, theirs in zip(grads(lazy), grads(same), strict=True):
            assert torch.equal(mine, theirs)


def test_mixed_precision_has_the_same_gradients(pair: RankPool) -> None:
    pair.run(low_precision)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net().double()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, checkpoint(self.inner, x, use_reentrant=True), use_reentrant=True)


def checkpointed(rank: int) -> None:
    ddp = DistributedDataParallel(Checkpointed(), lazy_bucket_allocation=True, bucket_cap_mb=1e-5)
    ddp.require_manual_backward_finalization = True
    plain = Checkpointed()
    for number in range(STEPS):
        ddp.zero_grad()
        ddp(rows(rank, number).double().requires_grad_()).square().mean().backward()
        ddp.finalize_backward()
        plain.zero_grad()
        for each in range(2):
            (plain(rows(each, number).double().requires_grad_()).square().mean() / 2).backward()
        torch.testing.assert_close(grads(ddp), grads(plain), rtol=1e-12, atol=1e-15)


def test_a_module_may_be_checkpointed_twice(pair: RankPool) -> None:
    pair.run(checkpointed)


def joined(rank: int) -> None:
    ddp = make(lazy_bucket_allocation=True)
    with ddp.join():
        for number in range(2 + 2 * rank):
            step(ddp, rank, number)
    assert equal_on_all(list(ddp.parameters()))
    ddp._join_config = ddp._join_config._replace(enable=False)
    step(ddp, rank, 1)
    assert_right(ddp, 1)


def test_ranks_run_out_of_inputs_at_different_times(pair: RankPool) -> None:
    pair.run(joined)


def finalize_in_the_next_step(rank: int, ddp: Any, optimizer: torch.optim.Optimizer, join: Join) -> None:
    with join:
        for number in range(2 + 2 * rank):
            if number:
                ddp.finalize_backward()
            if number > 2:  # the other rank has no inputs
                plain = copy.deepcopy(ddp.module)
                plain.zero_grad()
                (plain(rows(rank, number - 1).double()).square().mean() / 2).backward()
                torch.testing.assert_close(grads(ddp), grads(plain), rtol=1e-12, atol=1e-15)
            optimizer.step()
            optimizer.zero_grad()
            ddp(rows(rank, number).double()).square().mean().backward()


def left_by_join(rank: int, hook: Any, of_torch: bool) -> None:
    ddp = make()
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    join = Join([ddp]) if of_torch else ddp.join()
    with pytest.raises(StepError, match=r"the join block ended before finalize_backward\(\) was called"):
        finalize_in_the_next_step(rank, ddp, optimizer, join)
    assert equal_on_all(list(ddp.parameters()))
    step(ddp, rank, 1)
    optimizer.step()
    assert equal_on_all(list(ddp.parameters()))


@pytest.mark.parametrize(("hook", "of_torch"), [(None, False), (hooks.average(), False), (None, True)])
def test_a_step_that_is_left_at_the_end_of_join_is_refused(pair: RankPool, hook: Any, of_torch: bool) -> None:
    pair.run(left_by_join, hook, of_torch)


def with_pieces(rank: int, first: str) -> None:
    """Two wrappers of one group in one backward, ended in another order on each rank."""
    nets = [two_layers().double(), nn.Linear(2, 2).double()]
    wrapped: list[Any] = [DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1e-5) for net in nets]
    for ddp in wrapped:
        ddp.require_manual_backward_finalization = first == "both" or ddp is wrapped[first == "second"]
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    for number in range(STEPS):
        for net in (*nets, *wrapped):
            net.zero_grad()
        wrapped[1](wrapped[0](rows(rank, number).double())).square().mean().backward()
        waiting = [ddp for ddp in wrapped if ddp.require_manual_backward_finalization]
        for ddp in waiting if rank else reversed(waiting):
            ddp.finalize_backward()
        for each in range(2):
            (nets[1](nets[0](rows(each, number).double())).square().mean() / 2).backward()
        for net, ddp in zip(nets, wrapped, strict=True):
            torch.testing.assert_close(grads(ddp), grads(net), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("manual", ["both", "first", "second"])
def test_wrappers_of_one_backward_may_be_ended_in_any_order(pair: RankPool, manual: str) -> None:
    pair.run(with_pieces, manual)


def alternately(rank: int) -> None:
    """A second wrapper trains while the first one's step has not been ended."""
    first, second = make(), make(lazy_bucket_allocation=True)
    for number in range(STEPS):
        train(first, rank, number)
        train(second, rank, number + 1)
        second.finalize_backward()
        assert_right(second, number + 1)
        first.finalize_backward()
        assert_right(first, number)


def test_another_wrapper_may_train_before_the_step_is_ended(pair: RankPool) -> None:
    pair.run(alternately)


def moved(rank: int) -> None:
    everyone = distributed.new_group([0, 1])
    ddp = make(lazy_bucket_allocation=True)
    step(ddp, rank, 0)
    train(ddp, rank, 1)
    kind, text = refusal(lambda: ddp._update_process_group(everyone)) or ("", "")
    assert kind == "RuntimeError"
    assert "Expected to have finalized" in text
    ddp.finalize_backward()
    ddp._update_process_group(everyone)
    for number in range(STEPS):
        step(ddp, rank, number)
        assert_right(ddp, number)


def test_the_group_may_change_between_steps(pair: RankPool) -> None:
    pair.run(moved)


def copied(rank: int) -> None:
    ddp = make(lazy_bucket_allocation=True)
    step(ddp, rank, 0)
    for other in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert other.require_manual_backward_finalization
        assert other.lazy_bucket_allocation
        for number in range(2):
            step(other, rank, number)
            assert_right(other, number)
    older = pickle.loads(pickle.dumps(DistributedDataParallel(Net())))
    assert not older.require_manual_backward_finalization


def test_copies_are_finalized_manually_too(pair: RankPool) -> None:
    pair.run(copied)


def reduced_meanwhile(rank: int) -> bool:
    """Buckets are reduced while the user does something else."""
    ddp = DistributedDataParallel(nn.Linear(512, 512, bias=False))
    ddp.require_manual_backward_finalization = True
    for number in range(2):
        ddp(rows(rank, number, width=512)).sum().backward()
        (pending,) = ddp._reducer._step.in_flight.launched.values()
        until = time.monotonic() + 10
        while not _is_over(pending) and time.monotonic() < until:
            time.sleep(0.01)
        over = _is_over(pending)
        ddp.finalize_backward()
    return over


def _is_over(pending: Any) -> bool:
    """Whether it has been reduced, without helping it along as ``done`` does."""
    return pending._channel.is_over(pending._launched)


def test_reductions_go_on_while_the_user_does_something_else(pair: RankPool) -> None:
    assert pair.run(reduced_meanwhile) == [True, True]


class Inside(torch.autograd.Function):
    """Ends the step in backward, where no gradient comes any more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ddp: Any, seen: list[bool]) -> Tensor:
        ctx.ddp, ctx.seen = ddp, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.seen.append(ctx.ddp.should_finalize_after_backward)
        if not ctx.seen[-1]:
            ctx.ddp.finalize_backward()
        return grad, None, None


def ended_inside(rank: int) -> list[bool]:
    ddp = make(lazy_bucket_allocation=True)
    seen: list[bool] = []
    for number in range(STEPS):
        ddp.zero_grad()
        x = rows(rank, number).double().requires_grad_()
        ddp(Inside.apply(x, ddp, seen)).square().mean().backward()
        if seen[-1]:
            ddp.finalize_backward()
        assert_right(ddp, number)
    return seen


def test_a_step_may_end_inside_its_backward_once_the_order_is_known(pair: RankPool) -> None:
    assert pair.run(ended_inside) == [[True, False, False, False]] * 2


def with_optimizers(rank: int) -> None:
    """Optimizers in backward step when the step ends; sharded ones are refused until then."""
    net = two_layers()
    _apply_optimizer_in_backward(torch.optim.SGD, net[0].parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(net, lazy_bucket_allocation=True)
    ddp.require_manual_backward_finalization = True
    sharded = ShardedOptimizer(ddp, torch.optim.Adam, lr=0.1)
    for number in range(3):
        before = [each.clone() for each in net.parameters()]
        ddp(rows(rank, number)).sum().backward()
        assert all(map(torch.equal, before, net.parameters()))
        kind, text = refusal(sharded.step) or ("", "")
        assert kind == "RuntimeError"
        assert "ShardedOptimizer.step() called before finalize_backward()" in text
        ddp.finalize_backward()
        assert [torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True)] == [
            False,
            False,
            True,
            True,
        ]
        sharded.step()
        sharded.zero_grad()
        assert equal_on_all(list(net.parameters()))


def test_optimizers_step_after_the_end_of_the_step(pair: RankPool) -> None:
    pair.run(with_optimizers)


def on_one_rank(rank: int) -> None:
    ddp = make()
    ddp.require_manual_backward_finalization = rank == 0
    for number in range(STEPS):
        train(ddp, rank, number)
        if rank == 0:
            ddp.finalize_backward()
        assert_right(ddp, number)


def test_one_rank_alone_may_end_its_steps_manually(pair: RankPool) -> None:
    pair.run(on_one_rank)


def deleted(rank: int) -> None:
    ddp = make()
    step(ddp, rank, 0)
    train(ddp, rank, 1)
    if rank:
        del ddp
    else:
        ddp.finalize_backward()
        assert_right(ddp, 1)
    distributed.barrier()


def test_a_wrapper_may_be_deleted_before_its_step_is_ended(pair: RankPool) -> None:
    pair.run(deleted)


def follow_up_fails(rank: int) -> tuple[Any, Any]:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            assert closure is None
            if rank:
                raise ZeroDivisionError("planned")

    first, second = two_layers(), nn.Linear(2, 2)
    _apply_optimizer_in_backward(Failing, first.parameters(), {"lr": 0.0})
    a, b = DistributedDataParallel(first), DistributedDataParallel(second)
    a.require_manual_backward_finalization = True
    b(a(rows(rank, 0))).square().mean().backward()
    assert equal_on_all([second.weight.grad])
    return refusal(a.finalize_backward), second.weight.grad


def test_what_fails_on_one_rank_after_a_step_does_not_lose_the_next_wrappers(pair: RankPool) -> None:
    (fine, _), (failed, _) = pair.run(follow_up_fails)
    assert (fine, failed) == (None, ("ZeroDivisionError", "planned"))


def nested_in_two_groups(rank: int) -> None:
    inner = make(process_group=distributed.new_group([0, 1]))
    torch.manual_seed(1)
    tail = nn.Linear(4, 2, dtype=torch.float64)
    want = of_whole_batch(nn.Sequential(Net().double(), copy.deepcopy(tail)), 0)
    outer = DistributedDataParallel(nn.Sequential(inner, tail))
    outer.require_manual_backward_finalization = True
    train(outer, rank, 0)
    for wrapper in (outer, inner) if rank else (inner, outer):
        wrapper.finalize_backward()
    torch.testing.assert_close(grads(outer), want, rtol=1e-12, atol=1e-15)


def test_nested_wrappers_in_two_groups_may_be_ended_in_any_order(pair: RankPool) -> None:
    pair.run(nested_in_two_groups)


def around_other_collectives(rank: int, between: str) -> None:
    first = make()
    first.register_comm_hook(None, default_hooks.allreduce_hook)  # its report is one more collective
    other = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4)).double())
    optimizer = ShardedOptimizer(other, torch.optim.SGD, lr=0.1)
    train(first, rank, 0)
    if rank == 0:
        first.finalize_backward()
    if between == "buffers":
        other(rows(rank, 0).double())
    elif between == "wrap":
        DistributedDataParallel(two_layers())
    else:
        optimizer.step()
    if rank == 1:
        first.finalize_backward()
    assert_right(first, 0)


@pytest.mark.parametrize("between", ["buffers", "wrap", "sharded optimizer"])
def test_a_step_may_end_before_or_after_collectives_of_another_wrapper(pair: RankPool, between: str) -> None:
    pair.run(around_other_collectives, between)


def in_a_compiled_function(rank: int) -> None:
    ddp = make()
    end = torch.compile(lambda: ddp.finalize_backward(), backend="eager")
    for number in range(3):
        train(ddp, rank, number)
        end()
        assert_right(ddp, number)


def test_a_compiled_function_may_end_a_step(pair: RankPool) -> None:
    pair.run(in_a_compiled_function)
