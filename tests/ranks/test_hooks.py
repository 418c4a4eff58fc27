"""paceline's own hooks: what comes back is the same on every rank, and off by no more than they say."""

import gc
import re
import weakref
from collections.abc import Callable

import pytest
import torch
from hook_nets import (
    BOUNDS,
    HOOKS,
    SHAPES,
    WITH_MEMORY,
    check_equal_on_all_ranks,
    distance,
    everyones,
    gradients,
    largest,
    mean,
    run_step,
    wrap,
)
from torch import Tensor, distributed

from paceline import PeerError, hooks
from paceline.errors import HookError, OptionError, UnsupportedError
from paceline.testing import RankPool, RanksError

EACH = pytest.mark.parametrize("name", HOOKS)
REMEMBERING = pytest.mark.parametrize("name", WITH_MEMORY)


# One step, and many.


def one_step(rank: int, name: str) -> None:
    ddp = wrap(HOOKS[name]())
    for step in range(3):  # in one bucket, then in several
        found = run_step(ddp, gradients(rank, step=step))
        check_equal_on_all_ranks(found)
        if step == 0 and name in BOUNDS:
            given = everyones(step)
            assert distance(found, mean(given)) <= BOUNDS[name] * largest(given)


@EACH
def test_a_step_is_the_same_on_every_rank_and_off_by_no_more_than_stated(ranks: RankPool, name: str) -> None:
    ranks.run(one_step, name)


def many_steps(rank: int, name: str) -> None:
    steps = 24
    ddp = wrap(HOOKS[name]())
    total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    wanted = mean(everyones())
    first = 0.0
    for step in range(steps):
        found = run_step(ddp, gradients(rank))
        for sum_, grad in zip(total, found, strict=True):
            sum_ += grad
        if step == 0:
            first = distance(found, wanted)
    assert first > 1e-4
    # Without feedback it would stay what it was in the first step.
    assert distance([sum_ / steps for sum_ in total], wanted) < first / 3


@REMEMBERING
def test_with_error_feedback_the_mean_over_steps_is_exact(ranks: RankPool, name: str) -> None:
    ranks.run(many_steps, name)


def two_groups(rank: int, name: str) -> None:
    """A step in one group and the rest in another: what is lost in the first comes in the second."""
    world = distributed.get_world_size()
    again = distributed.new_group([*range(world)])
    ddp, kept = (wrap(HOOKS[name]()) for _ in range(2))
    for step in range(2):
        run_step(ddp, gradients(rank, step=step))
        run_step(kept, gradients(rank, step=step))
    ddp._update_process_group(again)
    # By hand the plan that the other has, so that the same values share a message.
    kept.reducer.planner.restart()
    for step in range(3):
        moved, stayed = (run_step(each, gradients(rank, step=step)) for each in (ddp, kept))
        check_equal_on_all_ranks(moved)
        assert distance(moved, stayed) == 0
    del ddp
    distributed.destroy_process_group(again)


@REMEMBERING
def test_what_is_remembered_outlives_a_change_of_group(ranks: RankPool, name: str) -> None:
    ranks.run(two_groups, name)


# What users do with gradients.


def accumulated(rank: int, name: str) -> None:
    ddp, plain = wrap(HOOKS[name]()), wrap(HOOKS[name]())
    parts = [gradients(rank, step=step) for step in range(2)]
    for _ in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(parts[0]).backward()
        ddp(parts[1]).backward()
        whole = run_step(plain, [a + b for a, b in zip(*parts, strict=True)])
        assert distance([p.grad for p in ddp.parameters()], whole) < 1e-5


@EACH
def test_accumulated_gradients(pair: RankPool, name: str) -> None:
    pair.run(accumulated, name)


def weighed(rank: int, name: str) -> None:
    world = distributed.get_world_size()
    ddp = wrap(HOOKS[name]())
    weights = [10.0 * (each + 1) for each in range(world)]
    given = everyones()
    whole = mean(
        [[w * world / sum(weights) * g for g in each] for w, each in zip(weights, given, strict=True)]
    )
    total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    first = 0.0
    for step in range(18):
        ddp.zero_grad()
        ddp.backward(ddp(given[rank]), weight=weights[rank] * (1 + step % 3))
        found = [p.grad.clone() for p in ddp.parameters()]
        for sum_, grad in zip(total, found, strict=True):
            sum_ += grad
        if step == 0:
            check_equal_on_all_ranks(found)
            first = distance(found, whole)
    if name in BOUNDS:
        assert first <= 2 * BOUNDS[name] * largest(given)
    else:
        assert distance([sum_ / 18 for sum_ in total], whole) < first / 2
    plain = run_step(ddp, given[rank])  # and now without: what is remembered is of the right size
    assert max(map(float, (grad.abs().max() for grad in plain if grad.numel()))) < 60


@EACH
def test_weighed_gradients(ranks: RankPool, name: str) -> None:
    ranks.run(weighed, name)


def unused(rank: int, name: str) -> None:
    ddp = wrap(HOOKS[name]())
    own = gradients(rank)
    for _ in range(3):
        run_step(ddp, own)
    ddp.zero_grad()
    # The first is used on one rank only, the third on none.
    ddp([own[0] if rank == 0 else None, own[1], None, *own[3:]]).backward()
    found = [p.grad for p in ddp.parameters()]
    assert found[2] is None
    check_equal_on_all_ranks([grad for grad in found if grad is not None])


