"""Parameters and optimizer state once per host: the bits of the plain optimizer, and errors in words."""

import contextlib
import copy
import io
import os
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import rows
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Join
from wrappers import equal_on_all

from paceline import (
    DistributedDataParallel,
    HostOptimizer,
    MixedPrecision,
    OptionError,
    ShardedOptimizer,
    ShardError,
    StepError,
    TrainingState,
    UnsupportedError,
)
from paceline.comm.shm.local_ranks import HOST_VARIABLE
from paceline.ddp.buckets.cut import SMALLEST_CUT
from paceline.errors import RanksError
from paceline.testing import RankPool, run_ranks

ELEMENTWISE: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
}
WHOLE: dict[str, tuple[Any, dict[str, Any]]] = {
    # Few products per step: they are in bfloat16, which many processors are slow at.
    "Muon": (torch.optim.Muon, {"lr": 0.01, "ns_steps": 1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}
STEPS = 50
WIDTH = 190


class Wide(nn.Module):
    """A matrix that is cut, one that is not, a scalar, and matrices in another order of memory."""

    def __init__(self, *, matrices_only: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, WIDTH, bias=False)
        self.cut = nn.Linear(WIDTH, WIDTH, bias=not matrices_only)
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / WIDTH)
        if not matrices_only:
            self.scale = nn.Parameter(torch.tensor(1.0))
        assert self.cut.weight.numel() >= SMALLEST_CUT

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.cut(self.first(x))) @ self.turned
        return out * self.scale if hasattr(self, "scale") else out


