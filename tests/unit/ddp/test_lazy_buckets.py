"""Buckets whose storage is allocated as gradients become ready, and released after the step."""

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted_reducers import Rank, assert_works, rows
from scripted_steps import (
    OtherRank,
    arrive,
    assert_grads,
    begun_step,
    finish,
    mean,
    random_grads,
    random_parameters,
    scripted_context,
)
from torch import Tensor

from paceline.ddp.buckets.bucket_set import BucketOptions
from paceline.ddp.buckets.dense import LARGE_NUMEL
from paceline.ddp.exchange.generator_hook import GeneratorHookExchange
from paceline.ddp.reducer.step_context import StepContext
from paceline.ddp.reducer.step_report import RankReport, StepOutcome
from paceline.errors import PeerError
from paceline.hooks import average

VIEWS = pytest.mark.parametrize("as_views", [False, True], ids=["lent", "views"])


class Memory:
    """Makes storages, and knows how many there are still."""

    def __init__(self) -> None:
        self._alive: set[int] = set()
        self.made = 0

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG002
        memory = (ctypes.c_ubyte * (numel * dtype.itemsize))()
        self.made += 1
        self._alive.add(self.made)
        weakref.finalize(memory, self._alive.discard, self.made)
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    @property
    def held(self) -> int:
        return len(self._alive)


def lazy_context(memory: Memory, other: OtherRank, **more: Any) -> tuple[StepContext, Callable[..., None]]:
    """Three large parameters in a bucket each, whose storage comes from ``memory``."""
    parameters = random_parameters(*[LARGE_NUMEL] * 3)
    options = BucketOptions(lazy=True, **more)
    context, _, script = scripted_context(
        parameters, (2,), (1,), (0,), others=[other], bucket_options=options
    )
    for bucket in context.bucket_set.buckets:
        bucket._empty = memory.empty  # type: ignore[union-attr]  # all are dense
    return context, script.in_next_step


@VIEWS
def test_storage_comes_with_the_first_gradient_and_goes_with_the_last(as_views: bool) -> None:
    memory = Memory()
    context, next_step = lazy_context(memory, OtherRank(), as_views=as_views)
    parameters = context.parameters.local
    for number in range(3):
        own, others = random_grads(parameters), random_grads(parameters)
        next_step(OtherRank(others))
        step = begun_step(context, number=number)
        held = [memory.held]
        for slot in (2, 1, 0):
            arrive(context, step, {slot: own[slot]})
            held.append(memory.held)
        assert held == [0, 1, 2, 3]
        finish(step)
        del step  # a reducer keeps it no longer either
        assert_grads(parameters, {slot: mean(own[slot], others[slot]) for slot in range(3)})
        assert memory.held == 3  # behind the gradients
        parameters[1].grad = None
        assert memory.held == 2
        for each in parameters:
            each.grad = None
        assert memory.held == 0
    assert memory.made == 9


@VIEWS
def test_gradients_that_are_kept_are_added_to(as_views: bool) -> None:
    memory = Memory()
    context, next_step = lazy_context(memory, OtherRank(), as_views=as_views)
    parameters = context.parameters.local
    total = {slot: torch.zeros_like(each).detach() for slot, each in enumerate(parameters)}
    for number in range(3):
        own, others = random_grads(parameters), random_grads(parameters)
        # The other rank has the sum of earlier averages too.
        next_step(OtherRank({slot: total[slot] + others[slot] for slot in range(3)}))
        step = begun_step(context, number=number)
        for slot in range(3):
            arrive(context, step, {slot: own[slot]})
        finish(step)
        total = {slot: total[slot] + mean(own[slot], others[slot]) for slot in range(3)}
        assert_grads(parameters, total)
        del step
        assert memory.held <= 3  # no storage beside those of the gradients


def test_a_gradient_that_somebody_keeps_stays_as_it_was() -> None:
    memory = Memory()
    context, next_step = lazy_context(memory, OtherRank())
    parameters = context.parameters.local
    kept: list[tuple[Tensor, Tensor]] = []
    for number in range(3):
        next_step(OtherRank(random_grads(parameters)))
        step = begun_step(context, number=number)
        arrive(context, step, random_grads(parameters))
        finish(step)
        grad = parameters[0].grad
        assert grad is not None
        kept.append((grad, grad.clone()))
        for each in parameters:
            each.grad = None
    assert all(grad.equal(copy) for grad, copy in kept)
    del step, grad
    assert memory.held == 3


def test_without_lazy_allocation_the_storage_stays() -> None:
    parameters = random_parameters(3)
    context, *_ = scripted_context(parameters, (0,), others=[OtherRank()])
    step = begun_step(context)
    arrive(context, step, random_grads(parameters))
    finish(step)
    storage = context.bucket_set.buckets[0].storage
    context.bucket_set.end_step()
    assert context.bucket_set.buckets[0].storage is storage


def lazy_rank(memory: Memory, **options: Any) -> Rank:
    this = Rank(lazy_bucket_allocation=True, **options)
    this.group.empty = memory.empty  # type: ignore[method-assign]
    this.reducer.use(this.reducer.exchange)  # with buckets from this memory
    return this


def is_freed(this: Rank, memory: Memory) -> bool:
    """Whether no storage is left once the gradients are gone."""
    this.zero_grad()
    gc.collect()  # an error's traceback may hold what it was raised among
    return memory.held == 0


def test_the_first_step_has_buckets_of_the_usual_size() -> None:
    assert len(Rank(lazy_bucket_allocation=True).reducer.context.bucket_set.buckets) == 4
    assert len(Rank().reducer.context.bucket_set.buckets) == 1


@pytest.mark.parametrize("hook", [False, True], ids=["average", "hook"])
def test_no_storage_is_left_when_the_gradients_are_gone(hook: bool) -> None:
    memory = Memory()
    this = lazy_rank(memory)
    if hook:
        this.reducer.use(GeneratorHookExchange(this.group, average()))  # type: ignore[arg-type]  # stands in
    for _ in range(3):
        assert_works(this)
        assert memory.held > 0
        assert is_freed(this, memory)
    this.accumulate(rows())
    assert memory.held == 0  # passes that are not synced need no bucket
    this.zero_grad()
    this.others.in_next_step(OtherRank(random_grads(this.parameters)))
    this.reducer.run_empty_step()
    assert is_freed(this, memory)


@pytest.mark.parametrize("here", [False, True], ids=["there", "here"])
def test_a_lost_step_leaves_no_storage_once_the_next_one_begins(here: bool) -> None:
    memory = Memory()
    this = lazy_rank(memory)
    assert_works(this)
    outcome = StepOutcome.FINE if here else StepOutcome.RAISED_IN_BACKWARD
    this.others.in_next_step(OtherRank(report=RankReport(outcome=outcome)))
    loss = this.loss(rows())
    hook = this.net.first.weight.register_hook((lambda _: 1 / 0) if here else lambda _: None)
    with pytest.raises(ZeroDivisionError if here else PeerError):
        loss.backward()
    hook.remove()
    del loss
    this.reducer.prepare()
    assert is_freed(this, memory)
    assert_works(this)
    assert is_freed(this, memory)


def test_an_unused_parameter_needs_storage_for_the_step_only() -> None:
    memory = Memory()
    this = lazy_rank(memory)
    for used in ((0, 1), (0, 2), (0, 1, 2, 3)):
        x, other = rows(), random_grads(this.parameters, *used)
        this.step(x, OtherRank(other), skip=True)
        this.assert_mean(this.alone(x, skip=True), other)
        assert is_freed(this, memory)
