"""Several hosts: each reduces in shared memory, and what its ranks have in common goes to the others."""

import os
from collections.abc import Iterator
from typing import Any

import batches
import pytest
import torch
from hook_nets import (
    BOUNDS,
    HOOKS,
    SHAPES,
    STEPS,
    Given,
    check_equal_on_all_ranks,
    distance,
    everyones,
    gradients,
    largest,
    mean,
    run_step,
)
from torch import Tensor, distributed, nn

from paceline import DistributedDataParallel, hooks
from paceline.comm.shm.local_ranks import HOST_VARIABLE
from paceline.testing import RankPool

LAYOUTS = {"two and two": "aabb", "three and one": "aaab", "three hosts, mixed": "abcba"}


class Split:
    """Ranks that count as those of several hosts."""

    def __init__(self, layout: str, pool: RankPool) -> None:
        self.layout = layout
        self._pool = pool

    def run(self, fn: Any, *args: Any) -> list[Any]:
        return self._pool.run(on_host, self.layout, fn, args)


def on_host(rank: int, layout: str, fn: Any, args: Any) -> Any:
    os.environ[HOST_VARIABLE] = layout[rank]
    return fn(rank, *args)


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=[*LAYOUTS])
def split(request: pytest.FixtureRequest) -> Iterator[Split]:
    with RankPool(len(request.param), timeout=30.0) as pool:
        yield Split(request.param, pool)


@pytest.fixture(scope="module")
def twice_two() -> Iterator[Split]:
    with RankPool(4, timeout=30.0) as pool:
        yield Split("aabb", pool)


