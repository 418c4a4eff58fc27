"""Several wrappers on one group, in one backward: their collectives must not mix."""

import copy
import functools
import gc
import weakref

import batches
import pytest
import torch
from torch import nn
from wrappers import WRAPPERS

from paceline import DistributedDataParallel, PeerError
from paceline.testing import RankPool, run_ranks

TIMEOUT = 20.0
TINY_BUCKETS = 1e-5

rows = functools.partial(batches.rows, count=2, dtype=torch.float64)


class Chain(nn.Module):
    """Linear layers, of which the second can be left out; raises on request."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.width = width

    def forward(self, x: torch.Tensor, *, skip: bool = False, fail: bool = False) -> torch.Tensor:
        if fail:
            raise ValueError("planted")
        for number, layer in enumerate(self.layers):
            if not (skip and number == 1):
                x = layer(x).tanh()
        return x


def two() -> tuple[Chain, Chain]:
    torch.manual_seed(0)
    return Chain(3).double(), Chain(5).double()


def loss(nets: tuple[nn.Module, nn.Module], rank: int, step: int) -> torch.Tensor:
    first, second = nets
    # Another part of each is left out on each rank, so that buckets are full at other times.
    a = first(rows(rank, step, width=3), skip=rank == 1 and step > 1)
    b = second(rows(rank, step, width=5), skip=rank == 0 and step > 2)
    return a.square().mean() + b.square().mean() * a.mean()


def one_loss(rank: int) -> None:
    plain = two()
    wrapped = tuple(DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS) for net in two())
    for step in range(5):
        for net in (*plain, *wrapped):
            net.zero_grad()
        for each in range(2):
            (loss(plain, each, step) / 2).backward()
        loss(wrapped, rank, step).backward()
        for net, ddp in zip(plain, wrapped, strict=True):
            for want, got in zip(net.parameters(), ddp.parameters(), strict=True):
                torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-15)


def test_wrappers_in_one_loss_average_in_one_order_on_every_rank() -> None:
    run_ranks(one_loss, timeout=TIMEOUT)


def step_with_fault(wrapped: tuple[nn.Module, nn.Module], rank: int, faulty: int) -> str:
    a, b = wrapped
    for net in wrapped:
        net.zero_grad()
    try:
        x = a(rows(rank, 0, width=3), fail=rank == 0 and faulty == 0)
        y = b(rows(rank, 0, width=5), fail=rank == 0 and faulty == 1)
        (x.square().mean() + y.square().mean()).backward()
    except (ValueError, PeerError) as error:
        return type(error).__name__
    return "fine"


def faults(rank: int) -> list[str]:
    wrapped = tuple(DistributedDataParallel(net) for net in two())
    # -1: on none.
    return [step_with_fault(wrapped, rank, faulty) for faulty in (-1, 0, -1, 1, -1, 1, 0, -1)]


def test_a_fault_in_one_of_them_loses_one_step_and_no_more() -> None:
    on_rank_0, on_rank_1 = run_ranks(faults, timeout=TIMEOUT)
    assert on_rank_0 == ["fine" if faulty < 0 else "ValueError" for faulty in (-1, 0, -1, 1, -1, 1, 0, -1)]
    assert on_rank_1 == ["fine" if faulty < 0 else "PeerError" for faulty in (-1, 0, -1, 1, -1, 1, 0, -1)]


def freed(_: int) -> bool:
    gc.disable()  # a rank of its own, which ends with the call
    ddp = DistributedDataParallel(Chain(3))
    for _ in range(3):
        ddp(torch.randn(2, 3)).sum().backward()
    reducer = weakref.ref(ddp._reducer)
    del ddp
    return reducer() is None


def test_a_wrapper_is_freed_at_once_so_that_another_can_take_its_module() -> None:
    assert run_ranks(freed, timeout=TIMEOUT) == [True, True]


def nested(rank: int, outer: str, inner: str) -> None:
    """Layers so large that their gradients would be taken the moment they are ready."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).double()
    net = copy.deepcopy(plain)
    ddp = WRAPPERS[outer](WRAPPERS[inner](net), bucket_cap_mb=0.5)
    for step in range(4):
        for each in (plain, ddp):
            each.zero_grad()
        for each in range(2):
            (plain(rows(each, step, width=256)).square().mean() / 2).backward()
        ddp(rows(rank, step, width=256)).square().mean().backward()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("outer", "inner"), [("torch", "paceline"), ("paceline", "torch"), ("paceline", "paceline")]
)
def test_one_around_another_gives_the_gradients_of_one(pool: RankPool, outer: str, inner: str) -> None:
    pool.run(nested, outer, inner)