def train(ddp: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(rows(rank, step).to(next(ddp.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def assert_same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), f"{name!r} is off by {(mine - other).abs().max():.3g}"
    assert equal_on_all([each.detach().clone() for each in ours.parameters()])


def assert_same_state(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs) or isinstance(ours, int | float)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert_same_state(value, theirs[key])
    elif isinstance(ours, list | tuple):
        for mine, other in zip(ours, theirs, strict=True):
            assert_same_state(mine, other)
    elif isinstance(ours, Tensor):
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


def as_plain(rank: int, name: str) -> None:
    kind, options = {**ELEMENTWISE, **WHOLE}[name]
    theirs, ours = (DistributedDataParallel(Wide(matrices_only=name in WHOLE)) for _ in range(2))
    plain, host = kind(theirs.parameters(), **options), HostOptimizer(ours, kind, **options)
    train(theirs, plain, rank, range(STEPS))
    train(ours, host, rank, range(STEPS))
    assert_same_parameters(ours, theirs)
    assert_same_state(host.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_fifty_steps_have_the_bits_of_the_plain_optimizer(pair: RankPool, name: str) -> None:
    pair.run(as_plain, name)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_so_they_have_on_more_ranks(ranks: RankPool, name: str) -> None:
    ranks.run(as_plain, name)


def test_so_they_have_on_one_rank() -> None:
    run_ranks(as_plain, 1, args=("AdamW",), timeout=60.0)


def between_hosts(rank: int, layout: list[str], kind: str) -> None:
    os.environ[HOST_VARIABLE] = layout[rank]
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    mine: Any = (
        HostOptimizer(ours, torch.optim.AdamW, lr=0.01)
        if kind == "host"
        else ShardedOptimizer(ours, torch.optim.AdamW, lr=0.01, gradients="parts")
    )
    train(theirs, plain, rank, range(10))
    train(ours, mine, rank, range(9))
    mine.zero_grad()
    ours(rows(rank, 9)).square().mean().backward()
    mine.clip_grad_norm_(1e6)
    mine.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert equal_on_all([each.detach().clone() for each in ours.parameters()])
    if kind == "host":
        torch.testing.assert_close(mine.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-7)
        ours.load_state_dict(theirs.state_dict())
        assert_same_parameters(ours, theirs)
        with mine.writing():
            ours.module.scale.data.fill_(rank)
        assert ours.module.scale.item() == layout.index(layout[rank])  # what the host's first rank wrote


@pytest.mark.parametrize("kind", ["host", "parts"])
@pytest.mark.parametrize("layout", ["aabb", "aab", "abab"])
def test_hosts_have_a_copy_each(layout: str, kind: str) -> None:
    run_ranks(between_hosts, len(layout), args=([*layout], kind), timeout=60.0)


def held(optimizer: Any) -> int:
    return sum(
        value.nbytes for state in optimizer.state.values() for key, value in state.items() if key != "step"
    )


def memory(rank: int) -> tuple[int, int, list[int]]:
    ddp = DistributedDataParallel(Wide())
    host = HostOptimizer(ddp, torch.optim.AdamW)
    train(ddp, host, rank, range(2))
    with torch.no_grad(), host.writing():
        ddp.module.first.weight.fill_(float(rank + 1))
    values = [ddp.module.first.weight[0, 0].item()]
    distributed.barrier()
    return held(host), 2 * sum(each.nbytes for each in ddp.parameters()), [int(each) for each in values]


def test_ranks_hold_the_state_together_and_parameters_once(pair: RankPool) -> None:
    (first, whole, seen), (second, _, also_seen) = pair.run(memory)
    assert first + second == whole
    assert max(first, second) < 0.6 * whole
    # Written on both ranks, and what the first one wrote is there.
    assert seen == also_seen == [1]


def loaded(rank: int, other: str) -> None:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    plain, host = torch.optim.AdamW(theirs.parameters()), HostOptimizer(ours, torch.optim.AdamW)
    train(theirs, plain, rank, range(3))
    train(ours, host, rank, range(3))
    saved = pickle.loads(pickle.dumps(host.state_dict()))
    new: Any = {
        "plain": lambda: torch.optim.AdamW(ours.parameters(), lr=1.0),
        "host": lambda: HostOptimizer(ours, torch.optim.AdamW, lr=1.0),
    }[other]()
    if other == "plain":  # a wrapper whose gradients are whole
        ours = DistributedDataParallel(copy.deepcopy(ours.module))
        new = torch.optim.AdamW(ours.parameters(), lr=1.0)
    new.load_state_dict(saved)
    train(theirs, plain, rank, range(3, 6))
    train(ours, new, rank, range(3, 6))
    assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("other", ["plain", "host"])
def test_its_state_is_loaded_by_the_plain_optimizer_and_by_another_one(ranks: RankPool, other: str) -> None:
    ranks.run(loaded, other)


# In float64: means over three ranks are rounded in another way than over two, and Adam makes that larger.
def saved_after(_: int, steps: int) -> tuple[bytes, bytes]:
    ddp = DistributedDataParallel(Wide().double())
    host = HostOptimizer(ddp, torch.optim.Adam, lr=0.01)
    train(ddp, host, 0, range(steps))  # the same batch on all ranks
    file = io.BytesIO()
    torch.save(ddp.module.state_dict(), file)
    return file.getvalue(), pickle.dumps(host.state_dict())


def goes_on(_: int, module: bytes, state: bytes) -> None:
    theirs, ours = (DistributedDataParallel(Wide().double()) for _ in range(2))
    plain = torch.optim.Adam(theirs.parameters(), lr=0.01)
    host = HostOptimizer(ours, torch.optim.Adam, lr=1.0)
    ours.load_state_dict(torch.load(io.BytesIO(module)))
    host.load_state_dict(pickle.loads(state))
    train(theirs, plain, 0, range(6))
    train(ours, host, 0, range(3, 6))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_another_number_of_ranks_goes_on_with_its_state(pair: RankPool) -> None:
    module, state = pair.run(saved_after, 3)[0]
    run_ranks(goes_on, 3, args=(module, state), timeout=60.0)
    # A parameter is saved with its own memory, and not with that of all.
    assert len(module) < 1.2 * sum(each.nbytes for each in Wide().double().parameters())


def alone(rank: int) -> None:
    ddp = DistributedDataParallel(Wide())
    host = HostOptimizer(ddp, torch.optim.Adam)
    train(ddp, host, rank, range(2))
    if rank == 0:
        time.sleep(0.3)  # the other rank has dropped its optimizer by then
        state = host.state_dict()["state"]
        plain = torch.optim.Adam(copy.deepcopy(ddp.module).parameters())
        plain.load_state_dict(host.state_dict())
        assert all(each["exp_avg"].any() for each in state.values())


def test_one_rank_alone_may_take_the_state(pair: RankPool) -> None:
    pair.run(alone)


def groups_and_schedule(rank: int) -> None:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    optimizers: list[Any] = []
    for ddp in (theirs, ours):
        module = ddp.module
        groups = [{"params": [module.first.weight, module.cut.weight], "weight_decay": 0.1}]
        groups += [{"params": [module.turned], "lr": 0.2}]
        optimizer: Any = (
            torch.optim.SGD(groups, lr=0.1, momentum=0.5)
            if ddp is theirs
            else HostOptimizer(ddp, torch.optim.SGD, groups, lr=0.1, momentum=0.5)
        )
        optimizer.add_param_group({"params": [module.cut.bias, module.scale], "lr": 0.3})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for step in range(6):
            train(ddp, optimizer, rank, range(step, step + 1))
            schedule.step()
        optimizers.append(optimizer)
    assert_same_parameters(ours, theirs)
    assert_same_state(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_parameter_groups_added_later_and_a_scheduler_work(ranks: RankPool) -> None:
    ranks.run(groups_and_schedule)


def named(rank: int) -> None:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    plain = torch.optim.SGD(theirs.module.named_parameters(), lr=0.1, momentum=0.9)
    host = HostOptimizer(ours, torch.optim.SGD, ours.module.named_parameters(), lr=0.1, momentum=0.9)
    train(theirs, plain, rank, range(2))
    train(ours, host, rank, range(2))
    assert_same_state(host.state_dict(), plain.state_dict())


def test_names_of_parameters_are_in_the_state(pair: RankPool) -> None:
    pair.run(named)


def two_optimizers(rank: int) -> None:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    made: list[list[Any]] = []
    for ddp in (theirs, ours):
        matrices = [each for each in ddp.parameters() if each.dim() == 2]
        others = [each for each in ddp.parameters() if each.dim() != 2]
        if ddp is theirs:
            made.append([torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others)])
        else:
            muon = HostOptimizer(ddp, torch.optim.Muon, matrices, lr=0.02)
            made.append([muon, HostOptimizer(ddp, torch.optim.AdamW, others)])
    for step in range(5):
        for ddp, optimizers in zip((theirs, ours), made, strict=True):
            for each in optimizers:
                each.zero_grad()
            ddp(rows(rank, step)).square().mean().backward()
            for each in optimizers:
                each.step()
    assert_same_parameters(ours, theirs)


def test_two_optimizers_share_a_module(ranks: RankPool) -> None:
    ranks.run(two_optimizers)


def varied(rank: int, how: str) -> None:
    options: dict[str, Any] = {}
    if how == "mixed precision":
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    theirs, ours = (DistributedDataParallel(Wide(), **options) for _ in range(2))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    host: Any = HostOptimizer(ours, torch.optim.SGD, lr=0.1, momentum=0.9)
    for ddp, optimizer in ((theirs, plain), (ours, host)):
        for step in range(6):
            if how == "the module's zero_grad":
                ddp.zero_grad()
            elif how != "zeros" or step % 2:
                optimizer.zero_grad(set_to_none=how != "zeros")
            batches = [rows(rank, 10 * step + each) for each in range(3)]
            if how == "no_sync":
                with ddp.no_sync():
                    for batch in batches[1:]:
                        ddp(batch).square().mean().backward()
            elif how == "weighed":
                with ddp.weigh(rank + 1):
                    ddp(batches[0]).square().mean().backward()
                optimizer.step()
                continue
            elif how in ("backward twice", "zeros"):
                ddp(batches[1]).square().mean().backward()
            elif how == "two losses":
                ddp.module.first(batches[1]).square().mean().backward()  # not through the wrapper
                ddp(batches[2]).square().mean().backward()
                continue
            loss = ddp(batches[0]).square().mean()
            if how == "zero_grad after forward":
                ddp.zero_grad()
            loss.backward()
            optimizer.step()
    if how in ("backward twice", "zeros"):  # the same sum in another order
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)
    else:
        assert_same_parameters(ours, theirs)


@pytest.mark.parametrize(
    "how",
    [
        *("no_sync", "weighed", "backward twice", "zeros", "two losses", "mixed precision"),
        *("the module's zero_grad", "zero_grad after forward"),
    ],
)
def test_what_is_done_to_gradients_works_as_with_the_plain_optimizer(ranks: RankPool, how: str) -> None:
    ranks.run(varied, how)


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)  # type: ignore[no-any-return]


def unused(rank: int) -> None:
    theirs, ours = DistributedDataParallel(Branches()), DistributedDataParallel(Branches())
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.5)
    host = HostOptimizer(ours, torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    for ddp, optimizer in ((theirs, plain), (ours, host)):
        optimizer_: Any = optimizer
        for step, which in enumerate([0, 1, rank % 2, 0]):
            optimizer_.zero_grad()
            ddp(rows(rank, step), which).square().mean().backward()
            if step == 3:  # what the second one does not use keeps the first one's gradient
                ddp(rows(rank, 9), 1).square().mean().backward()
            optimizer_.step()
    assert_same_parameters(ours, theirs)
    assert_same_state(host.state_dict()["state"], plain.state_dict()["state"])


def test_unused_parameters_are_not_stepped(ranks: RankPool) -> None:
    ranks.run(unused)


def without_backward(rank: int) -> None:
    ddp = DistributedDataParallel(Wide())
    host = HostOptimizer(ddp, torch.optim.SGD, lr=0.1)
    train(ddp, host, rank, range(2))
    ddp.zero_grad()
    before = [each.detach().clone() for each in ddp.parameters()]
    host.step()  # there is nothing to step
    assert all(map(torch.equal, before, ddp.parameters()))
    if rank == 1:
        ddp.module.first.weight.grad = torch.ones_like(ddp.module.first.weight)
    with pytest.raises(StepError, match=r"on rank 1, gradients are no averages.*\(first.weight\)"):
        host.step()
    assert all(map(torch.equal, before, ddp.parameters()))
    train(ddp, host, rank, range(2))


def test_a_step_without_a_backward_steps_nothing(pair: RankPool) -> None:
    pair.run(without_backward)


def clipped(rank: int, norm_type: float, kind: str) -> None:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    mine: Any = (
        HostOptimizer(ours, torch.optim.SGD, lr=0.1)
        if kind == "host"
        else ShardedOptimizer(ours, torch.optim.SGD, lr=0.1, gradients=kind)
    )
    for step in range(3):
        plain.zero_grad()
        mine.zero_grad()
        for ddp in (theirs, ours):
            ddp(rows(rank, step)).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.01, norm_type)
        torch.testing.assert_close(mine.clip_grad_norm_(0.01, norm_type), expected, rtol=1e-5, atol=0)
        plain.step()
        mine.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["host", "parts", "whole"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_of_all_parts(ranks: RankPool, norm_type: float, kind: str) -> None:
    ranks.run(clipped, norm_type, kind)


def clipped_by_torch(rank: int, kind: str) -> None:
    ddp = DistributedDataParallel(Wide())
    optimizer: Any = (
        HostOptimizer(ddp, torch.optim.SGD)
        if kind == "host"
        else ShardedOptimizer(ddp, torch.optim.SGD, gradients="parts")
    )
    ddp(rows(rank)).square().mean().backward()
    with pytest.raises(
        ShardError, match=r"only its part of the averaged gradient.*clip_grad_norm_ of the opt"
    ):
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    with pytest.raises(ShardError, match="only its part"):
        torch.optim.SGD(ddp.parameters()).step()
    optimizer.step()  # the next call works
    train(ddp, optimizer, rank, range(2))


@pytest.mark.parametrize("kind", ["host", "parts"])
def test_a_gradient_that_is_elsewhere_is_not_used_in_silence(ranks: RankPool, kind: str) -> None:
    ranks.run(clipped_by_torch, kind)


def scaled(rank: int) -> tuple[list[float], list[bool]]:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    host = HostOptimizer(ours, torch.optim.SGD, lr=0.1)
    scales, skipped = [], []
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        before = [each.detach().clone() for each in ours.parameters()]
        for ddp, optimizer, scaler in ((theirs, plain, scalers[0]), (ours, host, scalers[1])):
            optimizer.zero_grad()
            loss = ddp(rows(rank, step)).square().mean()
            if step in (2, 4):  # infinite in one element, which one rank has
                loss = loss + (ddp.module.cut.weight[-1, -1] * torch.inf).nan_to_num(posinf=torch.inf)
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scalers[1].get_scale())
        assert scales[-1] == scalers[0].get_scale()
        after = [*ours.parameters()]
        skipped.append(all(torch.equal(old, new) for old, new in zip(before, after, strict=True)))
    assert_same_parameters(ours, theirs)
    return scales, skipped


def test_a_scaler_skips_the_step_on_all_ranks(ranks: RankPool) -> None:
    found = ranks.run(scaled)
    assert all(each == found[0] for each in found)
    assert found[0][1] == [False, False, True, False, True, False]


WRITES: dict[str, Callable[[Any], object]] = {
    ".data": lambda parameter: parameter.data.mul_(0.9),
    "a kept .data": lambda parameter: [parameter.data][0].add_(1.0),
    "no_grad": lambda parameter: torch.no_grad()(parameter.mul_)(0.9),
    "init": lambda parameter: nn.init.zeros_(parameter),
    "an index": lambda parameter: torch.no_grad()(parameter.__setitem__)(0, 1.0),
    "other data": lambda parameter: setattr(parameter, "data", torch.zeros_like(parameter)),
}


def writes(rank: int, how: str, writer: int) -> None:
    ddp = DistributedDataParallel(Wide())
    host = HostOptimizer(ddp, torch.optim.SGD)
    train(ddp, host, rank, range(2))
    ddp(rows(rank)).square().mean().backward()
    if rank == writer:
        WRITES[how](ddp.module.cut.weight)
    before = ddp.module.first.weight.detach().clone()
    words = "was given other memory" if how == "other data" else "was written to"
    with pytest.raises(
        StepError, match=rf"on rank {writer}, 'cut.weight' {words}.*test_host_optimizer.py:\d+"
    ):
        host.step()
    assert torch.equal(ddp.module.first.weight, before)  # nothing was stepped
    if how != "other data":
        host.step()  # told once; the next call works


@pytest.mark.parametrize("how", WRITES)
def test_who_writes_to_a_parameter_is_told_on_all_ranks(pair: RankPool, how: str) -> None:
    pair.run(writes, how, 1)


def reads(rank: int) -> None:
    ddp = DistributedDataParallel(Wide())
    host = HostOptimizer(ddp, torch.optim.SGD)
    for step in range(3):
        train(ddp, host, rank, range(step, step + 1))
        for parameter in ddp.parameters():
            for _ in range(100):
                parameter.data.clone().mul_(0.9)
            parameter.detach().numpy().sum()
    averaged = torch.optim.swa_utils.AveragedModel(ddp.module)
    train(ddp, host, rank, range(2))
    averaged.update_parameters(ddp.module)
    train(ddp, host, rank, range(2))
    ours, average = ddp.module.first.weight, averaged.module.first.weight
    assert type(average) is nn.Parameter
    with host.writing():  # an average of weights takes the place of the weights
        ddp.module.load_state_dict(averaged.module.state_dict())
    assert torch.equal(ours, average)
    train(ddp, host, rank, range(2))
    assert not torch.equal(ours, average)


def test_reading_and_averages_of_weights_work(pair: RankPool) -> None:
    pair.run(reads)


def written(rank: int) -> None:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    plain, host = torch.optim.SGD(theirs.parameters(), lr=0.1), HostOptimizer(ours, torch.optim.SGD, lr=0.1)
    for ddp, optimizer in ((theirs, plain), (ours, host)):
        optimizer_: Any = optimizer
        train(ddp, optimizer_, rank, range(2))
        with host.writing() if ddp is ours else contextlib.nullcontext():
            for parameter in ddp.parameters():
                parameter.data.mul_(0.9)
            nn.init.ones_(ddp.module.first.weight)
            ddp.module.cut.weight.data = torch.full((WIDTH, WIDTH), 0.01)
        train(ddp, optimizer_, rank, range(2))
        ddp.load_state_dict({name: 0.5 * value for name, value in ddp.module.state_dict().items()})
        train(ddp, optimizer_, rank, range(2))
    assert_same_parameters(ours, theirs)
    error, words = (
        (ZeroDivisionError, "zero") if rank == 0 else (StepError, "rank 0 raised ZeroDivisionError")
    )
    with pytest.raises(error, match=words), host.writing():
        _ = 1 / rank
    train(ours, host, rank, range(2))


def test_what_is_written_in_the_block_counts_once(ranks: RankPool) -> None:
    ranks.run(written)


def copied(rank: int) -> None:
    ddp = DistributedDataParallel(Wide())
    host = HostOptimizer(ddp, torch.optim.SGD)
    train(ddp, host, rank, range(1))
    for twin in (
        copy.deepcopy(ddp.module),
        pickle.loads(pickle.dumps(ddp.module)),
        copy.deepcopy(ddp).module,
    ):
        assert all(type(each) is nn.Parameter for each in twin.parameters())
        with torch.no_grad():
            twin.first.weight.zero_()
        assert ddp.module.first.weight.any()
    with pytest.raises(ShardError, match=r"cannot be copied or pickled.*state_dict"):
        copy.deepcopy(host)
    saved = {name: value.clone() for name, value in ddp.state_dict().items()}
    if (child := os.fork()) == 0:  # what a child writes is its own
        ddp.module.first.weight.data.zero_()
        os._exit(0 if not ddp.module.first.weight.any() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(saved["module.first.weight"], ddp.module.first.weight)
    train(ddp, host, rank, range(1))


def test_copies_pickles_and_forks_have_their_own_parameters(pair: RankPool) -> None:
    pair.run(copied)


def old_graph(rank: int) -> None:
    ddp = DistributedDataParallel(Wide())
    host = HostOptimizer(ddp, torch.optim.SGD)
    loss = ddp(rows(rank)).square().mean()
    loss.backward(retain_graph=True)
    host.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_over_an_old_graph_is_refused_as_with_the_plain_optimizer() -> None:
    run_ranks(old_graph, 1, timeout=60.0)


def compiled(rank: int) -> None:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    plain, host = torch.optim.SGD(theirs.parameters(), lr=0.1), HostOptimizer(ours, torch.optim.SGD, lr=0.1)
    ours.module.compile(backend="eager", fullgraph=True)
    train(theirs, plain, rank, range(3))
    train(ours, host, rank, range(3))
    assert_same_parameters(ours, theirs)


def test_compiled_modules_work(pair: RankPool) -> None:
    pair.run(compiled)


def joined(rank: int) -> None:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    for ddp in (theirs, ours):
        optimizer: Any = (
            torch.optim.SGD(ddp.parameters(), lr=0.1)
            if ddp is theirs
            else HostOptimizer(ddp, torch.optim.SGD, lr=0.1)
        )
        joining = [ddp] if ddp is theirs else [ddp, optimizer]
        with Join(joining):
            train(ddp, optimizer, rank, range(3 + rank))
        if ddp is ours:
            with pytest.raises(OptionError, match="the optimizer must join too"), ddp.join():
                train(ddp, optimizer, rank, range(1))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def test_ranks_without_inputs_step_their_parts(pair: RankPool) -> None:
    pair.run(joined)


def resumed(rank: int) -> None:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide())
    plain, host = torch.optim.Adam(theirs.parameters()), HostOptimizer(ours, torch.optim.Adam)
    train(ours, host, rank, range(3))
    state = copy.deepcopy(TrainingState(ours, host).state_dict())
    train(ours, host, rank, range(9))
    TrainingState(ours, host).load_state_dict(state)
    train(ours, host, rank, range(3, 5))
    train(theirs, plain, rank, range(5))
    assert_same_parameters(ours, theirs)


def test_a_training_state_is_loaded(pair: RankPool) -> None:
    pair.run(resumed)


def no_hook(_: Any, __: Any) -> torch.futures.Future[Tensor]:
    return torch.futures.Future()


def refusals(rank: int) -> None:
    ddp = DistributedDataParallel(Wide())
    with pytest.raises(OptionError, match=r"must be paceline's wrapper.*\(given: generator\)"):
        HostOptimizer(ddp.parameters(), torch.optim.Adam)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="LBFGS looks at all parameters at once"):
        HostOptimizer(ddp, torch.optim.LBFGS)
    with pytest.raises(OptionError, match="parameters that the wrapper averages, and no others"):
        HostOptimizer(ddp, torch.optim.SGD, [torch.zeros(3, requires_grad=True)])
    host = HostOptimizer(ddp, torch.optim.SGD)
    with pytest.raises(UnsupportedError, match="takes no closure"):
        host.step(lambda: None)
    with pytest.raises(OptionError, match=r"in another group already \(first.weight\)"):
        host.add_param_group({"params": ddp.module.first.weight})
    with pytest.raises(OptionError, match=r"other parameter groups.*\[2\] loaded, \[5\] here"):
        host.load_state_dict(torch.optim.SGD(nn.Linear(1, 1).parameters()).state_dict())
    with pytest.raises(UnsupportedError, match="hooks and gradients in parts exclude"):
        ddp.register_comm_hook(None, no_hook)
    with pytest.raises(UnsupportedError, match=r"memory that the ranks of a host share.*ShardedOptimizer"):
        HostOptimizer(DistributedDataParallel(Wide(), transport="c10d"), torch.optim.SGD)
    with pytest.raises(UnsupportedError, match="sparse gradients"):
        HostOptimizer(DistributedDataParallel(nn.Embedding(4, 4, sparse=True)), torch.optim.SGD)
    with pytest.raises(UnsupportedError, match="shards"):
        HostOptimizer(DistributedDataParallel(Wide(), shards=4), torch.optim.SGD)
    train(ddp, host, rank, range(2))


