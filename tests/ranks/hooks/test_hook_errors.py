"""Hooks of paceline that raise on one rank, and steps that are lost under a hook."""

import contextlib
import gc
from typing import Any

import pytest
import torch
from hook_nets import (
    HOOKS,
    check_equal_on_all_ranks,
    gradients,
    run_step,
    wrap,
)
from torch import Tensor, distributed
from wrappers import be_impatient, equal_on_all

from paceline import (
    hooks,
)
from paceline.comm.group import Group
from paceline.hooks.hook import Reduction
from paceline.testing import RankPool, run_ranks


class TwoRounds(hooks.Hook):
    """Averages, after a first round of another size; raises between the two, once, on rank 1."""

    step = 0

    def reduce(self, bucket: Any, group: Group) -> Reduction:
        yield group.all_reduce(torch.ones(100))
        if self.step == 1 and group.rank == 1:
            raise ZeroDivisionError("mine")
        buffer = bucket.buffer().div_(group.size)
        yield group.all_reduce(buffer)
        return buffer

    def finish(self, parameters: Any, used: Any, total: Any) -> None:  # noqa: ARG002
        self.step += 1


def raises_between(rank: int) -> list[str]:
    be_impatient()
    ddp = wrap(TwoRounds(), cap=25)
    said = []
    for step in range(2):
        try:
            run_step(ddp, gradients(rank, step=step))
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("world", [2, 3])
def test_a_hook_that_raises_in_a_later_round_aborts_nobody(world: int) -> None:
    said = run_ranks(raises_between, world, timeout=20.0)
    assert all("mine" in each[1] for each in said), said


class Exact:
    """A compressor that changes nothing; its fourth message's second encoding raises on rank 1."""

    name = "exact"
    keeps_places = True
    calls = 0

    def encode(self, given: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4 and distributed.get_rank() == 1:
            raise ZeroDivisionError("mine")
        return given.contiguous().view(torch.uint8)

    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return messages.contiguous().view(dtype)[:, :numel].clone()


def compressor_raises(rank: int) -> list[str]:
    be_impatient()
    ddp = wrap(hooks.with_error_feedback(Exact()), cap=25)
    said = []
    for step in range(2):
        try:
            run_step(ddp, gradients(rank, step=step))
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_users_compressor_that_raises_in_the_second_round_hangs_nobody() -> None:
    said = run_ranks(compressor_raises, 3, timeout=15.0)
    assert all("mine" in each[1] for each in said), said


def culprit_goes_elsewhere(rank: int, name: str) -> str:
    ddp = wrap(HOOKS[name]())
    run_step(ddp, gradients(rank))
    said = ""
    try:
        ddp(gradients(rank), fail=rank == 1).backward()
    except Exception as error:
        said = type(error).__name__
    distributed.barrier()  # such as: does everyone want to go on?
    check_equal_on_all_ranks(run_step(ddp, gradients(rank, step=1)))
    return said


@pytest.mark.parametrize("name", ["average", "int8", "power_sgd"])
def test_after_a_lost_step_ranks_may_meet_before_the_next_forward(name: str) -> None:
    assert run_ranks(culprit_goes_elsewhere, 3, args=(name,), timeout=12.0)[1] == "ZeroDivisionError"


class Moody(hooks.Hook):
    """Averages; raises on rank 1 when a step begins or has ended."""

    def __init__(self, where: str) -> None:
        self.where = where

    def reduce(self, bucket: Any, group: Group) -> Reduction:
        buffer = bucket.buffer().div_(group.size)
        yield group.all_reduce(buffer)
        return buffer

    def begin(self, weight: float | None) -> None:  # noqa: ARG002
        self._raise("begin")

    def finish(self, parameters: Any, used: Any, total: Any) -> None:  # noqa: ARG002
        self._raise("finish")

    def _raise(self, where: str) -> None:
        if self.where == where and distributed.get_rank() == 1:
            self.where = ""
            raise ZeroDivisionError("mine")


def moody_hook(rank: int, where: str) -> None:
    be_impatient()
    ddp = wrap(Moody(where))
    for step in range(3):
        with contextlib.suppress(ZeroDivisionError, RuntimeError):
            run_step(ddp, gradients(rank, step=step))
    if where == "begin":  # what the hook would have sent is not known
        ddp._update_process_group(distributed.new_group())
    assert equal_on_all([*run_step(ddp, gradients(rank, step=3))], ddp.process_group)


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_a_hook_that_raises_outside_reduce_breaks_nobody(where: str) -> None:
    run_ranks(moody_hook, 3, args=(where,), timeout=12.0)


def passed_on(rank: int) -> None:
    hook = hooks.int8()
    gc.collect()
    gc.disable()
    try:
        ddp = wrap(hook)
        with contextlib.suppress(ZeroDivisionError, RuntimeError):
            ddp(gradients(rank), fail=rank == 1).backward()
        run_step(ddp, gradients(rank))
        del ddp
        wrap(hook)
    finally:
        gc.enable()


def test_a_wrapper_is_freed_at_once_after_a_lost_step_too(pair: RankPool) -> None:
    pair.run(passed_on)
