"""Modules whose parameters are DTensors: tensor parallel inside, data parallel across."""

from typing import Any

import meshes
import pytest
import torch
from meshes import MODELS, data_rank, full, full_grads, parallel, rows, same_on_data_ranks
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline import DistributedDataParallel
from paceline.testing import RankPool


def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, device_mesh=meshes.mesh()["dp"], **options)


def loss(module: nn.Module, data: int, step: int) -> torch.Tensor:
    return module(rows(data, step)).square().mean()


def whole_batch(module: nn.Module, steps: tuple[int, ...]) -> list[torch.Tensor | None]:
    """Gradients of one process on the rows of both data-parallel ranks."""
    module.zero_grad()
    for step in steps:
        for data in (0, 1):
            (loss(module, data, step) / 2).backward()
    return full_grads(module)


def close(ours: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> bool:
    pairs = zip(ours, wanted, strict=True)
    return all(a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-12) for a, b in pairs)


def named(module: nn.Module) -> list[tuple[str, bool]]:
    return [(name, isinstance(each, DTensor)) for name, each in module.named_parameters()]


def trains(_: int, name: str, options: dict[str, Any], optimizer: str) -> list[bool]:
    """Several steps beside one process; what named_parameters has before, during and after forward."""
    ours, oracle = parallel(name), MODELS[name][0]()
    seen: list[list[tuple[str, bool]]] = [named(ours)]
    ours.register_forward_hook(lambda *_: seen.append(named(ours)))
    ddp = wrap(ours, **options)
    optimizers = [getattr(torch.optim, optimizer)(each.parameters(), lr=0.01) for each in (ddp, oracle)]
    right = []
    for step in range(4):
        optimizers[0].zero_grad()
        loss(ddp, data_rank(), step).backward()
        wanted = whole_batch(oracle, (step,))
        right.append(close(full_grads(ours), wanted))
        right.append(same_on_data_ranks([each.grad for each in ours.parameters()]))
        for each in optimizers:
            each.step()
        right.append(same_on_data_ranks(list(ours.parameters())))
    right.append(close([full(each) for each in ours.parameters()], [*oracle.parameters()]))
    right.append(any(is_dtensor for _, is_dtensor in seen[0]) and all(each == seen[0] for each in seen))
    return right


VIEWS = {"gradient_as_bucket_view": True}
SMALL = {"bucket_cap_mb": 0.0001}


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [({}, "SGD"), ({}, "Adam"), (VIEWS, "Adam"), (SMALL, "SGD")],
    ids=["default-SGD", "default-Adam", "views-Adam", "small-SGD"],
)
@pytest.mark.parametrize("name", ["mixed", "uneven", "words"])
def test_gradients_are_those_of_the_whole_batch(
    name: str, options: dict[str, Any], optimizer: str, four: RankPool
) -> None:
    for right in four.run(trains, name, options, optimizer):
        assert all(right), right


def accumulates(_: int, options: dict[str, Any]) -> list[bool]:
    ours, oracle = parallel("mixed"), MODELS["mixed"][0]()
    ddp = wrap(ours, **options)
    right = []
    for start in (0, 3, 6):
        ddp.zero_grad(set_to_none=start == 3)
        with ddp.no_sync():
            loss(ddp, data_rank(), start).backward()
            loss(ddp, data_rank(), start + 1).backward()
        right.append(not same_on_data_ranks([each.grad for each in ours.parameters()]))
        loss(ddp, data_rank(), start + 2).backward()
        right.append(close(full_grads(ours), whole_batch(oracle, (start, start + 1, start + 2))))
    return right


@pytest.mark.parametrize("options", [{}, VIEWS], ids=["default", "views"])
def test_passes_without_sync_accumulate(options: dict[str, Any], four: RankPool) -> None:
    for right in four.run(accumulates, options):
        assert all(right), right


