"""Join together with hooks, mixed precision, optimizers in backward, sharded optimizers and strict mode."""

import contextlib

import pytest
import torch
from batches import rows
from hook_nets import (
    distance,
)
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import _apply_optimizer_in_backward
from wrappers import LOW, Net, equal_on_all, grads, two_layers

from paceline import (
    DistributedDataParallel,
    MixedPrecision,
    OptionError,
    ShardedOptimizer,
    StepError,
    hooks,
)
from paceline.testing import RankPool, run_ranks


def sharded_and_left_out(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    optimizer = ShardedOptimizer(ddp, torch.optim.Adam, lr=0.1)
    ddp._join_config = ddp._join_config._replace(enable=True)
    ddp(rows(rank)).sum().backward()
    with pytest.raises(OptionError, match="the optimizer must join too"):
        optimizer.step()


def test_a_sharded_optimizer_has_to_join_too(pair: RankPool) -> None:
    pair.run(sharded_and_left_out)


def two_in_one_backward(rank: int, count: int) -> str:
    first, second = DistributedDataParallel(two_layers()), DistributedDataParallel(nn.Linear(2, 2))
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
        two_layers(),
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
    module = two_layers()
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
    module = two_layers()
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


def divides_by_active(rank: int, how: str) -> float:
    options = {"mixed_precision": MixedPrecision(param_dtype=torch.float32)} if how == "precision" else {}
    ddp = DistributedDataParallel(Net(), **options)  # type: ignore[arg-type]
    if how == "hook":
        ddp.register_comm_hook(None, hooks.average())
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(2 if rank == 0 else 1):
            ddp.zero_grad()
            ddp(rows(rank, step)).square().mean().backward()
            if step == 1:
                net = Net()
                net(rows(0, 1)).square().mean().backward()
                found = [p.grad for p in ddp.parameters()]
                return distance(found, [p.grad for p in net.parameters()])  # type: ignore[arg-type, misc]
    return 0.0


@pytest.mark.parametrize("how", ["hook", "precision"])
def test_sums_are_divided_by_the_ranks_that_have_inputs(how: str) -> None:
    off = run_ranks(divides_by_active, 2, args=(how,), timeout=15.0)[0]
    assert off < 1e-6
