"""Gradients that come when, or where, no one expected them: late ones, unfrozen ones, frozen ones."""

import contextlib
import functools
from typing import Any

import batches
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel
from paceline.testing import RankPool

WIDE = 32768  # elements from which a gradient is taken at once
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
WEIGHED = pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])

rows = functools.partial(batches.rows, dtype=torch.float64)


class Net(nn.Module):
    """Layers, of which one is large, that a re-entrant checkpoint goes over any number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.large = nn.Parameter(torch.linspace(0, 1, WIDE).reshape(4, -1))
        self.last = nn.Linear(4, 4)

    def body(self, x: Tensor) -> Tensor:
        return self.again(x).tanh() + (x @ self.large).mean(1, keepdim=True)

    def forward(self, x: Tensor, times: int = 1, *, last: bool = True) -> Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.body, x, use_reentrant=True)
        return self.last(x) if last else x


class Plain(nn.Module):
    """Three layers, and a sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, sparse=True)
        self.first = nn.Linear(4, 4)
        self.large = nn.Parameter(torch.linspace(0, 1, WIDE).reshape(4, -1))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, skip: tuple[str, ...] = ()) -> Tensor:
        out = x if "first" in skip else self.first(x)
        if "words" not in skip:
            out = out + self.words(torch.tensor([1, 2])).sum(0)
        if "large" not in skip:
            out = out + (x @ self.large).mean(1, keepdim=True)
        return out if "last" in skip else self.last(out)


def compare(ddp: DistributedDataParallel, plain: nn.Module, what: str) -> None:
    for name, parameter in plain.named_parameters():
        got, want = ddp.module.get_parameter(name).grad, parameter.grad
        assert (got is None) == (want is None), f"{what}: {name}: {got}, {want}"
        if want is not None:
            torch.testing.assert_close(
                got.to_dense(), want.to_dense(), rtol=1e-12, atol=1e-12, msg=f"{what}: {name} is off"
            )


def both(kind: type[nn.Module], **options: Any) -> tuple[DistributedDataParallel, nn.Module]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(kind().double(), **options)
    torch.manual_seed(0)
    return ddp, kind().double()


TIMES = {
    "later on all ranks": [(1, 1, 1), (1, 1, 1), (2, 2, 2), (1, 1, 1), (3, 3, 3), (2, 2, 2)],
    "later on one rank": [(1, 1, 1), (1, 1, 1), (1, 3, 1), (2, 1, 1), (1, 1, 4), (0, 1, 2)],
    "none at first": [(0, 0, 0), (0, 0, 0), (1, 0, 2), (2, 2, 0), (0, 3, 1), (1, 1, 1)],
}


def late(rank: int, plan: str, view: bool, weighed: bool) -> None:
    world = torch.distributed.get_world_size()
    ddp, plain = both(Net, gradient_as_bucket_view=view, bucket_cap_mb=1e-5)
    for step, times in enumerate(TIMES[plan]):
        ddp.zero_grad()
        plain.zero_grad()
        counts = [r + 1 if weighed else 2 for r in range(world)]
        for r in range(world):
            out = plain(rows(10 * step + r, count=counts[r]).requires_grad_(), times[r])
            (out.square().sum() / sum(counts)).backward()
        with ddp.weigh(counts[rank]) if weighed else contextlib.nullcontext():
            out = ddp(rows(10 * step + rank, count=counts[rank]).requires_grad_(), times[rank])
            (out.square().sum() / counts[rank]).backward()
        compare(ddp, plain, f"step {step}")


@VIEWS
@WEIGHED
@pytest.mark.parametrize("plan", TIMES)
def test_gradients_that_come_again_after_their_bucket_has_left(
    ranks: RankPool, plan: str, view: bool, weighed: bool
) -> None:
    ranks.run(late, plan, view, weighed)


