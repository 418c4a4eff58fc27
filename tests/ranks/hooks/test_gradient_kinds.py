"""paceline's own hooks on every kind of gradient."""

import math

import pytest
import torch
from hook_nets import (
    BOUNDS,
    HOOKS,
    Given,
    check_equal_on_all_ranks,
    distance,
    everyones,
    gradients,
    largest,
    mean,
    run_step,
    wrap,
)
from torch import Tensor, distributed, nn

from paceline.testing import RankPool, run_ranks

EACH = pytest.mark.parametrize("name", HOOKS)
KINDS = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


def of_kind(rank: int, name: str, dtype: torch.dtype) -> None:
    ddp = wrap(HOOKS[name](), Given(dtype=dtype))
    given = everyones(dtype=dtype)
    for step in range(4):
        found = run_step(ddp, given[rank])
        assert {grad.dtype for grad in found} == {dtype}
        check_equal_on_all_ranks(found)
        if step == 0 and name in BOUNDS:
            # A complex number is off in both its parts, and a short type rounds the result as well.
            assert distance(found, mean(given)) <= (1.5 * BOUNDS[name] + 2**-7) * largest(given)


@EACH
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_other_data_types(pair: RankPool, name: str, dtype: torch.dtype) -> None:
    pair.run(of_kind, name, dtype)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)
        self.last = nn.Linear(3, 1)

    def forward(self, which: Tensor) -> Tensor:
        return self.last(self.words(which)).sum()


def sparse(rank: int, name: str) -> None:
    torch.manual_seed(0)
    ddp = wrap(HOOKS[name](), Words())
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([rank, 5])).backward()
        grad = ddp.module.words.weight.grad
        assert grad.is_sparse
        weight = ddp.module.last.weight.detach()
        wanted = torch.zeros(10, 3)
        for each in range(2):
            wanted[[each, 5]] += weight / 2
        torch.testing.assert_close(grad.to_dense(), wanted)
        check_equal_on_all_ranks([p.grad for p in ddp.parameters()])


@EACH
def test_sparse_gradients_are_averaged_as_they_are(pair: RankPool, name: str) -> None:
    pair.run(sparse, name)


def one_element(rank: int, name: str) -> None:
    shapes = [(1,), (1, 1), ()]
    ddp = wrap(HOOKS[name](), Given(shapes), cap=0)
    world = distributed.get_world_size()
    total = [torch.zeros(shape) for shape in shapes]
    for _ in range(3):  # in one bucket, then in three
        for sum_, grad in zip(
            total, run_step(ddp, [torch.full(shape, rank + 1.0) for shape in shapes]), strict=True
        ):
            sum_ += grad
    assert distance(total, [torch.full(shape, 3 * (world + 1) / 2) for shape in shapes]) < 1e-5


@EACH
def test_buckets_of_one_element(ranks: RankPool, name: str) -> None:
    ranks.run(one_element, name)


def not_finite(rank: int, name: str, bad: float) -> None:
    ddp = wrap(HOOKS[name]())
    own = gradients(rank)
    for _ in range(2):
        run_step(ddp, own)
    spoilt = [grad.clone() for grad in own]
    if rank == 1:
        spoilt[2][3, 4] = spoilt[5][599] = bad
    found = run_step(ddp, spoilt)
    assert not found[2][3, 4].isfinite()
    assert not found[5][599].isfinite()
    after = run_step(ddp, own)
    check_equal_on_all_ranks(after)
    assert all(grad.isfinite().all() for grad in after)


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_every_rank_and_is_over_with_the_step(
    ranks: RankPool, name: str, bad: float
) -> None:
    ranks.run(not_finite, name, bad)


def alone(rank: int) -> None:
    for make in HOOKS.values():
        ddp = wrap(make())
        for step in range(2):
            assert distance(run_step(ddp, gradients(rank, step=step)), gradients(rank, step=step)) == 0


def test_a_rank_alone_loses_nothing() -> None:
    run_ranks(alone, 1)
