"""Weighed passes: what they average to, what they refuse, and what they leave as it was."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import batches
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline import DistributedDataParallel
from paceline.errors import OptionError, PeerError, WeightsError
from paceline.testing import RankPool

WIDE = 32768  # elements from which a gradient is taken at once
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
Grads = dict[str, Tensor | None]

rows = functools.partial(batches.rows, width=8, dtype=torch.float64)


class Net(nn.Module):
    """A large and some small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.linspace(-1, 1, WIDE).reshape(8, -1))
        self.small = nn.Linear(8, 4)
        self.rare = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *, rare: bool = True) -> Tensor:
        out = self.small(x).tanh() + (x @ self.large).mean(1, keepdim=True)
        return out * self.rare if rare else out


def make(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net().double(), **options)


def loss(net: nn.Module, x: Tensor, **options: bool) -> Tensor:
    return net(x, **options).square().sum(1).mean()


def grads(net: nn.Module) -> Grads:
    inner = net.module if isinstance(net, DistributedDataParallel) else net
    return {
        name: None if parameter.grad is None else parameter.grad.to_dense().clone()
        for name, parameter in inner.named_parameters()
    }


def alone(x: Tensor, **options: bool) -> Grads:
    """What one process makes of all rows."""
    torch.manual_seed(0)
    net = Net().double()
    loss(net, x, **options).backward()
    return grads(net)


def same(got: Grads, want: Grads, tolerance: float = 1e-12) -> None:
    assert got.keys() == want.keys()
    for name, wanted in want.items():
        found = got[name]
        assert (found is None) == (wanted is None), f"{name}: {found}, {wanted}"
        if wanted is not None:
            assert found is not None
            torch.testing.assert_close(
                found,
                wanted,
                rtol=tolerance,
                atol=tolerance,
                msg=f"{name}: {(found - wanted).abs().max()} off",
            )


def passes_and_empty_ranks(rank: int, view: bool) -> None:
    world = torch.distributed.get_world_size()
    ddp = make(gradient_as_bucket_view=view, bucket_cap_mb=1e-5)
    for step in range(3):
        counts = [[(r + k + step) % 3 for r in range(world)] for k in range(3)]
        parts = [
            [rows(100 * step + 10 * k + r, count=n) for r, n in enumerate(ns)] for k, ns in enumerate(counts)
        ]
        ddp.zero_grad()
        for k in range(3):
            x = parts[k][rank]
            with contextlib.nullcontext() if k == 2 else ddp.no_sync(), ddp.weigh(len(x)):
                loss(ddp, x).backward()  # NaN without rows
        same(grads(ddp), alone(torch.cat([x for part in parts for x in part])))


@VIEWS
def test_accumulation_with_empty_ranks_is_one_process_on_all_rows(ranks: RankPool, view: bool) -> None:
    ranks.run(passes_and_empty_ranks, view)


def old_gradients(rank: int, view: bool) -> None:
    world = torch.distributed.get_world_size()
    ddp = make(gradient_as_bucket_view=view)
    total: Grads = dict.fromkeys(grads(ddp))
    for step in range(4):
        parts = [rows(10 * step + r, count=r + 1) for r in range(world)]
        with ddp.weigh(rank + 1):
            loss(ddp, parts[rank], rare=step < 2).backward()
        for name, grad in alone(torch.cat(parts), rare=step < 2).items():
            before = total[name]
            total[name] = grad if before is None else before if grad is None else before + grad
        same(grads(ddp), total)


@VIEWS
def test_what_was_there_before_is_added_to(ranks: RankPool, view: bool) -> None:
    ranks.run(old_gradients, view)


def in_one_block(rank: int, way: str) -> None:
    ddp = make()
    for step in range(3):
        first, second = ([rows(10 * step + 2 * r + k, count=r + 1) for r in range(2)] for k in range(2))
        ddp.zero_grad()
        with ddp.weigh(float(rank + 1)):
            if way == "two backwards":
                loss(ddp, first[rank]).backward()
                loss(ddp, second[rank]).backward()
            elif way == "one without sync":
                with ddp.no_sync():
                    loss(ddp, first[rank]).backward()
                loss(ddp, second[rank]).backward()
            else:
                torch.autograd.backward([loss(ddp, first[rank]), loss(ddp, second[rank])])
        one, two = alone(torch.cat(first)), alone(torch.cat(second))
        same(grads(ddp), {name: one[name] + two[name] for name in one})  # type: ignore[operator]