@EACH
def test_parameters_that_are_unused_on_some_ranks_or_all(ranks: RankPool, name: str) -> None:
    ranks.run(unused, name)


def skipped(rank: int, name: str) -> None:
    ddp, plain = wrap(HOOKS[name](), cap=0), wrap(HOOKS[name](), cap=0)
    own = gradients(rank)
    for step in range(4):
        if step == 2:
            ddp.zero_grad()
            ddp([*own[:2], None, *own[3:]]).backward()
        found = run_step(ddp, [*own[:2], own[2], *own[3:]])
        wanted = run_step(plain, own)
        # A step in which no rank used it is none for the third.
        assert distance(found[2:3], wanted[2:3]) == 0


@REMEMBERING
def test_a_parameter_that_no_rank_used_loses_nothing(pair: RankPool, name: str) -> None:
    pair.run(skipped, name)


def lost(rank: int, name: str) -> None:
    ddp, plain = wrap(HOOKS[name]()), wrap(HOOKS[name]())
    for step in range(5):
        if step == 2:
            ddp.zero_grad()
            with pytest.raises(ZeroDivisionError if rank else PeerError):
                ddp(gradients(rank, step=9), fail=rank == 1).backward()
        found, wanted = (run_step(each, gradients(rank, step=step)) for each in (ddp, plain))
        check_equal_on_all_ranks(found)
        assert distance(found, wanted) == 0


@REMEMBERING
def test_a_step_that_is_lost_leaves_what_is_remembered_as_it_was(pair: RankPool, name: str) -> None:
    pair.run(lost, name)


# Registration.


def refused(_: int) -> None:
    ddp = wrap(None)
    hook = hooks.int8()
    with pytest.raises(OptionError, match=r"keeps its own state: register it with None \(hook: int8"):
        ddp.register_comm_hook(object(), hook)
    ddp.register_comm_hook(None, hook)
    with pytest.raises(UnsupportedError, match="can only be called once"):
        ddp.register_comm_hook(None, hooks.int8())
    other = wrap(None)
    with pytest.raises(OptionError, match=r"a hook serves one wrapper.*\(hook: int8\)"):
        other.register_comm_hook(None, hook)
    assert ddp._get_ddp_logging_data()["comm_hook"] == "int8"
    del ddp
    gc.collect()
    other.register_comm_hook(None, hook)


def test_what_cannot_be_registered(pair: RankPool) -> None:
    pair.run(refused)


def freed(rank: int, name: str) -> None:
    hook = HOOKS[name]()
    ddp = wrap(hook)
    run_step(ddp, gradients(rank))
    watched = [weakref.ref(each) for each in (ddp, ddp.reducer, ddp.module, *ddp.parameters())]
    del ddp
    gc.collect()
    assert [ref() is None for ref in watched] == [True] * len(watched)


@EACH
def test_a_hook_keeps_neither_wrapper_nor_parameters(pair: RankPool, name: str) -> None:
    pair.run(freed, name)


# Hooks of one's own.


class Chain(hooks.Hook):
    """Adds up in as many collectives as a bucket's number says."""

    def __init__(self, act: Callable[[Tensor], object] = lambda _: None) -> None:
        self.act = act
        self.order: list[tuple[int, int]] = []

    def reduce(self, bucket: object, group: object) -> object:
        buffer = bucket.buffer()  # type: ignore[attr-defined]
        for number in range(bucket.index() + 2):  # type: ignore[attr-defined]
            self.order.append((bucket.index(), number))  # type: ignore[attr-defined]
            buffer = (yield group.all_reduce(buffer)) / group.size  # type: ignore[attr-defined]
        result = self.act(buffer)
        return buffer if result is None else result


def chained(rank: int) -> list[tuple[int, int]]:
    hook = Chain()
    ddp = wrap(hook, cap=0)
    for step in range(3):
        hook.order.clear()
        found = run_step(ddp, gradients(rank, step=step))
        assert distance(found, mean(everyones(step))) < 1e-6
    return hook.order


def test_every_rank_issues_the_same_collectives_in_the_same_order(ranks: RankPool) -> None:
    order, *others = ranks.run(chained)
    assert all(other == order for other in others)
    buckets = max(bucket for bucket, _ in order) + 1
    assert buckets > 2
    # First rounds as buckets fill up, later ones bucket by bucket.
    assert order[:buckets] == [(bucket, 0) for bucket in range(buckets)]
    assert order[buckets:] == sorted(order[buckets:])


class Wrong(Chain):
    def reduce(self, bucket: object, group: object) -> object:  # noqa: ARG002
        yield bucket


def mistaken(rank: int, what: str) -> None:
    hook = {
        "yields": Wrong(),
        "returns": Chain(lambda buffer: buffer[1:]),
        "raises": Chain(lambda buffer: buffer.view(3, -1, 17)),
    }[what]
    ddp = wrap(hook)
    ddp(gradients(rank)).backward()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("yields", r"a hook yields what is in flight \(hook: Wrong"),
        ("returns", r"must return a tensor like the bucket's buffer \(hook: Chain, bucket: 0"),
        ("raises", r"a hook raised RuntimeError.*\(hook: Chain\)"),
    ],
)
def test_a_hooks_mistake_is_told(pair: RankPool, what: str, message: str) -> None:
    with pytest.raises(RanksError) as caught:
        pair.run(mistaken, what)
    for error in caught.value.exceptions:
        assert isinstance(error, HookError)
        assert re.search(message, str(error))
