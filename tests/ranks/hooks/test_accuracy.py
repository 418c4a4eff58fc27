"""paceline's own hooks: what comes back is the same on every rank, and off by no more than they say."""

from collections.abc import Sequence

import pytest
import torch
from hook_nets import (
    BOUNDS,
    HOOKS,
    SHAPES,
    STEPS,
    WITH_MEMORY,
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
from torch.utils.checkpoint import checkpoint

from paceline import (
    PeerError,
    hooks,
)
from paceline.testing import RankPool, run_ranks

EACH = pytest.mark.parametrize("name", HOOKS)
REMEMBERING = pytest.mark.parametrize("name", WITH_MEMORY)


# One step, and many.


def one_step(rank: int, name: str, view: bool) -> None:
    ddp = wrap(HOOKS[name](), gradient_as_bucket_view=view)
    for step in range(3):  # in one bucket, then in several
        found = run_step(ddp, gradients(rank, step=step))
        check_equal_on_all_ranks(found)
        if step == 0 and name in BOUNDS:
            given = everyones(step)
            assert distance(found, mean(given)) <= BOUNDS[name] * largest(given)


@EACH
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_a_step_is_the_same_on_every_rank_and_off_by_no_more_than_stated(
    ranks: RankPool, name: str, view: bool
) -> None:
    ranks.run(one_step, name, view)


def many_steps(rank: int, name: str) -> None:
    steps = STEPS[name]
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
    kept._reducer.planner.restart()
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
    # What is remembered comes back in later steps: nobody waits for it where a step has a bound of its own.
    steps = 3 if name in BOUNDS else 18
    for step in range(steps):
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
        assert distance([sum_ / steps for sum_ in total], whole) < first / 2
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


class Repeated(nn.Module):
    """A layer that a re-entrant checkpoint goes over any number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.again, x, use_reentrant=True)
        return x.square().sum()


def late(rank: int, name: str) -> None:
    torch.manual_seed(0)
    net, plain = Repeated(), Repeated()
    plain.load_state_dict(net.state_dict())
    ddp = wrap(HOOKS[name](), net, cap=0)
    batches = torch.randn(distributed.get_world_size(), 3, 4)
    for step in range(4):
        times = [3 if step == 3 and each == 0 else 1 for each in range(len(batches))]
        ddp.zero_grad()
        ddp(batches[rank], times[rank]).backward()
        check_equal_on_all_ranks([p.grad for p in net.parameters()])
    assert ddp._reducer.last_summary.late
    for batch, count in zip(batches, times, strict=True):
        (plain(batch, count) / len(batches)).backward()
    wanted = [p.grad for p in plain.parameters()]
    # The gradient, what comes late, and what is remembered of the step before are each rounded.
    bound = 4 * BOUNDS[name] * largest([wanted]) * len(batches)
    assert distance([p.grad for p in net.parameters()], wanted) <= bound


@pytest.mark.parametrize("name", ["average", "fp16", "bf16", "int8"])
def test_a_gradient_that_comes_too_late_for_its_bucket(ranks: RankPool, name: str) -> None:
    ranks.run(late, name)


def sums(totals: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    for total, grad in zip(totals, found, strict=True):
        total += grad


def zeros() -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]


def swinging_weights(rank: int, name: str) -> list[float]:
    ddp = wrap(HOOKS[name]())
    given = everyones()
    off = []
    for step in range(4):
        weights = [1000.0, 1000.0, 1.0] if step % 2 == 0 else [1.0, 1.0, 1000.0]
        share = [3 * weight / sum(weights) for weight in weights]
        wanted = mean([[part * grad for grad in each] for part, each in zip(share, given, strict=True)])
        ddp.zero_grad()
        ddp.backward(ddp(given[rank]), weight=weights[rank])
        off.append(distance([p.grad for p in ddp.parameters()], wanted) / largest(given))
    return off


@pytest.mark.parametrize("name", ["int8", "int4", "fp16 with feedback"])
def test_an_error_is_not_magnified_when_weights_change(name: str) -> None:
    assert max(run_ranks(swinging_weights, 3, args=(name,), timeout=20.0)[0]) < 0.3


def mean_without_one(rank: int, name: str) -> tuple[float, float]:
    """The last rank has no inputs under join."""
    steps, world = 24, distributed.get_world_size()
    ddp = wrap(HOOKS[name]())
    given = everyones()
    wanted = [grad * (world - 1) / world for grad in mean(given[:-1])]
    totals, first = zeros(), 0.0
    with ddp.join():
        for _ in range(0 if rank == world - 1 else steps):
            ddp.zero_grad()
            ddp(given[rank]).backward()
            sums(totals, [p.grad for p in ddp.parameters()])  # type: ignore[misc]
            first = first or distance(totals, wanted)
    return first, distance([total / steps for total in totals], wanted)


@pytest.mark.parametrize("name", ["int8", "int4", "bf16 with feedback"])
def test_the_mean_over_steps_is_exact_where_a_rank_has_nothing(name: str) -> None:
    first, last = run_ranks(mean_without_one, 3, args=(name,), timeout=20.0)[0]
    assert last < first / 10, (first, last)


def powers(rank: int, scale: float) -> tuple[float, float]:
    shape = (20, 15)
    ddp = wrap(hooks.power_sgd(2, start_step=0), net=Given([shape]))
    given = [[scale * grad for grad in each] for each in everyones(shapes=[shape])]
    wanted, total, first = mean(given)[0], torch.zeros(shape, dtype=torch.float64), 0.0
    for _ in range(40):
        total += run_step(ddp, given[rank])[0]
        first = first or float((total - wanted).abs().max())
    return first, float((total / 40 - wanted).abs().max())


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_power_sgd_finds_directions_at_any_scale(pair: RankPool, scale: float) -> None:
    first, last = pair.run(powers, scale)[0]
    assert last < first / 3


def large(_: int, name: str) -> bool:
    ddp = wrap(HOOKS[name](), net=Given([(8,)]))
    return bool(run_step(ddp, [torch.full((8,), 2e38)])[0].isfinite().all())


@pytest.mark.parametrize("name", ["bf16", "int8", "top_k"])
def test_an_average_of_finite_gradients_is_finite(pair: RankPool, name: str) -> None:
    assert all(pair.run(large, name))
