"""Optimizer state in shares: the plain optimizer's parameters, bit for bit, with a share of its memory."""

import contextlib
import copy
from typing import Any

import meshes
import pytest
import torch
from batches import rows
from meshes import data_rank, full, parallel
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Join
from wrappers import Net, equal_on_all

from paceline import (
    DistributedDataParallel,
    OptionError,
    ShardedOptimizer,
    ShardError,
)
from paceline.testing import RankPool, run_ranks

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    "AdamW, one by one": (torch.optim.AdamW, {"lr": 0.05, "foreach": False}),
}
STEPS = 5


def twins() -> tuple[DistributedDataParallel, DistributedDataParallel]:
    return DistributedDataParallel(Net()), DistributedDataParallel(Net())


def train(ddp: nn.Module, optimizer: Any, rank: int, steps: range = range(STEPS), clip: bool = False) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(rows(rank, step)).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), f"{name!r} is off by {(mine - other).abs().max():.3g}"
    assert equal_on_all(list(ours.parameters()))


def held(optimizer: Any) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def steps_as_plain(rank: int, name: str, clip: bool) -> None:
    kind, options = OPTIMIZERS[name]
    ours, theirs = twins()
    train(theirs, kind(theirs.parameters(), **options), rank, clip=clip)
    train(ours, ShardedOptimizer(ours, kind, **options), rank, clip=clip)
    assert_equal(ours, theirs)


def refuses_parameters(_: int) -> None:
    parameters: Any = DistributedDataParallel(Net()).parameters()
    with pytest.raises(OptionError, match=r"must be paceline's wrapper.*\(given: generator\)"):
        ShardedOptimizer(parameters, torch.optim.Adam, lr=0.1)


def test_parameters_as_first_argument_are_refused(ranks: RankPool) -> None:
    ranks.run(refuses_parameters)


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_those_of_the_plain_optimizer(ranks: RankPool, name: str, clip: bool) -> None:
    ranks.run(steps_as_plain, name, clip)


def groups_and_schedule(rank: int) -> None:
    ours, theirs = twins()
    optimizers = []
    for ddp in (theirs, ours):
        weights = [p for p in ddp.parameters() if p.ndim > 1]
        biases = [p for p in ddp.parameters() if p.ndim == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases[:1], "lr": 0.2}]
        optimizer = (
            torch.optim.SGD(groups, lr=0.1, momentum=0.5)
            if ddp is theirs
            else ShardedOptimizer(ddp, torch.optim.SGD, groups, lr=0.1, momentum=0.5)
        )
        optimizer.add_param_group({"params": biases[1:], "lr": 0.3})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for step in range(STEPS):
            train(ddp, optimizer, rank, range(step, step + 1))
            schedule.step()
        optimizers.append(optimizer)
    assert_equal(ours, theirs)
    plain, sharded = ([{**g, "params": len(g["params"])} for g in o.param_groups] for o in optimizers)
    assert sharded == plain


def test_parameter_groups_added_later_and_a_scheduler_work(ranks: RankPool) -> None:
    ranks.run(groups_and_schedule)


def memory(rank: int) -> tuple[int, int]:
    ours, theirs = twins()
    plain = torch.optim.Adam(theirs.parameters(), foreach=True)
    sharded = ShardedOptimizer(ours, torch.optim.Adam, foreach=True)
    train(theirs, plain, rank)
    train(ours, sharded, rank)
    return held(sharded), held(plain)


def test_two_ranks_hold_half_of_the_state_each(pair: RankPool) -> None:
    (first, whole), (second, _) = pair.run(memory)
    assert first == second == whole // 2