def test_what_it_cannot_do_is_refused_in_words(pair: RankPool) -> None:
    pair.run(refusals)


class Failing(torch.optim.SGD):
    """Raises in the middle of its third step, on one rank."""

    fails = False
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.fails and self.steps == 3:
            raise ZeroDivisionError("in the update")
        return super().step(closure)


def fails_in_update(rank: int) -> None:
    ddp = DistributedDataParallel(Wide())
    host = HostOptimizer(ddp, Failing, lr=0.1)
    host._local.fails = rank == 1  # type: ignore[attr-defined]
    saved = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    train(ddp, host, rank, range(2))
    with pytest.raises(ZeroDivisionError if rank == 1 else StepError) as raised:
        train(ddp, host, rank, range(1))
    words = "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "rank 1 raised ZeroDivisionError('in the update')" in words
    assert "updated in part" in words
    with pytest.raises(StepError, match="updated in part: load a checkpoint"):
        train(ddp, host, rank, range(1))
    ddp.load_state_dict(saved)
    train(ddp, host, rank, range(1))


def test_an_update_that_fails_on_one_rank_is_told_on_all(pair: RankPool) -> None:
    pair.run(fails_in_update)


class Dying(torch.optim.SGD):
    """Ends its process in the middle of its third step."""

    dies = False
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.dies and self.steps == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def dies_in_update(rank: int) -> None:
    ddp = DistributedDataParallel(Wide())
    host = HostOptimizer(ddp, Dying, lr=0.1)
    host._local.dies = rank == 1  # type: ignore[attr-defined]
    train(ddp, host, rank, range(2))
    with pytest.raises(StepError, match=r"updated in part.*rank 1 is missing: it has ended"):
        train(ddp, host, rank, range(1))
    with pytest.raises(StepError, match="updated in part"):
        host.step()


