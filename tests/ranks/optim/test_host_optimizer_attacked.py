"""What broke a HostOptimizer once: parameters stepped twice, state that was old, memory that stayed."""

import copy
import gc
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import rows
from torch import Tensor, nn
from wrappers import equal_on_all

from paceline import (
    DistributedDataParallel,
    HostOptimizer,
    OptionError,
    ShardError,
    StepError,
    UnsupportedError,
    WrapError,
)
from paceline.testing import RankPool, run_ranks

WIDTH = 190


class Wide(nn.Module):
    """A matrix that is cut, and parameters that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, WIDTH)
        self.cut = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def train(ddp: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(rows(rank, step)).square().mean().backward()
        optimizer.step()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), f"{name!r} is off by {(mine - other).abs().max():.3g}"
    assert equal_on_all([each.detach().clone() for each in ours.parameters()])


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(Wide())


def plain_afterwards(rank: int, how: str) -> None:
    theirs, module = wrapped(), Wide()
    ours = DistributedDataParallel(module)
    if how == "a wrong option":
        with pytest.raises(ValueError, match="Invalid learning rate"):
            HostOptimizer(ours, torch.optim.SGD, lr=-1.0)
    else:
        host = HostOptimizer(ours, torch.optim.SGD, lr=0.1)
        train(ours, host, rank, range(2))
        with pytest.raises(WrapError, match="parameters in memory that ranks share"):
            DistributedDataParallel(module)
        del host, ours
        ours = DistributedDataParallel(module)
        assert type(module.first.weight) is nn.Parameter
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    train(theirs, plain, rank, range(2 if how == "a wrong option" else 4))
    first = 0 if how == "a wrong option" else 2
    train(ours, torch.optim.SGD(ours.parameters(), lr=0.1), rank, range(first, first + 2))
    assert_same(ours, theirs)


@pytest.mark.parametrize("how", ["a wrong option", "wrapped anew"])
def test_a_plain_optimizer_has_parameters_of_its_own_again(pair: RankPool, how: str) -> None:
    pair.run(plain_afterwards, how)


def other_storage(rank: int) -> None:
    ddp = wrapped()
    host = HostOptimizer(ddp, torch.optim.SGD, lr=0.1)
    train(ddp, host, rank, range(1))
    if rank == 1:  # as a queue of torch.multiprocessing does
        ddp.module.first.weight.detach().untyped_storage().share_memory_()
    with pytest.raises(StepError, match=r"on rank 1, 'first.weight' was given other memory"):
        train(ddp, host, rank, range(1))
    with host.writing():
        pass
    train(ddp, host, rank, range(2))
    assert equal_on_all([each.detach().clone() for each in ddp.parameters()])


def test_a_storage_that_moves_is_noticed(pair: RankPool) -> None:
    pair.run(other_storage)


def nested(rank: int) -> None:
    ddp = wrapped()
    host = HostOptimizer(ddp, torch.optim.SGD)
    before = ddp.module.first.weight.detach().clone()
    with host.writing():
        ddp.load_state_dict(copy.deepcopy(ddp.state_dict()))
        ddp.module.first.weight.data.mul_(0.5)
    assert torch.equal(ddp.module.first.weight, 0.5 * before)
    train(ddp, host, rank, range(1))


def test_blocks_inside_each_other_count_once(pair: RankPool) -> None:
    pair.run(nested)


def moved_alone(rank: int) -> None:
    ddp = wrapped()
    host = HostOptimizer(ddp, torch.optim.SGD)
    ddp.module.first.weight.data.mul_(0.5)  # nobody else has it
    train(ddp, host, rank, range(1))
    ddp.module.first.weight.data = torch.zeros(WIDTH, 4)
    with pytest.raises(StepError, match=r"'first.weight' was given other memory"):
        host.step()


def test_one_rank_notices_other_memory_too() -> None:
    run_ranks(moved_alone, 1, timeout=60.0)


def resets(rank: int, how: str) -> None:
    theirs, ours = wrapped(), wrapped()
    plain = torch.optim.Adam(theirs.parameters(), lr=0.01)
    host: Any = HostOptimizer(ours, torch.optim.Adam, lr=0.01)
    for ddp, optimizer in ((theirs, plain), (ours, host)):
        train(ddp, optimizer, rank, range(3))
        if how == "other state":
            optimizer.state = defaultdict(dict)
        elif how == "cleared":
            optimizer.state.clear()
        else:
            optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
        train(ddp, optimizer, rank, range(3, 5))
    assert_same(ours, theirs)
    torch.testing.assert_close(host.state_dict()["state"], plain.state_dict()["state"], rtol=0, atol=0)


@pytest.mark.parametrize("how", ["other state", "cleared", "other groups"])
def test_what_users_do_to_state_and_groups_counts(pair: RankPool, how: str) -> None:
    pair.run(resets, how)


def late_reader(rank: int) -> None:
    ddp = wrapped()
    host = HostOptimizer(ddp, torch.optim.Adam)
    train(ddp, host, rank, range(2))
    other = copy.deepcopy(host.state_dict())
    for values in other["state"].values():
        values["exp_avg"].fill_(7.0)
    time.sleep(0.3 if rank == 0 else 0.0)
    saved = host.state_dict()
    host.load_state_dict(other)
    assert not any((values["exp_avg"] == 7).any() for values in saved["state"].values())
    assert all((values["exp_avg"] == 7).all() for values in host.state_dict()["state"].values())


def test_a_state_is_read_before_another_one_is_loaded(pair: RankPool) -> None:
    pair.run(late_reader)


def bad_input(rank: int) -> None:
    theirs, ours = wrapped(), wrapped()
    plain = torch.optim.Adam(theirs.parameters())
    host = HostOptimizer(ours, torch.optim.Adam)
    train(theirs, plain, rank, range(2))
    train(ours, host, rank, range(2))
    good = copy.deepcopy(host.state_dict())
    bad = copy.deepcopy(good)
    bad["state"] = {0: 5}
    with pytest.raises(OptionError, match=r"entries that are no dicts \(keys: \[0\]\)"):
        host.load_state_dict(bad)
    with pytest.raises(OptionError, match="parameters that the wrapper averages"):
        host.add_param_group({"params": torch.zeros(2, requires_grad=True)})
    host.load_state_dict(good)
    train(theirs, plain, rank, range(2, 4))
    train(ours, host, rank, range(2, 4))
    assert_same(ours, theirs)
    torch.testing.assert_close(host.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_after_bad_input_it_goes_on(pair: RankPool) -> None:
    pair.run(bad_input)


class Custom(torch.optim.Optimizer):
    """Momentum, with the habits of various authors."""

    def __init__(self, params: Any, lr: float = 0.1, habit: str = "") -> None:
        super().__init__(params, {"lr": lr, "habit": habit})
        self.held: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or (group["habit"] == "asks" and not p.requires_grad):
                    continue
                state = self.state[p]
                before = state.get("momentum", torch.zeros_like(p))
                momentum = before.mul(0.9).add(p.grad)
                if group["habit"] == "holds":
                    momentum = self.held.setdefault(p, before.clone()).mul_(0.9).add_(p.grad)
                state["momentum"] = momentum
                state["count"] = state.get("count", 0) + 1
                if group["habit"] == "gives other memory":
                    p.data = p.data - group["lr"] * momentum
                else:
                    p.sub_(momentum, alpha=group["lr"])
        if group["habit"] == "global":
            self.state["steps"] = {"steps": self.state.get("steps", {}).get("steps", 0) + 1}  # type: ignore[index]


HABITS = ["", "asks", "holds", "gives other memory", "global"]


def custom(rank: int, habit: str) -> None:
    theirs, ours = wrapped(), wrapped()
    plain = Custom(theirs.parameters(), habit=habit)
    host = HostOptimizer(ours, Custom, habit=habit)
    train(theirs, plain, rank, range(5))
    train(ours, host, rank, range(5))
    assert_same(ours, theirs)
    torch.testing.assert_close(host.state_dict()["state"], plain.state_dict()["state"], rtol=0, atol=0)
    if host._state is not None:
        before = len(host._state._memory.kept)
        train(ours, host, rank, range(5))
        assert len(host._state._memory.kept) == before


@pytest.mark.parametrize("habit", HABITS)
def test_optimizers_of_others_work(pair: RankPool, habit: str) -> None:
    pair.run(custom, habit)


class Unpicklable(torch.optim.SGD):
    """Keeps a function in its state."""

    def step(self, closure: Any = None) -> Any:
        for part in self.param_groups[0]["params"]:
            self.state[part]["function"] = lambda: None
        return super().step(closure)


def unreadable(rank: int) -> None:
    ddp = wrapped()
    host = HostOptimizer(ddp, Unpicklable, lr=0.1)
    train(ddp, host, rank, range(2))
    with pytest.raises(ShardError, match="cannot be read by other ranks: function"):
        host.state_dict()
    train(ddp, host, rank, range(2))


def test_state_that_cannot_be_told_is_said_when_it_is_asked_for(pair: RankPool) -> None:
    pair.run(unreadable)


def clips_parts(rank: int) -> None:
    ddp = wrapped()
    host = HostOptimizer(ddp, torch.optim.SGD)
    ddp(rows(rank)).square().mean().backward()
    parts = [each for group in host.param_groups for each in group["params"]]
    with pytest.raises(ShardError, match="clip by the optimizer's clip_grad_norm_"):
        nn.utils.clip_grad_norm_(parts, 1.0)
    nn.utils.clip_grad_value_(parts[:-1], 1.0)
    with pytest.raises(ShardError, match="only its part"):
        ddp.module.first.weight.grad.data.zero_()
    host.step()


def test_a_norm_of_parts_is_refused(pair: RankPool) -> None:
    pair.run(clips_parts)


def overlap(rank: int) -> None:
    ddp = wrapped()
    first = HostOptimizer(ddp, torch.optim.SGD)
    with pytest.raises(UnsupportedError, match=r"whole parameters cannot share them.*'cut.weight'|'first"):
        HostOptimizer(ddp, torch.optim.Adafactor)
    train(ddp, first, rank, range(2))
    del first
    gc.collect()
    train(ddp, HostOptimizer(ddp, torch.optim.Adafactor), rank, range(2))


def test_two_optimizers_that_cut_in_other_ways_exclude_each_other(pair: RankPool) -> None:
    pair.run(overlap)


def different(rank: int, how: str) -> None:
    ddp = wrapped()
    parameters = [*ddp.parameters()]
    if how == "class":
        kind, chosen = (torch.optim.SGD if rank else torch.optim.Adam), parameters
    else:
        kind, chosen = torch.optim.SGD, parameters[::-1] if rank else parameters
    with pytest.raises(OptionError, match=r"ranks must make the same optimizer.*rank \d"):
        HostOptimizer(ddp, kind, chosen)


@pytest.mark.parametrize("how", ["class", "order"])
def test_ranks_compare_what_they_make(pair: RankPool, how: str) -> None:
    pair.run(different, how)


def adds_another(rank: int) -> None:
    ddp = wrapped()
    host = HostOptimizer(ddp, torch.optim.SGD, [ddp.module.first.weight, ddp.module.first.bias], lr=0.1)
    with pytest.raises(OptionError, match="ranks must make the same optimizer"):
        host.add_param_group({"params": [ddp.module.cut.weight if rank else ddp.module.cut.bias]})
    assert len(host.state_dict()["param_groups"]) == 1
    host.add_param_group({"params": [ddp.module.cut.weight, ddp.module.cut.bias]})
    train(ddp, host, rank, range(2))


def test_groups_that_differ_between_ranks_change_nothing(pair: RankPool) -> None:
    pair.run(adds_another)


def made_and_dropped(rank: int) -> None:
    references = []
    for _ in range(3):
        ddp = wrapped()
        host = HostOptimizer(ddp, torch.optim.Adam)
        train(ddp, host, rank, range(2))
        references += [weakref.ref(each) for each in ddp.parameters()]
        del ddp, host
        gc.collect()
    assert not any(reference() is not None for reference in references)


def test_nothing_stays_when_it_is_dropped(pair: RankPool) -> None:
    pair.run(made_and_dropped)


def other_calls(rank: int) -> None:
    ddp = wrapped()
    host = HostOptimizer(ddp, torch.optim.SGD)
    ddp(rows(rank)).square().mean().backward()
    with pytest.raises(StepError, match=r"different calls.*1 in step\(\), 1 in clip_grad_norm_\(\)"):
        host.step() if rank else host.clip_grad_norm_(1.0)
    train(ddp, host, rank, range(2))


def test_ranks_in_different_calls_are_told(pair: RankPool) -> None:
    pair.run(other_calls)
