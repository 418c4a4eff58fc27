"""Mixes around the reducer: hooks that fail, join, mixed precision between steps, fused optimizers."""

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint
from wrappers import be_impatient, equal_on_all

from paceline import (
    DistributedDataParallel,
    MixedPrecision,
    OptionError,
    ShardedOptimizer,
    StepError,
    UnsupportedError,
    hooks,
)
from paceline.hooks.hook import Hook
from paceline.testing import RankPool, run_ranks

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def rows(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def grads(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def trip(*_: object) -> None:
    raise ZeroDivisionError("planned")


# Hooks and errors: ranks left waiting, or killed by gloo.


def raised_and_then(rank: int, where: str) -> str:
    """The rank that raised goes to a barrier before it calls forward again."""
    module = net()
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, allreduce_hook)
    ddp(rows(rank)).sum().backward()
    handle = None
    if rank == 0:
        handle = (
            module.register_forward_pre_hook(trip)
            if where == "forward"
            else module[0].weight.register_hook(trip)
        )
    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
        ddp(rows(rank)).sum().backward()
    if handle is not None:
        handle.remove()
    distributed.barrier()
    return type(caught.value).__name__


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_with_a_hook_word_of_an_exception_does_not_wait_for_the_next_forward(
    pair: RankPool, where: str
) -> None:
    assert pair.run(raised_and_then, where) == ["ZeroDivisionError", "PeerError"]


class FailingHook:
    """Averages; when on, raises as told."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.on = False

    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]
        if self.on and self.how == "call":
            raise LookupError("planned")
        future = allreduce_hook(state, bucket)
        return future.then(lambda _: 1 / 0) if self.on else future


def failing_future(rank: int, cap: float) -> None:
    ddp = DistributedDataParallel(net(), bucket_cap_mb=cap)
    hook = FailingHook("future")
    ddp.register_comm_hook(None, hook)
    ddp(rows(rank)).sum().backward()
    hook.on = rank == 0
    with pytest.raises(RuntimeError):
        ddp(rows(rank)).sum().backward()
    hook.on = False
    ddp.zero_grad()
    ddp(rows(rank)).sum().backward()
    assert equal_on_all(grads(ddp))


@pytest.mark.parametrize("cap", [1e-5, 25.0], ids=["many", "one"])
def test_a_hooks_future_that_fails_on_one_rank(pair: RankPool, cap: float) -> None:
    pair.run(failing_future, cap)


def failing_on_thawed(rank: int, how: str) -> None:
    be_impatient()
    module = net()
    module[2].bias.requires_grad_(False)
    ddp = DistributedDataParallel(module)
    hook = FailingHook(how)

    def only_extra(state, bucket):  # type: ignore[no-untyped-def]
        hook.on = rank == 0 and thawed and bucket.index() >= 1
        return hook(state, bucket)

    thawed = False
    ddp.register_comm_hook(None, only_extra)
    ddp(rows(rank)).sum().backward()
    module[2].bias.requires_grad_(True)
    thawed = True
    with pytest.raises((LookupError, RuntimeError)):
        ddp(rows(rank)).sum().backward()


@pytest.mark.parametrize("how", ["call", "future"])
def test_a_hook_that_fails_on_one_rank_for_a_thawed_parameter(how: str) -> None:
    run_ranks(failing_on_thawed, args=(how,), timeout=20.0)


class TrippingRounds(Hook):
    on = False

    def reduce(self, bucket: Any, group: Any) -> Any:
        yield group.all_reduce(bucket.buffer().div_(group.size))
        if self.on:
            raise LookupError("planned")
        yield group.all_reduce(torch.ones(3))
        return bucket.buffer()


def tripping_rounds(rank: int) -> None:
    be_impatient()
    ddp = DistributedDataParallel(net())
    hook = TrippingRounds()
    ddp.register_comm_hook(None, hook)
    ddp(rows(rank)).sum().backward()
    hook.on = rank == 0
    with pytest.raises(RuntimeError):
        ddp(rows(rank)).sum().backward()


def test_an_own_hook_that_raises_between_its_collectives_on_one_rank() -> None:
    run_ranks(tripping_rounds, timeout=20.0)


def out_of_step(rank: int) -> None:
    """A step of an optimizer in backward fails on one rank, whose count of steps is then one ahead."""
    be_impatient()
    module = net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(module)
    hook = FailingHook("call")
    ddp.register_comm_hook(None, hook)
    ddp(rows(rank)).sum().backward()
    if rank == 0:
        handle = module[0].weight._in_backward_optimizers[0].register_step_pre_hook(trip)
    with contextlib.suppress(ZeroDivisionError):
        ddp(rows(rank)).sum().backward()
    if rank == 0:
        handle.remove()
    hook.on = rank == 0
    with pytest.raises((LookupError, RuntimeError)):
        ddp(rows(rank)).sum().backward()


def test_word_of_a_broken_hook_arrives_after_an_optimizer_in_backward_has_failed() -> None:
    run_ranks(out_of_step, timeout=20.0)


# Join.


def sharded_and_left_out(rank: int) -> None:
    ddp = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(ddp, torch.optim.Adam, lr=0.1)
    ddp._join_config = ddp._join_config._replace(enable=True)
    ddp(rows(rank)).sum().backward()
    with pytest.raises(OptionError, match="the optimizer must join too"):
        optimizer.step()


def test_a_sharded_optimizer_has_to_join_too(pair: RankPool) -> None:
    pair.run(sharded_and_left_out)


def two_in_one_backward(rank: int, count: int) -> str:
    first, second = DistributedDataParallel(net()), DistributedDataParallel(nn.Linear(2, 2))
    said = ""
    try:
        with Join([first, second]):
            for step in range(count if rank else 0):
                second(first(rows(rank, step))).sum().backward()
    except StepError as error:
        said = str(error)
    # Each wrapper by itself still works.
    for ddp in (first, second):
        ddp._join_config = ddp._join_config._replace(enable=False)
    second(first(rows(rank)).detach()).sum().backward()
    assert equal_on_all(grads(second))
    return said


def test_two_wrappers_in_one_backward_under_join_are_refused_on_every_rank(pair: RankPool) -> None:
    exhausted, active = pair.run(two_in_one_backward, 2)
    assert "needs its backward before another wrapper" in active
    assert "rank 1 raised under join a wrapper's forward needs" in exhausted


def strict_and_skipping(rank: int) -> None:
    ddp = DistributedDataParallel(
        net(),
        bucket_cap_mb=1e-5,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        strict=True,
    )
    with ddp.join():
        for step in range(2 + rank):
            ddp.zero_grad()
            ddp(rows(rank, step)).sum().backward()
    assert equal_on_all(list(ddp.parameters()))


def test_a_shadow_skips_no_bucket(pair: RankPool) -> None:
    pair.run(strict_and_skipping)


def divided(rank: int, way: str) -> None:
    module = nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(module, mixed_precision=LOW if way == "mixed" else None)
    if way == "hook":
        ddp.register_comm_hook(None, hooks.average())
    found = []
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            ddp.zero_grad()
            ddp(torch.ones(1, 2)).sum().backward()
            found.append(module.weight.grad.tolist())
    assert found == [[[1.0, 1.0]]] * (1 + rank)


@pytest.mark.parametrize("way", ["mixed", "hook"])
def test_sums_are_divided_by_those_left(pair: RankPool, way: str) -> None:
    pair.run(divided, way)


def odd_passes(rank: int) -> None:
    module = net()
    ddp = DistributedDataParallel(module, mixed_precision=LOW)
    with ddp.join():
        for step in range(3 + 3 * rank):
            if step % 2 == 0:
                ddp.zero_grad()
            with ddp.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                ddp(rows(rank, step)).sum().backward()
    assert all(grad.dtype is torch.float32 and grad.isfinite().all() for grad in grads(ddp))


def test_inputs_that_end_in_an_accumulating_pass_under_mixed_precision(pair: RankPool) -> None:
    pair.run(odd_passes)


# Mixed precision: the low copies are freed while graphs need them, or taken for the parameters.


def want(module: nn.Module, *steps: int) -> list[Tensor]:
    total = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for rank in range(2):
        for step in steps:
            low = copy.deepcopy(module).to(torch.bfloat16)
            low(rows(rank, step).bfloat16()).sum().backward()
            for into, parameter in zip(total, low.parameters(), strict=True):
                into += parameter.grad.float() / 2
    return total


def assert_close(module: nn.Module, wanted: list[Tensor]) -> None:
    for parameter, grad in zip(module.parameters(), wanted, strict=True):
        assert parameter.dtype is torch.float32
        torch.testing.assert_close(parameter.grad, grad, rtol=3e-2, atol=3e-2)


def twice_backward(ddp: Any, rank: int) -> tuple[int, ...]:
    loss = ddp(rows(rank)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return (0, 0)


def two_forwards(ddp: Any, rank: int) -> tuple[int, ...]:
    first, second = ddp(rows(rank)).sum(), ddp(rows(rank, 1)).sum()
    first.backward()
    second.backward()
    return (0, 1)


def failed_evaluation(ddp: Any, rank: int) -> tuple[int, ...]:
    loss = ddp(rows(rank)).sum()
    with torch.no_grad(), pytest.raises(RuntimeError):
        ddp(torch.ones(3, 3))
    loss.backward()
    return (0,)


def checkpointed(ddp: Any, rank: int) -> tuple[int, ...]:
    checkpoint(ddp, rows(rank).requires_grad_(), use_reentrant=False).sum().backward()
    return (0,)


def low_graphs(rank: int, act: Callable[[Any, int], tuple[int, ...]]) -> None:
    module = net()
    before = copy.deepcopy(module)
    steps = act(DistributedDataParallel(module, mixed_precision=LOW), rank)
    assert_close(module, want(before, *steps))


@pytest.mark.parametrize("act", [twice_backward, two_forwards, failed_evaluation, checkpointed])
def test_low_copies_live_as_long_as_graphs_need_them(pair: RankPool, act: Callable[..., Any]) -> None:
    pair.run(low_graphs, act)


def local_steps(ddp: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.no_sync():
        ddp(rows(rank)).sum().backward()
        optimizer.step()


def step_after_a_look(ddp: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(rows(rank)).sum().backward()
    ddp(rows(rank))  # a validation with gradients on, and no backward
    optimizer.step()


def loading_after_a_look(ddp: Any, rank: int) -> None:
    values = {name: torch.full_like(value, 0.5) for name, value in ddp.state_dict().items()}
    ddp(rows(rank))
    ddp.load_state_dict(values)


def fused(ddp: Any, rank: int) -> None:
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    ddp(rows(rank)).sum().backward()


def written(rank: int, act: Callable[[Any, int], None]) -> None:
    module = net()
    before = module[0].weight.detach().clone()
    ddp = DistributedDataParallel(module, mixed_precision=LOW)
    act(ddp, rank)
    ddp.zero_grad()
    ddp(rows(rank)).sum().backward()  # puts the full values back
    assert not torch.equal(module[0].weight, before), "what was written is gone"


@pytest.mark.parametrize("act", [local_steps, step_after_a_look, loading_after_a_look, fused])
def test_what_is_written_to_parameters_stays(pair: RankPool, act: Callable[..., Any]) -> None:
    pair.run(written, act)


def state_after_forward(rank: int) -> None:
    ddp = DistributedDataParallel(net(), mixed_precision=LOW)
    full = copy.deepcopy(ddp.state_dict())
    ddp(rows(rank))
    for name, value in ddp.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value, full[name])


def test_a_state_dict_is_in_full_precision(pair: RankPool) -> None:
    pair.run(state_after_forward)


def shared_by_two(rank: int) -> None:
    first, second = net(), net()
    second[0].weight = first[0].weight
    full = first[0].weight.detach().clone()
    wrappers = [DistributedDataParallel(each, mixed_precision=LOW) for each in (first, second)]
    sum(each(rows(rank)).sum() for each in wrappers).backward()
    assert first[0].weight.untyped_storage().nbytes()
    assert torch.equal(first[0].weight, full)


def wrapped_again(rank: int) -> None:
    module = net()
    full = module[0].weight.detach().clone()
    DistributedDataParallel(module, mixed_precision=LOW)(rows(rank))
    DistributedDataParallel(module, mixed_precision=LOW)(rows(rank)).sum().backward()
    assert module[0].weight.untyped_storage().nbytes()
    assert torch.equal(module[0].weight, full)


def wrapped_again_in_another_type(rank: int) -> None:
    module = net()
    half = MixedPrecision(param_dtype=torch.float16)
    first = DistributedDataParallel(module, mixed_precision=half)
    first(rows(rank)).sum().backward()
    del first
    module.zero_grad()
    before = copy.deepcopy(module)
    second = DistributedDataParallel(module, mixed_precision=LOW)
    second(rows(rank)).sum().backward()
    assert_close(module, want(before, 0))


@pytest.mark.parametrize("act", [shared_by_two, wrapped_again, wrapped_again_in_another_type])
def test_a_parameter_that_was_lowered_by_another_wrapper(pair: RankPool, act: Callable[..., Any]) -> None:
    pair.run(act)


def copied(rank: int, way: str, pending: bool) -> None:
    ddp = DistributedDataParallel(net(), mixed_precision=LOW)
    ddp(rows(rank)).sum().backward()
    ddp.zero_grad()
    if pending:
        ddp(rows(rank))
    if way == "pickle":
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(ddp)
    assert torch.equal(twin.module[0].weight, net()[0].weight)
    twin(rows(rank)).sum().backward()
    assert_close(twin.module, want(net(), 0))


@pytest.mark.parametrize(("way", "pending"), [("pickle", False), ("pickle", True), ("deepcopy", True)])
def test_copies_of_the_wrapper(pair: RankPool, way: str, pending: bool) -> None:
    pair.run(copied, way, pending)


def lost_pass(rank: int) -> None:
    """A weighed pass that fails after an ordinary step: the error must stay the user's."""
    module = net()
    ddp = DistributedDataParallel(module, mixed_precision=LOW)
    ddp(rows(rank)).sum().backward()
    handle = module[0].weight.register_hook(trip)
    with pytest.raises(ZeroDivisionError), ddp.no_sync(), ddp.weigh(2.0):
        ddp(rows(rank)).sum().backward()
    handle.remove()


def test_a_weighed_pass_that_fails(pair: RankPool) -> None:
    pair.run(lost_pass)


# Wrong numbers.


def many_tokens(rank: int) -> None:
    """More than float16 can hold, reduced in float32."""
    module = nn.Linear(1, 1, bias=False)
    policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    ddp = DistributedDataParallel(module, mixed_precision=policy)
    ddp.backward(ddp(torch.full((1, 1), 1.0 + rank)).sum(), weight=70000)
    assert float(module.weight.grad) == 1.5


def test_a_weight_of_many_tokens_under_mixed_precision(pair: RankPool) -> None:
    pair.run(many_tokens)


def weighed_fused(rank: int) -> None:
    ddp = DistributedDataParallel(net())
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    loss = ddp(rows(rank)).sum()
    with pytest.raises(UnsupportedError, match="fused optimizer"):
        ddp.backward(loss, weight=2)
    loss.backward()
    assert equal_on_all(list(ddp.parameters()))


def test_a_fused_optimizer_refuses_weights(pair: RankPool) -> None:
    pair.run(weighed_fused)


class Checkpointed(nn.Module):
    """Two layers and what is between them are recomputed in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.outer = net(), nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def checkpoints_inside(rank: int, reentrant: bool) -> None:
    module, plain = Checkpointed(reentrant=reentrant), Checkpointed(reentrant=reentrant)
    low = DistributedDataParallel(module, mixed_precision=LOW)
    plain.load_state_dict(module.state_dict())
    for step in range(2):
        low.zero_grad()
        low(rows(rank, step).requires_grad_()).sum().backward()
        assert_close(module, want(nn.Sequential(plain.inner, plain.outer), step))
    assert all(parameter.dtype is torch.float32 for parameter in module.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_the_module_under_mixed_precision(pair: RankPool, reentrant: bool) -> None:
    pair.run(checkpoints_inside, reentrant)


def after_join(rank: int) -> None:
    module = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(module)
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(2 + 2 * rank):
            with torch.set_grad_enabled(step % 2 == 0):  # the last one is an evaluation
                loss = ddp(torch.ones(1, 1)).sum()
            if step % 2 == 0:
                loss.backward()
    ddp.zero_grad()
    ddp(torch.full((1, 1), 1.0 + rank)).sum().backward()
    assert float(module.weight.grad) == 1.5


def test_after_join_the_mean_is_over_all_ranks_again(pair: RankPool) -> None:
    pair.run(after_join)


def divided_on_shadows(rank: int, way: str) -> None:
    module = net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1, "momentum": 0.9})
    ddp = DistributedDataParallel(module, mixed_precision=LOW if way == "mixed" else None)
    if way == "hook":
        ddp.register_comm_hook(None, hooks.average())
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(1 + 2 * rank):
            ddp(rows(rank, step)).sum().backward()
    (optimizer,) = module[0].weight._in_backward_optimizers
    assert equal_on_all([optimizer.state[module[0].weight]["momentum_buffer"]])


@pytest.mark.parametrize("way", ["plain", "mixed", "hook"])
def test_a_shadow_gets_the_same_averages_as_those_left(pair: RankPool, way: str) -> None:
    pair.run(divided_on_shadows, way)


def optimizer_raises_with_two(rank: int) -> None:
    modules = [net(), nn.Linear(2, 2)]
    _apply_optimizer_in_backward(torch.optim.SGD, modules[0].parameters(), {"lr": 0.1})
    wrappers = [DistributedDataParallel(each) for each in modules]
    if rank == 0:
        handle = modules[0][0].weight._in_backward_optimizers[0].register_step_pre_hook(trip)
    with contextlib.suppress(ZeroDivisionError):
        wrappers[1](wrappers[0](rows(rank))).sum().backward()
    assert equal_on_all(grads(modules[1]))
    if rank == 0:
        handle.remove()
    modules[1].zero_grad()
    wrappers[1](wrappers[0](rows(rank)).detach()).sum().backward()
    assert modules[1].weight.grad is not None


def test_an_optimizer_that_raises_leaves_other_wrappers_their_step(pair: RankPool) -> None:
    pair.run(optimizer_raises_with_two)


def sparse_result(rank: int) -> str:
    ddp = DistributedDataParallel(net())
    wrong = False

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        future = allreduce_hook(state, bucket)
        return future.then(lambda done: done.value().to_sparse()) if wrong else future

    ddp.register_comm_hook(None, hook)
    wrong = rank == 0
    with pytest.raises(StepError) as caught:
        ddp(rows(rank)).sum().backward()
    wrong = False
    ddp(rows(rank)).sum().backward()
    assert equal_on_all(grads(ddp))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_hooks_result_of_another_layout_on_one_rank(pair: RankPool) -> None:
    mine, theirs = pair.run(sparse_result)
    assert mine.startswith("HookError")
    assert "torch.sparse_coo" in mine
    assert theirs.startswith("PeerError: rank 0 raised")


def last_of_sparse(_: int) -> list[bool]:
    seen: list[bool] = []
    ddp = DistributedDataParallel(nn.ModuleList([nn.Embedding(4, 2, sparse=True) for _ in range(2)]))

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        seen.append(bucket.is_last())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    sum(layer(torch.tensor([1])).sum() for layer in ddp.module).backward()
    return seen


def test_the_last_bucket_is_last_where_all_are_sparse(pair: RankPool) -> None:
    assert pair.run(last_of_sparse) == [[False, True]] * 2