def saved_and_loaded(rank: int, target: int, into: str) -> None:
    ours, theirs = twins()
    plain = torch.optim.Adam(theirs.parameters(), lr=0.05)
    sharded = ShardedOptimizer(ours, torch.optim.Adam, lr=0.05)
    train(theirs, plain, rank)
    train(ours, sharded, rank)
    sharded.consolidate_state_dict(to=target)
    if rank == target:
        whole = sharded.state_dict()
        _assert_same_state(whole, plain.state_dict())
    else:
        with pytest.raises(ShardError, match="split over the ranks"):
            sharded.state_dict()
    box = [whole if rank == target else None]
    distributed.broadcast_object_list(box, src=target)
    new: Any
    if into == "plain":
        new = torch.optim.Adam(ours.parameters(), lr=1.0)
    else:
        new = ShardedOptimizer(ours, torch.optim.Adam, lr=1.0)
    new.load_state_dict(box[0])
    assert new.param_groups[0]["lr"] == 0.05
    train(theirs, plain, rank, range(STEPS, 2 * STEPS))
    train(ours, new, rank, range(STEPS, 2 * STEPS))
    assert_equal(ours, theirs)


def _assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(ours["state"][number][key], value), f"{number}, {key}"


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("into", ["plain", "sharded"])
def test_a_consolidated_state_loads_into_any_optimizer(ranks: RankPool, target: int, into: str) -> None:
    ranks.run(saved_and_loaded, target, into)


def plain_state_into_shares(rank: int) -> None:
    ours, theirs = twins()
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    train(theirs, plain, rank)
    ours.load_state_dict(theirs.state_dict())
    sharded = ShardedOptimizer(ours, torch.optim.SGD, lr=1.0)
    sharded.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(theirs, plain, rank)
    train(ours, sharded, rank)
    assert_equal(ours, theirs)


def test_a_plain_optimizers_state_can_be_loaded(ranks: RankPool) -> None:
    ranks.run(plain_state_into_shares)


def few(rank: int) -> None:
    """One parameter, so some ranks own nothing; a closure; a loss that comes back."""
    ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    optimizer = ShardedOptimizer(ddp, torch.optim.Adam, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = ddp(rows(rank)).square().mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(3)]
    assert losses[2] < losses[0]
    assert equal_on_all(list(ddp.parameters()))
    assert len(optimizer.state) == (rank == 0)


def test_ranks_that_own_nothing_take_part(ranks: RankPool) -> None:
    ranks.run(few)


def raising(rank: int) -> None:
    ddp = DistributedDataParallel(Net())
    optimizer = ShardedOptimizer(ddp, torch.optim.SGD, lr=0.1)
    train(ddp, optimizer, rank)
    optimizer.zero_grad()
    ddp(rows(rank)).square().mean().backward()
    own = optimizer._local_optimizer
    handle = own.register_step_pre_hook(lambda *_: 1 / 0) if rank == 1 else None
    with pytest.raises(ZeroDivisionError) if handle else contextlib.nullcontext():
        optimizer.step()
    if handle:
        handle.remove()
    train(ddp, optimizer, rank)
    assert equal_on_all(list(ddp.parameters()))


def test_a_step_that_raises_on_one_rank_leaves_ranks_in_step(pair: RankPool) -> None:
    pair.run(raising)


def refused(rank: int) -> None:
    ddp = DistributedDataParallel(Net())
    optimizer = ShardedOptimizer(ddp, torch.optim.Adam)
    with pytest.raises(ShardError, match="consolidate_state_dict"):
        optimizer.state_dict()
    with pytest.raises(OptionError, match=r"to: 9, ranks: 2"):
        optimizer.consolidate_state_dict(to=9)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    train(ddp, optimizer, rank)
    optimizer.consolidate_state_dict()
    train(ddp, optimizer, rank)
    with pytest.raises(ShardError):
        optimizer.state_dict()
    ddp._update_process_group(distributed.new_group())
    with pytest.raises(ShardError, match="another process group"):
        optimizer.step()


def test_wrong_uses_are_refused(pair: RankPool) -> None:
    pair.run(refused)


