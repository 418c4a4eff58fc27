"""What a step costs in collectives of the process group, counted by torch's profiler, not by us."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint
from wrappers import collectives

from paceline import (
    DistributedDataParallel,
)
from paceline.testing import RankPool, run_ranks


class Choosy(nn.Module):
    """Uses another part on each rank, and a third on none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[self.rank](self.shared(x))


def step(ddp: nn.Module) -> None:
    ddp.zero_grad()
    ddp(torch.randn(3, 4)).sum().backward()


def each_step(rank: int, steps: int) -> list[dict[str, int]]:
    ddp = DistributedDataParallel(Choosy(rank), transport="c10d")
    return [dict(collectives(lambda: step(ddp))) for _ in range(steps)]


def test_a_step_is_one_reduction_a_bucket_whatever_each_rank_uses(pool: RankPool) -> None:
    # The first step teaches the plan, the second adopts it: no collective is added for either.
    assert pool.run(each_step, 4) == [[{"gloo:all_reduce": 1}] * 4] * 2


class Recomputed(nn.Module):
    """The first gradients of a backward arrive in inner ones, of re-entrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=True)
        return x


def each_recomputed_step(_: int) -> list[dict[str, int]]:
    ddp = DistributedDataParallel(Recomputed(), transport="c10d")
    return [dict(collectives(lambda: step(ddp))) for _ in range(4)]


def test_a_step_ends_with_the_outermost_backward(pool: RankPool) -> None:
    assert pool.run(each_recomputed_step) == [[{"gloo:all_reduce": 1}] * 4] * 2


def each_weighed_step(rank: int) -> list[dict[str, int]]:
    ddp = DistributedDataParallel(Choosy(rank), transport="c10d")

    def act() -> None:
        with ddp.no_sync(), ddp.weigh(2):
            step(ddp)
        with ddp.weigh(rank):
            ddp(torch.randn(3, 4)).sum().backward()

    return [dict(collectives(act)) for _ in range(3)]


def test_weights_and_accumulation_add_no_collective(pool: RankPool) -> None:
    assert pool.run(each_weighed_step) == [[{"gloo:all_reduce": 1}] * 3] * 2


def per_bucket(rank: int) -> dict[str, int]:
    ddp = DistributedDataParallel(Choosy(rank), bucket_cap_mb=1e-5, transport="c10d")
    for _ in range(2):
        step(ddp)
    assert len(ddp._reducer.context.bucket_set.buckets) == 10
    return dict(collectives(lambda: step(ddp)))


def test_there_is_one_reduction_a_bucket(pool: RankPool) -> None:
    assert pool.run(per_bucket) == [{"gloo:all_reduce": 10}] * 2


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("count", torch.zeros(()))
        self.counts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.count += 1
        return self.layer(x) * self.mask


def broadcasts(_: int) -> list[int]:
    net = Normed()
    ddp = DistributedDataParallel(net, transport="c10d")
    constant = [collectives(lambda: step(ddp))["gloo:broadcast"] > 0 for _ in range(6)]
    net.counts = True
    changing = [collectives(lambda: step(ddp))["gloo:broadcast"] > 0 for _ in range(3)]
    return constant + changing


def test_buffers_that_stay_the_same_are_broadcast_no_more_until_they_change(pool: RankPool) -> None:
    constant = [True] * 3 + [False] * 3
    # The first change is seen at the end of its step.
    changing = [False, True, True]
    assert pool.run(broadcasts) == [constant + changing] * 2


def with_a_hook(rank: int) -> list[dict[str, int]]:
    ddp = DistributedDataParallel(Choosy(rank), transport="c10d")
    ddp.register_comm_hook(None, averaging)
    return [dict(collectives(lambda: step(ddp))) for _ in range(3)]


def averaging(_: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer().div_(2)
    work = torch.distributed.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_a_hook_has_the_bucket_to_itself_and_the_waybill_goes_beside_it(pool: RankPool) -> None:
    assert pool.run(with_a_hook) == [[{"gloo:all_reduce": 2}] * 3] * 2


def overlapped(_: int) -> list[int]:
    """How many reductions had been launched when the first layer's gradient was computed."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    ddp = DistributedDataParallel(layers, bucket_cap_mb=0.01, transport="c10d")
    launched = []
    layers[0].weight.register_hook(lambda _: launched.append(ddp._reducer.launched))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(3, 64)).sum().backward()
    return launched


def test_from_the_second_step_on_buckets_leave_while_backward_runs() -> None:
    for launched in run_ranks(overlapped):
        first, *others = launched
        assert first == 0
        assert min(others) >= 4


@pytest.mark.parametrize("rebuild", [True, False])
def test_the_plan_follows_the_order_of_arrival_unless_switched_off(pool: RankPool, rebuild: bool) -> None:
    order = ["last", "first"] if rebuild else ["first", "last"]
    assert pool.run(planned, rebuild) == [order] * 2


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4))
        self.last = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.first).sin() * self.last


def planned(_: int, rebuild: bool) -> list[str]:
    ddp = DistributedDataParallel(Two(), rebuild_plan=rebuild, transport="c10d")
    for _ in range(2):
        step(ddp)
    (bucket,) = ddp._reducer.context.bucket_set.buckets
    return [slot.name for slot in bucket.slots]


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
