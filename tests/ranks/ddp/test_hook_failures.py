"""A communication hook that fails on one rank: no rank is left waiting, and the next step is right."""

import contextlib
from typing import Any

import pytest
import torch
from batches import rows
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from wrappers import be_impatient, equal_on_all, grads, raise_planned, two_layers

from paceline import (
    DistributedDataParallel,
    StepError,
)
from paceline.hooks.hook import Hook
from paceline.testing import RankPool, run_ranks


def raised_and_then(rank: int, where: str) -> str:
    """The rank that raised goes to a barrier before it calls forward again."""
    module = two_layers()
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, allreduce_hook)
    ddp(rows(rank)).sum().backward()
    handle = None
    if rank == 0:
        handle = (
            module.register_forward_pre_hook(raise_planned)
            if where == "forward"
            else module[0].weight.register_hook(raise_planned)
        )
    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
        ddp(rows(rank)).sum().backward()
    if handle is not None:
        handle.remove()
    distributed.barrier()
    return type(caught.value).__name__


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_with_a_hook_word_of_an_exception_does_not_wait_for_the_next_forward(
    pair: RankPool, where: str
) -> None:
    assert pair.run(raised_and_then, where) == ["ZeroDivisionError", "PeerError"]


class FailingHook:
    """Averages; when on, raises as told."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.on = False

    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]
        if self.on and self.how == "call":
            raise LookupError("planned")
        future = allreduce_hook(state, bucket)
        return future.then(lambda _: 1 / 0) if self.on else future


def failing_future(rank: int, cap: float) -> None:
    ddp = DistributedDataParallel(two_layers(), bucket_cap_mb=cap)
    hook = FailingHook("future")
    ddp.register_comm_hook(None, hook)
    ddp(rows(rank)).sum().backward()
    hook.on = rank == 0
    with pytest.raises(RuntimeError):
        ddp(rows(rank)).sum().backward()
    hook.on = False
    ddp.zero_grad()
    ddp(rows(rank)).sum().backward()
    assert equal_on_all(grads(ddp))


@pytest.mark.parametrize("cap", [1e-5, 25.0], ids=["many", "one"])
def test_a_hooks_future_that_fails_on_one_rank(pair: RankPool, cap: float) -> None:
    pair.run(failing_future, cap)


def failing_on_unfrozen(rank: int, how: str) -> None:
    be_impatient()
    module = two_layers()
    module[2].bias.requires_grad_(False)
    ddp = DistributedDataParallel(module)
    hook = FailingHook(how)

    def only_extra(state, bucket):  # type: ignore[no-untyped-def]
        hook.on = rank == 0 and unfrozen and bucket.index() >= 1
        return hook(state, bucket)

    unfrozen = False
    ddp.register_comm_hook(None, only_extra)
    ddp(rows(rank)).sum().backward()
    module[2].bias.requires_grad_(True)
    unfrozen = True
    with pytest.raises((LookupError, RuntimeError)):
        ddp(rows(rank)).sum().backward()


@pytest.mark.parametrize("how", ["call", "future"])
def test_a_hook_that_fails_on_one_rank_for_a_unfrozen_parameter(how: str) -> None:
    run_ranks(failing_on_unfrozen, args=(how,), timeout=20.0)


class TrippingRounds(Hook):
    on = False

    def reduce(self, bucket: Any, group: Any) -> Any:
        yield group.all_reduce(bucket.buffer().div_(group.size))
        if self.on:
            raise LookupError("planned")
        yield group.all_reduce(torch.ones(3))
        return bucket.buffer()


def tripping_rounds(rank: int) -> None:
    be_impatient()
    ddp = DistributedDataParallel(two_layers())
    hook = TrippingRounds()
    ddp.register_comm_hook(None, hook)
    ddp(rows(rank)).sum().backward()
    hook.on = rank == 0
    with pytest.raises(RuntimeError):
        ddp(rows(rank)).sum().backward()


def test_an_own_hook_that_raises_between_its_collectives_on_one_rank() -> None:
    run_ranks(tripping_rounds, timeout=20.0)


def out_of_step(rank: int) -> None:
    """A step of an optimizer in backward fails on one rank, whose count of steps is then one ahead."""
    be_impatient()
    module = two_layers()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(module)
    hook = FailingHook("call")
    ddp.register_comm_hook(None, hook)
    ddp(rows(rank)).sum().backward()
    if rank == 0:
        handle = module[0].weight._in_backward_optimizers[0].register_step_pre_hook(raise_planned)
    with contextlib.suppress(ZeroDivisionError):
        ddp(rows(rank)).sum().backward()
    if rank == 0:
        handle.remove()
    hook.on = rank == 0
    with pytest.raises((LookupError, RuntimeError)):
        ddp(rows(rank)).sum().backward()


def test_word_of_a_broken_hook_arrives_after_an_optimizer_in_backward_has_failed() -> None:
    run_ranks(out_of_step, timeout=20.0)


def sparse_result(rank: int) -> str:
    ddp = DistributedDataParallel(two_layers())
    wrong = False

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        future = allreduce_hook(state, bucket)
        return future.then(lambda done: done.value().to_sparse()) if wrong else future

    ddp.register_comm_hook(None, hook)
    wrong = rank == 0
    with pytest.raises(StepError) as caught:
        ddp(rows(rank)).sum().backward()
    wrong = False
    ddp(rows(rank)).sum().backward()
    assert equal_on_all(grads(ddp))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_hooks_result_of_another_layout_on_one_rank(pair: RankPool) -> None:
    mine, theirs = pair.run(sparse_result)
    assert mine.startswith("HookError")
    assert "torch.sparse_coo" in mine
    assert theirs.startswith("PeerError: rank 0 raised")