# For each step the parameters, by prefix, that each of two ranks trains.
ALL = ("words", "first", "large", "last")
FROZEN = {
    "unfrozen on one rank only": [(("first",), ("first",)), (ALL, ("first",)), (ALL, ("first",)), (ALL, ALL)],
    "unfrozen for one step": [(("first",), ("first",)), (ALL, ALL), (("first",), ("first",)), (ALL, ALL)],
    "in turn": [(ALL[:2], ALL[:2]), (ALL[2:], ALL[2:])] * 3,
    "each rank its own": [(ALL[:2], ALL[2:]), (ALL[2:], ALL[:2]), (ALL, ALL[1:2]), (ALL[3:], ALL)],
    "frozen after the first step": [(ALL, ALL), (ALL[1:3], ALL[1:3]), (ALL[:1], ALL[:1]), (ALL, ALL)],
    "frozen before the first step": [(("large",), ("large",)), (("first",), ("first",)), (ALL, ALL)],
}


def train_only(net: nn.Module, prefixes: tuple[str, ...]) -> None:
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))


def frozen(rank: int, plan: str, wrapped: str, view: bool, hooked: bool, weighed: bool) -> None:
    torch.manual_seed(0)
    net = Plain().double()
    first = FROZEN[plan][0][0] if wrapped == "frozen" else ALL
    train_only(net, first)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=view, bucket_cap_mb=1e-5)
    torch.manual_seed(0)
    plain = Plain().double()
    if hooked:
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: None)
    for step, trained in enumerate(FROZEN[plan]):
        ddp.zero_grad()
        plain.zero_grad()
        for r in range(2):
            train_only(plain, trained[r])
            (plain(rows(10 * step + r, count=2)).square().sum() / 4).backward()
        train_only(net, trained[rank])
        with ddp.weigh(2) if weighed else contextlib.nullcontext():
            (ddp(rows(10 * step + rank, count=2)).square().sum() / 2).backward()
        compare(ddp, plain, f"step {step}")


@VIEWS
@pytest.mark.parametrize("wrapped", ["frozen", "all trained"])
@pytest.mark.parametrize("plan", FROZEN)
def test_parameters_frozen_and_unfrozen(pair: RankPool, plan: str, wrapped: str, view: bool) -> None:
    pair.run(frozen, plan, wrapped, view, False, False)


@pytest.mark.parametrize("plan", FROZEN)
def test_parameters_frozen_and_unfrozen_that_have_a_hook(pair: RankPool, plan: str) -> None:
    pair.run(frozen, plan, "all trained", False, True, False)


@pytest.mark.parametrize("plan", FROZEN)
def test_parameters_frozen_and_unfrozen_under_weights(pair: RankPool, plan: str) -> None:
    pair.run(frozen, plan, "frozen", False, False, True)


def unfrozen_and_accumulated(rank: int, weighed: bool, skip: str) -> None:
    """Unfrozen parameters that only the first of two passes uses."""
    torch.manual_seed(0)
    net = Plain().double()
    train_only(net, ("last",))
    ddp = DistributedDataParallel(net)
    torch.manual_seed(0)
    plain = Plain().double()
    for step in range(3):
        train_only(net, ("last",) if step == 0 else ALL)
        train_only(plain, ("last",) if step == 0 else ALL)
        ddp.zero_grad()
        plain.zero_grad()
        for part, skipped in enumerate([(), (skip,)]):
            for r in range(2):
                (plain(rows(10 * step + 2 * part + r, count=2), skipped).square().sum() / 8).backward()
            with contextlib.ExitStack() as stack:
                if part == 0:
                    stack.enter_context(ddp.no_sync())
                if weighed:
                    stack.enter_context(ddp.weigh(2))
                share = 2 if weighed else 4
                (ddp(rows(10 * step + 2 * part + rank, count=2), skipped).square().sum() / share).backward()
        compare(ddp, plain, f"step {step}")


@WEIGHED
@pytest.mark.parametrize("skip", ["first", "large", "words"])
def test_unfrozen_parameters_that_only_an_accumulated_pass_uses(
    pair: RankPool, weighed: bool, skip: str
) -> None:
    pair.run(unfrozen_and_accumulated, weighed, skip)
