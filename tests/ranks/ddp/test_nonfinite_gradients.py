"""One rank's gradients are not finite: every rank is told whose they were, and training goes on."""

import contextlib
import math
import warnings
from typing import Any

import pytest
import torch
from batches import rows
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from wrappers import LOW, equal_on_all, grads, two_layers

from paceline import DistributedDataParallel, ShardedSampler
from paceline.testing import RankPool

TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "c10d"])
CULPRIT = 1


class Planted(nn.Module):
    """Passes its input on; on one rank a number in its gradient is bad in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.bad is not None:
            x.register_hook(self._spoil)
        return x * 1

    def _spoil(self, grad: Tensor) -> Tensor:
        spoiled = grad.clone()
        spoiled[0, 0] = math.nan if self.bad is None else self.bad
        return spoiled


def net_with(planted: Planted) -> nn.Sequential:
    first, between, last = two_layers()
    return nn.Sequential(first, between, planted, last)


def loss_of(output: Tensor, where: str, bad: float) -> Tensor:
    loss = output.square().mean()
    return loss * bad if where == "loss" else loss


@contextlib.contextmanager
def told_by(into: list[str]) -> Any:
    """Adds the texts of our warnings to a list."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    into += [str(each.message) for each in caught if "not finite" in str(each.message)]


def training(rank: int, transport: Any, where: str, bad: float, at: int, how: str) -> list[str]:
    """The culprit has a bad number in one step of six; returns what was told."""
    planted = Planted()
    precision = {"mixed_precision": LOW} if how == "mixed precision" else {}
    ddp = DistributedDataParallel(net_with(planted), transport=transport, bucket_cap_mb=1e-4, **precision)
    if how == "hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    told: list[str] = []
    with told_by(told):
        for step in range(6):
            ddp.zero_grad()
            is_bad = rank == CULPRIT and step == at
            planted.bad = bad if is_bad and where == "layer" else None
            loss = loss_of(ddp(rows(rank, step)), where if is_bad else "", bad)
            if how == "weights":
                ddp.backward(loss, weight=3 + rank)
            else:
                loss.backward()
            # Nothing is lost: every rank has the same average, which is bad everywhere.
            assert any(not grad.isfinite().all() for grad in grads(ddp)) == (step == at)
            assert equal_on_all([grad.nan_to_num(7.0, 8.0, 9.0) for grad in grads(ddp)])
    return told


@TRANSPORTS
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize(
    ("where", "bad", "first", "count"),
    [
        ("loss", math.nan, "3.bias", 4),
        ("loss", math.inf, "3.bias", 4),
        ("layer", math.nan, "0.bias", 2),
        ("layer", math.inf, "0.bias", 2),
    ],
)
def test_every_rank_is_told_whose_gradients_were_bad_and_where_it_began(
    ranks: RankPool, transport: str, where: str, bad: float, first: str, count: int, at: int
) -> None:
    wanted = (
        f"gradients of rank 1 are not finite in step {at}, before averaging: "
        f"first of {count} parameters {first}"
    )
    for told in ranks.run(training, transport, where, bad, at, "plain"):
        assert told == [wanted]


@TRANSPORTS
@pytest.mark.parametrize("how", ["hook", "weights", "mixed precision"])
def test_it_is_told_however_gradients_are_averaged(pair: RankPool, transport: str, how: str) -> None:
    for told in pair.run(training, transport, "loss", math.nan, 3, how):
        assert len(told) == 1
        assert told[0].startswith(
            "gradients of rank 1 are not finite in step 3, before averaging: first of 4"
        )


@TRANSPORTS
@pytest.mark.parametrize("how", ["plain", "hook", "weights", "mixed precision"])
def test_healthy_steps_warn_of_nothing(pair: RankPool, transport: str, how: str) -> None:
    assert [*pair.run(training, transport, "loss", math.nan, -1, how)] == [[], []]


def going_on(rank: int) -> list[str]:
    """The average makes everybody's parameters bad, and with them all later gradients."""
    ddp = DistributedDataParallel(two_layers())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    told: list[str] = []
    with told_by(told):
        for step in range(8):
            optimizer.zero_grad()
            is_bad = rank == CULPRIT and step == 2
            loss_of(ddp(rows(rank, step)), "loss" if is_bad else "", math.nan).backward()
            optimizer.step()
    return told


def test_steps_that_are_bad_because_of_the_first_do_not_hide_it(ranks: RankPool) -> None:
    for told in ranks.run(going_on):
        assert len(told) == 1
        assert told[0].startswith("gradients of rank 1 are not finite in step 2")
        assert "rank 0" not in told[0]


def sampling(rank: int, workers: int) -> tuple[list[str], list[int]]:
    """The culprit has a bad sample; returns what was told, and the samples of its batch."""
    ddp = DistributedDataParallel(two_layers())
    data = torch.arange(96.0).reshape(96, 1).expand(96, 4)
    loader = torch.utils.data.DataLoader(data, 4, sampler=ShardedSampler(96), num_workers=workers)
    told: list[str] = []
    culprits: list[int] = []
    with told_by(told):
        for step, x in enumerate(loader):
            is_bad = rank == CULPRIT and step == 3
            if is_bad:
                culprits = x[:, 0].int().tolist()
            loss_of(ddp(x), "loss" if is_bad else "", math.nan).backward()
            ddp.zero_grad()
    return told, culprits


@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_of_the_step_are_told(pair: RankPool, workers: int) -> None:
    (told, _), (told_too, culprits) = pair.run(sampling, workers)
    assert told == told_too
    (words,) = told
    _, _, listed = words.partition("; ")
    if workers:
        known = [int(each) for each in listed.removeprefix("among samples [").strip("]").split(", ")]
        assert {*culprits} < {*known}
    else:
        assert listed == f"samples {culprits}"