def share_is_complete(rank: int) -> None:
    """Before the first step, and after one in which the last layer had no gradient."""
    ours, theirs = twins()
    optimizer = ShardedOptimizer(ours, torch.optim.AdamW, lr=0.05)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.05)
    for steps in (0, 1):
        if steps:
            for ddp, each in ((ours, optimizer), (theirs, plain)):
                each.zero_grad()
                ddp.module.first(rows(rank)).square().mean().backward()
                each.step()
        grads = [parameter.grad for parameter in ours.parameters()]
        state = optimizer.share.state_dict()["state"]
        own = [
            parameter for group in optimizer._local_optimizer.param_groups for parameter in group["params"]
        ]
        assert [ours.module.get_parameter(name) for name in state] == own
        assert {name: int(moments["step"]) for name, moments in state.items()} == {
            name: steps if name.startswith("first") else 0 for name in state
        }
        assert all(parameter.grad is grad for parameter, grad in zip(ours.parameters(), grads, strict=True))
        assert_equal(ours, theirs)
    train(ours, optimizer, rank)
    train(theirs, plain, rank)
    assert_equal(ours, theirs)


def test_a_share_includes_state_that_no_step_has_created_yet(ranks: RankPool) -> None:
    ranks.run(share_is_complete)


def accumulates_and_joins(rank: int) -> None:
    ddp = DistributedDataParallel(Net())
    optimizer = ShardedOptimizer(ddp, torch.optim.SGD, lr=0.1)
    with Join([ddp, optimizer]):
        for step in range(4 if rank == 0 else 2):
            with ddp.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                ddp(rows(rank, step)).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert equal_on_all(list(ddp.parameters()))


def test_join_with_accumulation_ends_with_equal_parameters() -> None:
    run_ranks(accumulates_and_joins, 2, timeout=12.0)


def private_parameters(rank: int) -> float:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    nn.init.constant_(net[0].weight, rank + 1.0)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "0.bias"])
    ddp = DistributedDataParallel(net)
    optimizer = ShardedOptimizer(ddp, torch.optim.SGD, lr=0.0)
    ddp(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return float(net[0].weight[0, 0].detach())


def test_ignored_parameters_are_not_broadcast(pair: RankPool) -> None:
    assert pair.run(private_parameters) == [1.0, 2.0]


def closure_raises(rank: int) -> str:
    ddp = DistributedDataParallel(Net())
    optimizer = ShardedOptimizer(ddp, torch.optim.SGD, lr=0.1)

    def closure() -> Tensor:
        loss: Tensor = ddp(rows(rank, 0)).square().mean()
        loss.backward()
        if rank == 1:
            raise ZeroDivisionError
        return loss

    try:
        optimizer.step(closure)
    except ZeroDivisionError:
        return "raised"
    return "stepped"


def test_a_closure_that_raises_on_one_rank_leaves_no_rank_waiting() -> None:
    assert run_ranks(closure_raises, 2, timeout=10.0)[1] == "raised"


def steps_dtensors(_: int, model: str) -> list[bool]:
    mesh = meshes.mesh()["dp"]
    ours, theirs = parallel(model), parallel(model)
    wrapped = [DistributedDataParallel(each, device_mesh=mesh) for each in (ours, theirs)]
    optimizers: list[Any] = [
        ShardedOptimizer(wrapped[0], torch.optim.Adam, lr=0.1),
        torch.optim.Adam(theirs.parameters(), lr=0.1),
    ]
    for step in range(2):
        for ddp, optimizer in zip(wrapped, optimizers, strict=True):
            optimizer.zero_grad()
            ddp(meshes.rows(data_rank(), step)).square().mean().backward()
            optimizer.step()
    return [
        torch.equal(full(a), full(b)) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    ]


@pytest.mark.parametrize("model", ["mixed", "uneven"])
def test_dtensor_parameters_are_those_of_the_plain_optimizer(four: RankPool, model: str) -> None:
    assert all(map(all, four.run(steps_dtensors, model)))