@pytest.mark.parametrize("way", ["two backwards", "one without sync", "two losses"])
def test_losses_in_one_block_add_up(pair: RankPool, way: str) -> None:
    pair.run(in_one_block, way)


def training_inside(rank: int, view: bool, to_none: bool) -> None:
    ddp = make(gradient_as_bucket_view=view)
    torch.manual_seed(0)
    plain = Net().double()
    inner, outer = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ddp, plain))
    for step in range(3):
        parts = [rows(10 * step + r, count=r + 1) for r in range(2)]
        outer.zero_grad(set_to_none=to_none)
        loss(plain, torch.cat(parts)).backward()
        outer.step()
        with ddp.weigh(rank + 1):
            inner.zero_grad(set_to_none=to_none)
            loss(ddp, parts[rank]).backward()
            inner.step()
        same(grads(ddp), grads(plain))


@VIEWS
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_and_step_inside_the_block(pair: RankPool, view: bool, to_none: bool) -> None:
    pair.run(training_inside, view, to_none)


def some_only(rank: int, view: bool) -> None:
    ddp = make(gradient_as_bucket_view=view, bucket_cap_mb=1e-5)
    for step in range(4):
        lost = step in (0, 2)
        ddp.zero_grad()
        without = lost and rank == 1
        raises = (
            pytest.raises(WeightsError, match=r"without a weight: \[1\]")
            if lost
            else contextlib.nullcontext()
        )
        with raises, contextlib.nullcontext() if without else ddp.weigh(rank + 1):
            loss(ddp, rows(rank, count=rank + 1)).backward()
        if not lost:
            same(grads(ddp), alone(torch.cat([rows(r, count=r + 1) for r in range(2)])))
        else:
            assert all(grad is None for grad in grads(ddp).values())


@VIEWS
def test_a_weight_on_some_ranks_only_is_refused_on_all_and_the_next_step_is_clean(
    pair: RankPool, view: bool
) -> None:
    pair.run(some_only, view)


def mixed(_: int, order: str) -> None:
    ddp = make()

    def run(kind: str) -> None:
        with contextlib.ExitStack() as stack:
            if kind.isupper():
                stack.enter_context(ddp.weigh(3))
            if kind.lower() == "a":
                stack.enter_context(ddp.no_sync())
            loss(ddp, rows(1, count=3)).backward()

    with pytest.raises((WeightsError, OptionError, PeerError)):
        [run(kind) for kind in order]
    ddp.zero_grad()
    run("S")
    same(grads(ddp), alone(rows(1, count=3)))


@pytest.mark.parametrize("order", ["As", "aS", "AaS", "aAS", "AAaS"])
def test_weighed_and_plain_passes_do_not_mix(pair: RankPool, order: str) -> None:
    # a: accumulated, s: synced; a capital letter is weighed
    pair.run(mixed, order)


def refused(_: int) -> None:
    ddp = make()
    loss(ddp, rows(0, count=2)).backward()
    before = grads(ddp)
    bad = [
        -1,
        -0.5,
        float("nan"),
        float("inf"),
        True,
        "3",
        None,
        torch.tensor([1.0, 2.0]),
        torch.tensor(True),
        1j,
    ]
    for weight in bad:
        with pytest.raises((OptionError, RuntimeError)), ddp.weigh(weight):  # type: ignore[arg-type]
            raise AssertionError(f"{weight} was taken")
    same(grads(ddp), before)
    with pytest.raises(ZeroDivisionError), ddp.weigh(2):
        _ = 1 / 0
    same(grads(ddp), before)


def test_bad_weights_and_errors_before_backward_change_nothing(pair: RankPool) -> None:
    pair.run(refused)


def nested(rank: int) -> None:
    ddp = make()
    loss(ddp, rows(rank, count=2)).backward()
    before = grads(ddp)
    with ddp.weigh(2), pytest.raises(OptionError, match="in force already"), ddp.weigh(3):
        pass
    same(grads(ddp), before)
    ddp.zero_grad()
    with ddp.no_sync(), ddp.weigh(rank + 1):
        loss(ddp, rows(rank, count=rank + 1)).backward()
    with ddp.weigh(rank + 2):
        with pytest.raises(OptionError, match="in force already"), ddp.weigh(3):
            pass
        loss(ddp, rows(5 + rank, count=rank + 2)).backward()
    everything = [rows(r, count=r + 1) for r in range(2)] + [rows(5 + r, count=r + 2) for r in range(2)]
    same(grads(ddp), alone(torch.cat(everything)))