class Branches(nn.Module):
    """Data-parallel ranks may take different branches; one branch nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(MODELS["words"][0]() for _ in range(3))

    def forward(self, x: torch.Tensor, taken: tuple[int, ...]) -> torch.Tensor:
        return sum(self.ways[way](x) for way in taken)


# What the two data-parallel ranks take in each step.
TAKEN = [((0,), (1,)), ((1,), (0,)), ((0,), (0, 1)), ((1,), (1,)), ((0, 1), (0,))]


def branches(_: int, options: dict[str, Any]) -> list[bool]:
    ours, oracle = Branches(), Branches()
    for way in ours.ways:
        meshes.cut(way, "words")
    ddp = wrap(ours, **options)
    never = ours.ways[2].norm.weight
    never.grad = distribute_tensor(torch.full_like(full(never), 3.0), never.device_mesh, never.placements)
    oracle.ways[2].norm.weight.grad = torch.full((meshes.WIDTH,), 3.0, dtype=torch.float64)
    right = []
    for step, taken in enumerate(TAKEN):
        for net in (ours, oracle):
            net.ways[:2].zero_grad()
        ddp(rows(data_rank(), step), taken[data_rank()]).square().mean().backward()
        for data in (0, 1):
            (oracle(rows(data, step), taken[data]).square().mean() / 2).backward()
        right.append(close(full_grads(ours), full_grads(oracle)))
    return right


@pytest.mark.parametrize("options", [{}, VIEWS, SMALL], ids=["default", "views", "small"])
def test_parameters_that_some_ranks_or_all_leave_unused(options: dict[str, Any], four: RankPool) -> None:
    for right in four.run(branches, options):
        assert all(right), right


def weighs(_: int) -> list[bool]:
    """Each data-parallel rank counts by another weight; sums that were cleared in place count no more."""
    ours, oracle = parallel("words"), MODELS["words"][0]()
    ddp = wrap(ours)
    right = []
    for step in range(3):
        with ddp.no_sync():
            ddp.backward(loss(ddp, data_rank(), 7), 5)
        ddp.zero_grad(set_to_none=False)
        ddp.backward(loss(ddp, data_rank(), step), 1 + 2 * data_rank())
        oracle.zero_grad()
        for data in (0, 1):
            (loss(oracle, data, step) * (1 + 2 * data) / 4).backward()
        right.append(close(full_grads(ours), full_grads(oracle)))
    return right


def test_weights_count(four: RankPool) -> None:
    for right in four.run(weighs):
        assert all(right), right


def differentiates_again(_: int) -> list[bool]:
    """A gradient that is part of a graph: nobody writes the average into it."""
    ours = parallel("mixed")
    weight = ours.inner[0].up.weight
    kept: list[torch.Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda each: kept.extend((each.grad, full(each.grad).clone())))
    ddp = wrap(ours)
    loss(ddp, data_rank(), 0).backward(create_graph=True)
    grad, before = kept
    changed = not torch.equal(full(weight.grad), before)
    return [grad.requires_grad, torch.equal(full(grad), before), changed, same_on_data_ranks([weight.grad])]


def test_gradients_of_a_graph_are_left_alone(four: RankPool) -> None:
    for right in four.run(differentiates_again):
        assert all(right), right


def other_plans(_: int) -> list[Any]:
    """Shards of other sizes, so other plans, on tensor-parallel peers: they must talk in one order yet."""
    ours, oracle = parallel("norms"), MODELS["norms"][0]()
    ddp = wrap(ours, bucket_cap_mb=140 / 2**20)
    right: list[Any] = []
    for step in range(4):
        ddp.zero_grad()
        loss(ddp, data_rank(), step).backward()
        right.append(close(full_grads(ours), whole_batch(oracle, (step,))))
    return [*right, ddp._reducer.context.bucket_set.plan.buckets]


def test_peers_with_other_plans_talk_in_one_order(four: RankPool) -> None:
    plans = []
    for *right, plan in four.run(other_plans):
        assert all(right), right
        plans.append(plan)
    assert plans[0] == plans[2] != plans[1] == plans[3]
