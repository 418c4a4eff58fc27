"""Gradients are lent: parts of the buckets' storage, which do not change while somebody holds them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import rows
from torch import Tensor, nn
from wrappers import Net, grads, of_whole_batch, train

from paceline import DistributedDataParallel, MixedPrecision
from paceline.testing import RankPool

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["lent", "views"])


def make(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net().double(), **options)


def is_averaged(ddp: DistributedDataParallel, step: int) -> bool:
    return all(map(torch.allclose, grads(ddp), of_whole_batch(Net().double(), step)))


def addresses(ddp: nn.Module) -> list[int]:
    return [p.grad.data_ptr() for p in ddp.parameters() if p.grad is not None]


def storages(ddp: nn.Module) -> set[int]:
    return {p.grad.untyped_storage().data_ptr() for p in ddp.parameters() if p.grad is not None}


def _given_to_another(grad: Tensor) -> nn.Parameter:
    other = nn.Parameter(torch.zeros_like(grad))
    other.grad = grad
    return other


KEEP: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda grad: grad,
    "numpy": lambda grad: grad.numpy(),
    "flat": lambda grad: grad.view(-1),
    "an element": lambda grad: grad[0],
    "data": lambda grad: grad.data,
    "of another parameter": _given_to_another,
}


def values(kept: Any) -> Tensor:
    return torch.as_tensor(kept.grad if isinstance(kept, nn.Parameter) else kept).clone()


def held_over_steps(rank: int, what: str, how: str) -> None:
    ddp = make(bucket_cap_mb=1e-5)
    kept: list[tuple[Any, Tensor]] = []
    for step in range(5):
        train(ddp, rank, step)
        assert is_averaged(ddp, step)
        holders = [KEEP[what](p.grad) for p in ddp.parameters()]
        kept = [] if how == "for a step" else kept
        kept += [(holder, values(holder)) for holder in holders]
        train(ddp, rank, step + 100)
        assert is_averaged(ddp, step + 100)
        assert all(values(holder).equal(then) for holder, then in kept)


@pytest.mark.parametrize("what", KEEP)
@pytest.mark.parametrize("how", ["for a step", "for good"])
def test_a_gradient_that_is_held_stays_as_it_was(pair: RankPool, what: str, how: str) -> None:
    pair.run(held_over_steps, what, how)


def lent(rank: int, options: dict[str, Any]) -> None:
    ddp = make(**options)
    for step in range(2):
        train(ddp, rank, step)
    before = addresses(ddp)
    assert len(storages(ddp)) == 1
    for step in range(2, 5):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        ddp(rows(rank, step).double()).square().mean().backward()
        assert is_averaged(ddp, step)
        assert addresses(ddp) == before
    held = ddp.module.first.bias.grad
    train(ddp, rank, 5)
    after = addresses(ddp)
    if options.get("gradient_as_bucket_view"):
        assert after == before
        return
    assert not set(after) & set(before)
    del held
    train(ddp, rank, 6)
    assert addresses(ddp) == after


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["lent", "views"])
def test_storage_that_nobody_holds_is_used_again(pair: RankPool, options: dict[str, Any]) -> None:
    pair.run(lent, options)


def lent_with_a_hook(rank: int) -> None:
    ddp = make()
    ddp.register_comm_hook(
        None,
        lambda _, bucket: ddp.reducer._run_allreduce_hook(bucket).then(lambda done: done.value()[0].div_(2)),
    )
    for step in range(4):
        train(ddp, rank, step)
        assert is_averaged(ddp, step)
        if step == 1:
            before = addresses(ddp)
    assert addresses(ddp) == before


def test_storage_is_used_again_with_a_communication_hook(pair: RankPool) -> None:
    pair.run(lent_with_a_hook)


def own_buffer(rank: int) -> None:
    ddp = make()
    flat = torch.zeros(sum(p.numel() for p in ddp.parameters()), dtype=torch.float64)
    parts = flat.split([p.numel() for p in ddp.parameters()])
    for p, part in zip(ddp.parameters(), parts, strict=True):
        p.grad = part.view_as(p)
    for step in range(3):
        flat.zero_()
        ddp(rows(rank, step).double()).square().mean().backward()
        assert is_averaged(ddp, step)
        whole = torch.cat([grad.flatten() for grad in of_whole_batch(Net().double(), step)])
        torch.testing.assert_close(flat, whole)


def test_averages_go_to_gradients_that_users_keep_in_memory_of_their_own(pair: RankPool) -> None:
    pair.run(own_buffer)


def accumulated(rank: int) -> None:
    ddp = make()
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(rows(rank, step).double()).square().mean().backward()
        held = [p.grad for p in ddp.parameters()]
        arrays = [p.grad.numpy() for p in ddp.parameters()]
        ddp(rows(rank, step).double()).square().mean().backward()
        for p, own, array, once in zip(
            ddp.parameters(), held, arrays, of_whole_batch(Net().double(), step), strict=True
        ):
            assert p.grad is own
            torch.testing.assert_close(own, 2 * once)
            torch.testing.assert_close(torch.as_tensor(array), 2 * once)


def test_a_gradient_that_is_held_while_passes_add_to_it_stays_the_same_tensor(pair: RankPool) -> None:
    pair.run(accumulated)


def other_data(rank: int, view: bool, clears: bool) -> None:
    ddp = make(gradient_as_bucket_view=view)
    for step in range(4):
        train(ddp, rank, step)
        assert is_averaged(ddp, step)
        # As many aliases more as there are views less.
        held = [p.grad.data for p in ddp.parameters()]
        for p in ddp.parameters():
            p.grad.data = 2 * p.grad.data
        if clears:
            ddp.zero_grad()
        ddp(rows(rank, step).double()).square().mean().backward()
        times = 1 if clears else 3
        for p, once in zip(ddp.parameters(), of_whole_batch(Net().double(), step), strict=True):
            torch.testing.assert_close(p.grad, times * once)
        del held


@VIEWS
@pytest.mark.parametrize("clears", [True, False])
def test_a_gradient_may_be_given_other_data(pair: RankPool, view: bool, clears: bool) -> None:
    pair.run(other_data, view, clears)


def let_go_in_backward(rank: int, how: str) -> None:
    ddp = make()
    bias = ddp.module.first.bias
    for step in range(2):
        train(ddp, rank, step)
    older = grads(ddp)
    held = []

    def let_go(_: Tensor) -> None:
        if how == "cleared":
            held.append((bias.grad, bias.grad.clone()))
            bias.grad = None

    def replace(p: Tensor) -> None:
        if how == "other data":
            p.grad.data = p.grad.data.clone()

    for handle in (bias.register_hook(let_go), bias.register_post_accumulate_grad_hook(replace)):
        assert handle is not None
    ddp(rows(rank, 7).double()).square().mean().backward()
    for p, before, once in zip(ddp.parameters(), older, of_whole_batch(Net().double(), 7), strict=True):
        torch.testing.assert_close(p.grad, once if p is bias and how == "cleared" else before + once)
    assert all(grad.equal(then) for grad, then in held)


@pytest.mark.parametrize("how", ["cleared", "other data"])
def test_a_gradient_that_is_let_go_in_the_midst_of_backward(pair: RankPool, how: str) -> None:
    pair.run(let_go_in_backward, how)


def like_others(rank: int) -> None:
    ddp = make()
    for step in range(3):
        train(ddp, rank, step)
        first, last = ddp.module.first.weight.grad, ddp.module.last.weight.grad
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        product = (scale * first).sum()
        last.mul_(2)  # another gradient, though of the same storage
        product.backward()
        torch.testing.assert_close(scale.grad, first.sum())
        first.detach_()
        assert not first._is_view()


def test_a_lent_gradient_is_a_tensor_like_any_other(pair: RankPool) -> None:
    pair.run(like_others)


def lowered(rank: int) -> None:
    ddp = DistributedDataParallel(Net(), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(3):
        train(ddp, rank, step)
        assert len(storages(ddp)) == 4
        kept += [(p.grad, p.grad.clone()) for p in ddp.parameters()]
        assert all(grad.equal(then) for grad, then in kept)


def test_gradients_that_travel_in_another_type_are_their_own(pair: RankPool) -> None:
    pair.run(lowered)