def test_a_weight_inside_another_is_refused_and_nothing_is_lost(pair: RankPool) -> None:
    pair.run(nested)


def numbers(rank: int, make_weight: Callable[[int], Any]) -> None:
    ddp = make()
    ddp.backward(loss(ddp, rows(rank, count=rank + 1)), weight=make_weight(rank + 1))
    same(grads(ddp), alone(torch.cat([rows(r, count=r + 1) for r in range(2)])))


def as_numpy(count: int) -> Any:
    return torch.tensor(count).numpy()[()]


@pytest.mark.parametrize(
    "make_weight", [int, float, torch.tensor, as_numpy], ids=["int", "float", "tensor", "numpy"]
)
def test_a_weight_may_be_any_kind_of_number(pair: RankPool, make_weight: Callable[[int], Any]) -> None:
    pair.run(numbers, make_weight)


def interrupted_pass(rank: int) -> None:
    ddp = make()
    with ddp.no_sync(), ddp.weigh(rank + 1):
        loss(ddp, rows(rank, count=rank + 1), rare=False).backward()
    with pytest.raises(ZeroDivisionError), ddp.no_sync(), ddp.weigh(7):
        _ = loss(ddp, rows(9, count=7)).backward() or 1 / 0
    with ddp.weigh(rank + 2):
        loss(ddp, rows(5 + rank, count=rank + 2), rare=False).backward()
    everything = [rows(r, count=r + 1) for r in range(2)] + [rows(5 + r, count=r + 2) for r in range(2)]
    same(grads(ddp), alone(torch.cat(everything), rare=False))


def test_a_block_left_by_an_error_does_not_count(pair: RankPool) -> None:
    pair.run(interrupted_pass)


def low_precision(rank: int, dtype: torch.dtype, hook: str) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 3).to(dtype))
    if hook:
        ddp.register_comm_hook(None, getattr(default_hooks, hook))
    weights = [100_001, 300_007]
    x = torch.full((2, 4), float(rank + 1), dtype=dtype)
    with ddp.weigh(weights[rank]):
        ddp(x).sum(1).mean().backward()
    want = (weights[0] + 2 * weights[1]) / sum(weights)
    torch.testing.assert_close(
        ddp.module.weight.grad.double(), torch.full((3, 4), want, dtype=torch.float64), rtol=0.01, atol=0.0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hook", ["", "allreduce_hook"])
def test_counts_of_tokens_are_exact_divisors_in_low_precision(
    pair: RankPool, dtype: torch.dtype, hook: str
) -> None:
    pair.run(low_precision, dtype, hook)


class Words(nn.Module):
    """A sparse embedding whose weight is also used densely."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, sparse=True)
        self.top = nn.Linear(4, 2)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        return self.top(self.words(x) if kind == "sparse" else self.words.weight[x])


def sparse(rank: int, kinds: str) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Words().double())
    torch.manual_seed(0)
    plain = Words().double()
    names = {"s": "sparse", "d": "dense"}
    ids = [[torch.tensor([0, 1, r]), torch.tensor([r + 2] * (r + 1))] for r in range(2)]
    total = sum(len(part) for own in ids for part in own)
    for _ in range(3):
        ddp.zero_grad()
        plain.zero_grad()
        for number, kind in enumerate(kinds):
            for own in ids:
                part = own[number]
                (plain(part, names[kind]).square().sum() / total).backward()
            part = ids[rank][number]
            with ddp.no_sync() if number == 0 else contextlib.nullcontext(), ddp.weigh(len(part)):
                (ddp(part, names[kind]).square().sum() / len(part)).backward()
        same(grads(ddp), grads(plain))


@pytest.mark.parametrize("kinds", ["ss", "dd", "sd", "ds"])
def test_sparse_embeddings_are_weighed(pair: RankPool, kinds: str) -> None:
    pair.run(sparse, kinds)