def wrap(net: nn.Module, hook: hooks.Hook | None = None, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(net, **{"bucket_cap_mb": 0.003, **options})
    assert ddp._group.shared is not None
    assert ddp._group.shared.hosts > 1
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    return ddp


class Net(nn.Module):
    """Large and small parameters, one that some ranks leave out, and buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(8, 1200)
        self.norm = nn.BatchNorm1d(1200)
        self.narrow = nn.Linear(1200, 3)
        self.rare = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(3))
        self.double()

    def forward(self, x: Tensor, *, rare: bool = True) -> Tensor:
        hidden = self.narrow(self.wide(x).tanh())
        return hidden * self.rare if rare else hidden


def rows_of(rank: int) -> Tensor:
    """One row more than the rank before."""
    return batches.rows(rank, count=rank + 1, width=8, dtype=torch.float64)


def weighed(rank: int) -> list[Tensor]:
    ddp = wrap(Net())
    alone = Net()
    world = distributed.get_world_size()
    whole = torch.cat([rows_of(other) for other in range(world)])
    for _ in range(3):  # in one bucket, then in several
        ddp.zero_grad()
        alone.zero_grad()
        x = rows_of(rank)
        ddp.backward(ddp(x, rare=rank != 1).square().sum(1).mean(), weight=len(x))
        losses = [
            alone(rows_of(other), rare=other != 1).square().sum(1).sum() / len(whole)
            for other in range(world)
        ]
        torch.stack(losses).sum().backward()
        for (name, ours), theirs in zip(ddp.module.named_parameters(), alone.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None, name
            else:
                torch.testing.assert_close(ours.grad, theirs.grad, msg=name, rtol=1e-12, atol=1e-14)
        check_equal_on_all_ranks([p.grad for p in ddp.parameters() if p.grad is not None])
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def test_gradients_are_those_of_one_process_on_all_rows(split: Split) -> None:
    first, second = split.run(weighed), split.run(weighed)
    for one, other in zip(first[0], second[0], strict=True):
        assert torch.equal(one, other), "two runs have different bits"


def joined(rank: int) -> None:
    ddp = wrap(Net())
    world = distributed.get_world_size()
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(2 + rank):
            ddp.zero_grad()
            ddp(rows_of(rank)).square().mean().backward()
            alone = Net()
            left = [other for other in range(world) if 2 + other > step]
            torch.stack([alone(rows_of(other)).square().mean() for other in left]).mean().backward()
            for ours, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
                if theirs.grad is not None:
                    torch.testing.assert_close(ours.grad, theirs.grad)


def test_ranks_that_have_no_inputs_left_are_left_out(twice_two: Split) -> None:
    twice_two.run(joined)


def buffers(rank: int) -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    ddp = wrap(net)
    for _ in range(2):
        ddp(torch.randn(8, 4, dtype=torch.float64) + rank).sum().backward()
    with torch.no_grad():
        ddp(torch.randn(8, 4, dtype=torch.float64))
    source = distributed.get_world_size() - 1
    ddp._distributed_broadcast_coalesced(list(net.buffers()), 1 << 20, source)
    check_equal_on_all_ranks([buffer.to(torch.float64) for buffer in net.buffers()])
    shared = [torch.full((4,), float(rank), dtype=torch.float64)]
    ddp._distributed_broadcast_coalesced(shared, 1 << 20, source)
    assert shared[0].tolist() == [source] * 4


def test_buffers_come_from_any_rank(split: Split) -> None:
    split.run(buffers)


# Hooks run between hosts, on what those have in common.


def some_steps(rank: int) -> None:
    for name, make in HOOKS.items():
        ddp = wrap(Given(), make())
        for step in range(3):
            found = run_step(ddp, gradients(rank, step=step))
            check_equal_on_all_ranks(found)
            if step == 0 and name in BOUNDS:
                given = everyones(step)
                # With three hosts averages are rounded once more.
                assert distance(found, mean(given)) <= 2 * BOUNDS[name] * largest(given), name


def other_types(rank: int) -> None:
    for dtype, error in ((torch.complex64, 1e-6), (torch.float16, 2e-3), (torch.float64, 1e-14)):
        ddp = wrap(Given(dtype=dtype), hooks.average())
        found = run_step(ddp, gradients(rank, dtype=dtype))
        assert distance(found, mean(everyones(dtype=dtype))) < error, dtype


def test_gradients_of_other_types_are_sent_between_hosts_under_a_hook(twice_two: Split) -> None:
    twice_two.run(other_types)


def test_steps_under_hooks_are_the_same_on_every_rank(split: Split) -> None:
    split.run(some_steps)


def many_steps(rank: int, name: str) -> None:
    ddp = wrap(Given(), HOOKS[name]())
    total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    wanted = mean(everyones())
    errors = []
    for step in range(1, STEPS[name] + 1):
        for sum_, grad in zip(total, run_step(ddp, gradients(rank)), strict=True):
            sum_ += grad
        errors.append(distance([sum_ / step for sum_ in total], wanted))
    assert errors[-1] <= max(0.25 * errors[0], 1e-6)


@pytest.mark.parametrize("name", ["int8", "top_k", "power_sgd"])
def test_what_is_lost_between_hosts_is_made_up_for(split: Split, name: str) -> None:
    split.run(many_steps, name)


def weighed_steps(rank: int, name: str) -> None:
    ddp = wrap(Given(), HOOKS[name]())
    weights = [float(other + 1) for other in range(distributed.get_world_size())]
    wanted = [
        sum(weight * grad.double() for weight, grad in zip(weights, each, strict=True)) / sum(weights)
        for each in zip(*everyones(), strict=True)
    ]
    total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    errors = []
    for step in range(1, STEPS[name] + 1):
        ddp.zero_grad()
        # Every other step counts ten times as much on every rank, which changes nothing.
        ddp.backward(ddp(gradients(rank)), weight=weights[rank] * (1 if step % 2 else 10))
        for sum_, parameter in zip(total, ddp.parameters(), strict=True):
            sum_ += parameter.grad
        errors.append(distance([sum_ / step for sum_ in total], wanted))
    assert errors[-1] <= max(0.25 * errors[0], 1e-6)


@pytest.mark.parametrize("name", ["int8", "power_sgd"])
def test_weights_count_between_hosts_as_well(twice_two: Split, name: str) -> None:
    twice_two.run(weighed_steps, name)


def on_one_host(rank: int) -> None:
    for name, make in HOOKS.items():
        ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.003)
        ddp.register_comm_hook(None, make())
        for step in range(2):
            found = run_step(ddp, gradients(rank, step=step))
            assert distance(found, mean(everyones(step))) < 1e-6, name
            check_equal_on_all_ranks(found)


def test_on_one_host_nothing_is_compressed(pair: RankPool) -> None:
    pair.run(on_one_host)


class Seen(hooks.Hook):
    """Notes among how many it runs."""

    def __init__(self, *, between_hosts: bool) -> None:
        self.between_hosts = between_hosts
        self.sizes: list[int] = []
        self._average = hooks.average()

    def reduce(self, bucket: Any, group: Any) -> Any:
        self.sizes += [group.size, bucket.buffer().numel()]
        return self._average.reduce(bucket, group)


def sizes(rank: int, between_hosts: bool, transport: str) -> list[int]:
    hook = Seen(between_hosts=between_hosts)
    ddp = DistributedDataParallel(Given([(300, 400), (400, 300)]), transport=transport)
    ddp.register_comm_hook(None, hook)
    run_step(ddp, gradients(rank, shapes=[(300, 400), (400, 300)]))
    return hook.sizes


def test_each_host_leader_reduces_a_part(twice_two: Split) -> None:
    assert twice_two.run(sizes, True, "auto") == [[2, 120_000]] * 4


@pytest.mark.parametrize(("between_hosts", "transport"), [(False, "auto"), (True, "c10d")])
def test_other_hooks_and_those_over_c10d_run_among_all_ranks(
    twice_two: Split, between_hosts: bool, transport: str
) -> None:
    assert twice_two.run(sizes, between_hosts, transport) == [[4, 240_000]] * 4


def local_sgd(rank: int) -> None:
    hook = hooks.post_local_sgd(start_step=1, period=2)
    ddp = wrap(Given(), hook)
    assert distance(run_step(ddp, gradients(rank)), mean(everyones())) < 1e-6
    assert distance(run_step(ddp, gradients(rank)), gradients(rank)) == 0
    run_step(ddp, gradients(rank))
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.fill_(rank)
    assert hook.average_parameters(ddp.parameters())
    assert all((parameter == 1.5).all() for parameter in ddp.parameters())


def test_post_local_sgd_averages_over_all_ranks(twice_two: Split) -> None:
    twice_two.run(local_sgd)


class Wrong(hooks.Hook):
    """Returns something else on one rank, in one step."""

    between_hosts = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps = 0

    def begin(self, weight: float | None) -> None:  # noqa: ARG002
        self._steps += 1

    def reduce(self, bucket: Any, group: Any) -> Any:
        result = yield from hooks.average().reduce(bucket, group)
        return result[:1] if self._rank == 2 and self._steps == 2 else result


def mistaken(rank: int) -> None:
    ddp = wrap(Given(), Wrong(rank))
    for step in range(4):
        if step == 1:
            with pytest.raises(RuntimeError, match=r"a hook must return|rank 2 raised"):
                run_step(ddp, gradients(rank))
        else:
            assert distance(run_step(ddp, gradients(rank)), mean(everyones())) < 1e-6


def test_a_hooks_mistake_on_one_rank_is_everyones(twice_two: Split) -> None:
    twice_two.run(mistaken)
