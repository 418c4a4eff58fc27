"""Optimizers that step in backward, and all-reduces that are delayed."""

import contextlib
import copy
import functools
from typing import Any

import batches
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from wrappers import equal_on_all, grads, raise_planned, two_layers

from paceline import (
    DistributedDataParallel,
    OptionError,
    UnsupportedError,
)
from paceline.errors import PeerError
from paceline.testing import RankPool

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
OPTIMIZERS = {"sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), "adam": (torch.optim.Adam, {"lr": 0.1})}

rows = functools.partial(batches.rows, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def make(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, **{"bucket_cap_mb": 1e-4, **options})


def assert_same(left: nn.Module, right: nn.Module) -> None:
    for (name, mine), theirs in zip(left.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def in_backward(rank: int, name: str, view: bool, when: str) -> None:
    kind, options = OPTIMIZERS[name]
    plain, stepped = Net().double(), Net().double()
    ordinary = make(plain, gradient_as_bucket_view=view)
    optimizer = kind(ordinary.parameters(), **options)
    if when == "before":
        _apply_optimizer_in_backward(kind, stepped.parameters(), options)
    ddp = make(stepped, gradient_as_bucket_view=view)
    if when == "after":
        _apply_optimizer_in_backward(kind, ddp.parameters(), options)
    for step in range(4):
        for model in (ordinary, ddp):
            # Accumulated first: nothing may step before the synced pass.
            before = copy.deepcopy(model.module)
            with model.no_sync():
                model(rows(rank, 2 * step)).sum().backward()
            assert_same(model.module, before)
            model(rows(rank, 2 * step + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same(plain, stepped)
        assert all(parameter.grad is None for parameter in stepped.parameters())


@VIEWS
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_step_once_gradients_are_averaged(pair: RankPool, name: str, view: bool, when: str) -> None:
    pair.run(in_backward, name, view, when)


def some_parameters(rank: int) -> None:
    net = Net().double()
    _apply_optimizer_in_backward(torch.optim.SGD, net.first.parameters(), {"lr": 0.1})
    ddp = make(net)
    ddp.register_comm_hook(None, bf16_compress_hook)
    before = copy.deepcopy(net)
    ddp(rows(rank, 0)).sum().backward()
    assert not torch.equal(net.first.weight, before.first.weight)
    assert torch.equal(net.last.weight, before.last.weight)
    assert net.first.weight.grad is None
    assert net.last.weight.grad is not None


def test_some_parameters_only_and_with_a_hook(pair: RankPool) -> None:
    pair.run(some_parameters)


def trip(rank: int, _: Tensor) -> None:
    if rank == 0:
        raise ZeroDivisionError


def lost_step(rank: int) -> None:
    net = Net().double()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    ddp = make(net)
    for step in range(4):
        before = copy.deepcopy(net)
        loss = ddp(rows(rank, step)).sum()
        if step == 2:
            handle = net.first.weight.register_hook(functools.partial(trip, rank))
            with pytest.raises((PeerError, ZeroDivisionError)):
                loss.backward()
            handle.remove()
            assert_same(net, before)
        else:
            loss.backward()
            assert not torch.equal(net.first.weight, before.first.weight)
    everyone = [torch.empty_like(net.first.weight) for _ in range(2)]
    distributed.all_gather(everyone, net.first.weight.detach())
    assert torch.equal(*everyone)


def test_nothing_steps_in_a_step_that_a_rank_has_lost(pair: RankPool) -> None:
    pair.run(lost_step)


def fused(rank: int, name: str, chosen: bool) -> None:
    kind, options = OPTIMIZERS[name]
    plain, stepped = Net(), Net()
    ordinary, ddp = make(plain), make(stepped)
    own = [*plain.first.parameters()] if chosen else [*plain.first.parameters(), *plain.last.parameters()]
    optimizer = kind(own, **options)
    theirs = [*stepped.first.parameters(), *([] if chosen else stepped.last.parameters())]
    ddp._register_fused_optim(kind, optim_params=theirs, **options)
    for step in range(4):
        for model in (ordinary, ddp):
            model.zero_grad()
            with model.no_sync():
                model(rows(rank, 2 * step).float()).sum().backward()
            model(rows(rank, 2 * step + 1).float()).sum().backward()
        optimizer.step()
        for (each, mine), other in zip(plain.named_parameters(), stepped.parameters(), strict=True):
            torch.testing.assert_close(mine, other, msg=each)


@pytest.mark.parametrize("chosen", [True, False], ids=["some", "all"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_optimizers(pair: RankPool, name: str, chosen: bool) -> None:
    pair.run(fused, name, chosen)


def refused(rank: int) -> None:
    ddp = make(Net())
    with pytest.raises(OptionError, match=r"of the 3 given, not its own: \[2\]"):
        ddp._register_fused_optim(
            torch.optim.SGD,
            lr=0.1,
            optim_params=[*ddp.module.first.parameters(), *nn.Linear(1, 1, bias=False).parameters()],
        )
    with pytest.raises(ValueError, match="functional"):
        ddp._register_fused_optim(torch.optim.LBFGS, lr=0.1)
    # Neither has left anything behind.
    ddp(rows(rank, 0).float()).sum().backward()
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    with pytest.raises(UnsupportedError, match="can only be called once"):
        ddp.register_comm_hook(None, bf16_compress_hook)


def test_fused_optimizers_of_other_parameters_are_refused(pair: RankPool) -> None:
    pair.run(refused)


def delayed(rank: int, names: list[str], hooked: str, view: bool) -> None:
    plain, late = Net().double(), Net().double()
    named = dict(late.named_parameters())
    with torch.no_grad():
        for parameter in late.parameters():
            parameter.add_(rank)  # the start makes them equal again
    ordinary = make(plain, gradient_as_bucket_view=view)
    ddp = make(
        late,
        gradient_as_bucket_view=view,
        delay_all_reduce_named_params=[(name, named[name]) for name in names],
        param_to_hook_all_reduce=named[hooked],
    )
    for step in range(4):
        for model in (ordinary, ddp):
            model.zero_grad()
            with model.no_sync():
                model(rows(rank, 2 * step)).sum().backward()
            model(rows(rank, 2 * step + 1)).sum().backward()
        for (name, mine), other in zip(plain.named_parameters(), late.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-15)
    last = ddp._reducer.context.bucket_set.plan.buckets[-1]
    assert {ddp._wrapped.params.slots[slot].name for slot in last} == {*names, hooked}


@VIEWS
@pytest.mark.parametrize(
    ("names", "hooked"),
    [
        (["last.weight", "last.bias"], "first.weight"),
        (["first.weight", "unused.bias"], "last.bias"),
        ([name for name, _ in Net().named_parameters()], "first.weight"),
    ],
    ids=["the last layer", "with an unused one", "all"],
)
def test_delayed_parameters_are_averaged_last_together(
    pair: RankPool, names: list[str], hooked: str, view: bool
) -> None:
    pair.run(delayed, names, hooked, view)


def bad_delays(_: int) -> None:
    net = Net()
    with pytest.raises(OptionError, match="go together"):
        make(net, delay_all_reduce_named_params=[("first.weight", net.first.weight)])
    with pytest.raises(OptionError, match=r"others: \['stranger'\]"):
        make(
            net,
            delay_all_reduce_named_params=[("stranger", nn.Parameter(torch.ones(1)))],
            param_to_hook_all_reduce=net.first.weight,
        )


def test_only_own_parameters_can_be_delayed(pair: RankPool) -> None:
    pair.run(bad_delays)


def weighed_fused(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    loss = ddp(batches.rows(rank)).sum()
    with pytest.raises(UnsupportedError, match="fused optimizer"):
        ddp.backward(loss, weight=2)
    loss.backward()
    assert equal_on_all(list(ddp.parameters()))


def test_a_fused_optimizer_refuses_weights(pair: RankPool) -> None:
    pair.run(weighed_fused)


def optimizer_raises_with_two(rank: int) -> None:
    modules = [two_layers(), nn.Linear(2, 2)]
    _apply_optimizer_in_backward(torch.optim.SGD, modules[0].parameters(), {"lr": 0.1})
    wrappers = [DistributedDataParallel(each) for each in modules]
    if rank == 0:
        handle = modules[0][0].weight._in_backward_optimizers[0].register_step_pre_hook(raise_planned)
    with contextlib.suppress(ZeroDivisionError):
        wrappers[1](wrappers[0](batches.rows(rank))).sum().backward()
    assert equal_on_all(grads(modules[1]))
    if rank == 0:
        handle.remove()
    modules[1].zero_grad()
    wrappers[1](wrappers[0](batches.rows(rank)).detach()).sum().backward()
    assert modules[1].weight.grad is not None


def test_an_optimizer_that_raises_leaves_other_wrappers_their_step(pair: RankPool) -> None:
    pair.run(optimizer_raises_with_two)