def test_a_rank_killed_in_the_update_is_told_to_the_others() -> None:
    with pytest.raises(RanksError) as raised:
        run_ranks(dies_in_update, 3, timeout=60.0)
    assert [str(each).split(":")[0] for each in raised.value.exceptions] == ["rank 1 ended"] or all(
        "SIGKILL" in str(each) for each in raised.value.exceptions
    )


def parts_as_plain(rank: int, transport: str) -> None:
    theirs, ours = DistributedDataParallel(Wide()), DistributedDataParallel(Wide(), transport=transport)  # type: ignore[arg-type]
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    sharded = ShardedOptimizer(ours, torch.optim.AdamW, lr=0.01, gradients="parts")
    train(theirs, plain, rank, range(5))
    train(ours, sharded, rank, range(5))
    if distributed.get_world_size() == 2:
        assert_same_parameters(ours, theirs)
    for ddp, optimizer in ((theirs, plain), (ours, sharded)):
        optimizer_: Any = optimizer
        for step in range(5, 8):  # adds to gradients, also under no_sync
            optimizer_.zero_grad()
            ddp(rows(rank, step)).square().mean().backward()
            with ddp.no_sync():
                ddp(rows(rank, step + 10)).square().mean().backward()
            ddp(rows(rank, step + 20)).square().mean().backward()
            optimizer_.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-8)
    sharded.consolidate_state_dict()
    if rank == 0:
        torch.testing.assert_close(sharded.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_a_sharded_optimizer_takes_reduced_parts(ranks: RankPool, transport: str) -> None:
    ranks.run(parts_as_plain, transport)
