"""Ranks that average by different hooks are refused, whatever the hooks differ in."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline import DistributedDataParallel, hooks
from paceline.errors import MismatchError
from paceline.hooks import Hook
from paceline.testing import RankPool

# A hook for each rank, and how the message names them.
DIFFERENT: Mapping[str, tuple[Callable[[], Hook | None], Callable[[], Hook | None], str, str]] = {
    "type": (hooks.fp16, hooks.bf16, "float16", "bfloat16"),
    "bits": (hooks.int8, hooks.int4, "int8 with error feedback", "int4 with error feedback"),
    "feedback": (
        hooks.bf16,
        lambda: hooks.with_error_feedback(hooks.bf16()),
        "bfloat16",
        "bfloat16 with error feedback",
    ),
    "fraction": (
        hooks.top_k,
        lambda: hooks.top_k(0.5),
        "top_k(0.01) with error feedback",
        "top_k(0.5) with error feedback",
    ),
    "rank": (
        hooks.power_sgd,
        lambda: hooks.power_sgd(2),
        "power_sgd(1, start_step=10)",
        "power_sgd(2, start_step=10)",
    ),
    "start step": (
        hooks.power_sgd,
        lambda: hooks.power_sgd(start_step=0),
        "power_sgd(1, start_step=10)",
        "power_sgd(1, start_step=0)",
    ),
    "period": (
        lambda: hooks.post_local_sgd(start_step=1, period=2),
        lambda: hooks.post_local_sgd(start_step=1, period=3),
        "post_local_sgd(start_step=1, period=2)",
        "post_local_sgd(start_step=1, period=3)",
    ),
    "class": (hooks.average, hooks.fp16, "PlainAverage", "float16"),
    "one without": (lambda: None, hooks.fp16, "None", "float16"),
}


def refused(rank: int, name: str) -> str:
    with pytest.raises(MismatchError) as error:
        DistributedDataParallel(nn.Linear(2, 2), hook=DIFFERENT[name][rank]())
    return str(error.value)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_hooks_are_refused_and_both_are_named(name: str, pair: RankPool) -> None:
    first, second = pair.run(refused, name)
    assert first == second
    _, _, *names = DIFFERENT[name]
    assert f"(rank 0: {names[0]}, rank 1: {names[1]})" in first


def taken(_: int, name: str) -> str:
    made = DIFFERENT[name][1]()
    ddp = DistributedDataParallel(nn.Linear(2, 2), hook=made)
    return str(ddp._reducer.exchange.name)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_equal_hooks_of_their_own_are_not_refused(name: str, pair: RankPool) -> None:
    first, second = pair.run(taken, name)
    assert first == second


# What ranks register after they have wrapped. The collectives of both are the same.
REGISTERED: Mapping[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "type": DIFFERENT["type"],
    "feedback": DIFFERENT["feedback"],
    "futures": (hooks.average, lambda: allreduce_hook, "PlainAverage", "a hook that returns futures"),
}


def registered(rank: int, name: str, after: int) -> str:
    ddp = DistributedDataParallel(nn.Linear(2, 2), transport="c10d")
    for _ in range(after):
        ddp(torch.ones(1, 2)).sum().backward()
    ddp.zero_grad()
    ddp.register_comm_hook(None, REGISTERED[name][rank]())
    for _ in range(2):
        with pytest.raises(MismatchError) as error:
            ddp(torch.ones(1, 2)).sum().backward()
        assert all(parameter.grad is None for parameter in ddp.parameters())
    return str(error.value)


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("name", REGISTERED)
def test_a_step_by_different_hooks_is_lost_on_every_rank_and_both_are_named(
    name: str, after: int, pair: RankPool
) -> None:
    first, second = pair.run(registered, name, after)
    _, _, *names = REGISTERED[name]
    assert first == second
    assert f"the same hook; the step is lost on every rank (rank 0: {names[0]}, rank 1: {names[1]})" in first
