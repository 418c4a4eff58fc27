"""Uneven inputs: exhausted ranks take part in the others' steps, and every rank ends with the same model."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

from paceline import DistributedDataParallel, ShardedOptimizer
from paceline.errors import PeerError, StepError
from paceline.testing import RankPool

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Net(nn.Module):
    """The gradient of ``weight`` is the input, of ``twice`` two times that; ``spare`` is used when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.twice = nn.Parameter(torch.zeros(3))
        self.spare = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        self.seen += x.sum()
        out = (x * self.weight).sum() + (2 * x * self.twice).sum()
        return out + (3 * x * self.spare).sum() if spare else out


def make(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net().double(), **{"bucket_cap_mb": 1e-5, **options})


def value(rank: int, step: int) -> float:
    return 1.0 + rank + 10.0 * step


def inputs(rank: int, step: int) -> Tensor:
    return torch.full((3,), value(rank, step), dtype=torch.float64)


def steps(rank: int) -> int:
    return 2 + 2 * rank


def active(step: int) -> list[int]:
    return [rank for rank in range(distributed.get_world_size()) if step < steps(rank)]


def mean(step: int, divisor: int | None = None) -> float:
    return sum(value(rank, step) for rank in active(step)) / (divisor or distributed.get_world_size())


def assert_grads(ddp: DistributedDataParallel, want: float, *, spare: bool = False) -> None:
    for parameter, times in zip(ddp.module.parameters(), (1, 2, 3), strict=True):
        if times == 3 and not spare:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert parameter.grad.tolist() == pytest.approx([times * want] * 3)


def assert_equal_models(ddp: DistributedDataParallel) -> None:
    for tensor in ddp.state_dict().values():
        everyone = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
        distributed.all_gather(everyone, tensor)
        assert all(torch.equal(everyone[0], other) for other in everyone)


def averages(rank: int, view: bool, initial: bool) -> None:
    ddp = make(gradient_as_bucket_view=view)
    with ddp.join(divide_by_initial_world_size=initial):
        for step in range(steps(rank)):
            ddp.zero_grad()
            ddp(inputs(rank, step)).backward()
            want = mean(step, None if initial else len(active(step)))
            assert_grads(ddp, want)
    assert_equal_models(ddp)
    assert ddp._authoritative_rank == distributed.get_world_size() - 1
    assert ddp._get_ddp_logging_data()["join_uneven_inputs"] == 1


@VIEWS
@pytest.mark.parametrize("initial", [True, False], ids=["of all", "of those left"])
def test_the_mean_is_over_all_ranks_or_over_those_left(ranks: RankPool, view: bool, initial: bool) -> None:
    ranks.run(averages, view, initial)


def kept_gradients(rank: int, view: bool) -> None:
    ddp = make(gradient_as_bucket_view=view)
    with ddp.join():
        for step in range(steps(rank)):
            ddp.zero_grad()
            ddp(inputs(rank, step)).backward()
    assert not ddp._join_config.enable
    last = steps(rank) - 1
    assert_grads(ddp, mean(last))
    # Afterwards a step without join is as ever.
    ddp.zero_grad()
    ddp(inputs(rank, 0)).backward()
    assert_grads(ddp, mean(0))


@VIEWS
def test_exhausted_ranks_keep_their_gradients(pair: RankPool, view: bool) -> None:
    pair.run(kept_gradients, view)


def changing_graphs(rank: int, late: int) -> None:
    """The parameter that was unused so far is used when a rank is exhausted already."""
    ddp = make()
    ddp.module.spare.requires_grad_(late < 0)
    with ddp.join():
        for step in range(steps(rank)):
            if step == late:
                ddp.module.spare.requires_grad_(True)
            ddp.zero_grad()
            uses = step >= late >= 0 or (late < 0 and step == 3)
            ddp(inputs(rank, step), spare=uses).backward()
            assert_grads(ddp, mean(step), spare=uses)
    assert_equal_models(ddp)


@pytest.mark.parametrize("late", [-1, 0, 1, 2, 3])
def test_exhausted_ranks_follow_changing_graphs_and_unfrozen_parameters(pair: RankPool, late: int) -> None:
    pair.run(changing_graphs, late)


def accumulating(rank: int) -> None:
    ddp = make()
    with ddp.join():
        for step in range(steps(rank)):
            if step % 2 == 0:
                ddp.zero_grad()
                with ddp.no_sync():
                    ddp(inputs(rank, step)).backward()
            else:
                ddp(inputs(rank, step)).backward()
                assert_grads(ddp, mean(step) + mean(step - 1))
    assert_equal_models(ddp)


def test_accumulation_under_join(ranks: RankPool) -> None:
    ranks.run(accumulating)


def evaluating(rank: int) -> None:
    ddp = make()
    with ddp.join():
        for step in range(steps(rank)):
            ddp.zero_grad()
            ddp(inputs(rank, step)).backward()
            with torch.no_grad():
                ddp(inputs(rank, step))
            assert_grads(ddp, mean(step))
    assert_equal_models(ddp)


def test_exhausted_ranks_follow_a_forward_without_backward(pair: RankPool) -> None:
    pair.run(evaluating)


def weighed(rank: int) -> None:
    ddp = make()
    with ddp.join():
        for step in range(steps(rank)):
            ddp.zero_grad()
            ddp.backward(ddp(inputs(rank, step)), weight=rank + 1)
            count = sum(r + 1 for r in active(step))
            want = sum((r + 1) * value(r, step) for r in active(step)) / count
            assert_grads(ddp, want)
    assert_equal_models(ddp)


def test_weights_under_join_count_the_ranks_that_have_inputs(ranks: RankPool) -> None:
    ranks.run(weighed)


def with_hook(rank: int, hook: str) -> None:
    ddp = make()
    calls = []

    def average(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        sent = bucket.buffer().div(distributed.get_world_size())
        return distributed.all_reduce(sent, async_op=True).get_future().then(lambda fut: fut.value()[0])

    ddp.register_comm_hook(None, average if hook == "own" else fp16_compress_hook)
    with ddp.join():
        for step in range(steps(rank)):
            ddp.zero_grad()
            ddp(inputs(rank, step)).backward()
            assert_grads(ddp, mean(step))
    assert_equal_models(ddp)
    if hook == "own":
        buckets = len(ddp._reducer.context.bucket_set.buckets)
        assert len(calls) == steps(distributed.get_world_size() - 1) * buckets - 2


@pytest.mark.parametrize("hook", ["own", "fp16"])
def test_exhausted_ranks_call_the_comm_hook(pair: RankPool, hook: str) -> None:
    pair.run(with_hook, hook)


def with_buffers(rank: int, way: str) -> None:
    ddp = make(forward_sync_buffers=way != "off")
    world = distributed.get_world_size()
    if way.startswith("hook"):
        location = type("Location", (), {"name": way[5:]})

        def spread(_: object, buffers: dict[str, Tensor]) -> None:
            distributed.broadcast(buffers["seen"], src=world - 1)

        ddp._register_buffer_comm_hook(None, spread, location)
    with ddp.join():
        for step in range(steps(rank)):
            ddp(inputs(rank, step)).backward()
            own = sum(3 * value(rank, earlier) for earlier in range(step + 1))
            if way == "off":
                assert float(ddp.module.seen) == own
            elif way == "broadcast":  # the highest rank with inputs had its say before this forward
                before = sum(3 * value(active(earlier + 1)[-1], earlier) for earlier in range(step))
                assert float(ddp.module.seen) == before + 3 * value(rank, step)
    everyone = [torch.empty(1, dtype=torch.float64) for _ in range(world)]
    distributed.all_gather(everyone, ddp.module.seen)
    assert (len({float(each) for each in everyone}) == 1) == (way != "off")


@pytest.mark.parametrize("way", ["broadcast", "off", "hook PRE_FORWARD", "hook POST_FORWARD"])
def test_exhausted_ranks_take_part_in_buffer_syncs(ranks: RankPool, way: str) -> None:
    ranks.run(with_buffers, way)


def outlasted(rank: int) -> None:
    """The higher a rank, the sooner it is exhausted, so that another rank's buffers count each time."""
    ddp = make()
    last = distributed.get_world_size() - 1
    before = 0.0
    with ddp.join():
        for step in range(1 + 2 * (last - rank)):
            ddp(inputs(rank, step)).backward()
            assert float(ddp.module.seen) == before + 3 * value(rank, step)
            before += 3 * value(last - (step + 2) // 2, step)  # of the highest rank that goes on
    assert_equal_models(ddp)
    assert ddp._authoritative_rank == 0


def test_buffers_are_those_of_a_rank_that_still_has_inputs(ranks: RankPool) -> None:
    ranks.run(outlasted)


def in_backward(rank: int) -> None:
    ddp = make()
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.5, "momentum": 0.5})
    with ddp.join():
        for step in range(steps(rank)):
            ddp(inputs(rank, step)).backward()
    assert_equal_models(ddp)
    (optimizer,) = ddp.module.weight._in_backward_optimizers
    momentum = optimizer.state[ddp.module.weight]["momentum_buffer"]
    everyone = [torch.empty_like(momentum) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, momentum)
    assert all(torch.equal(momentum, other) for other in everyone)


def test_optimizers_in_backward_step_on_exhausted_ranks_too(pair: RankPool) -> None:
    pair.run(in_backward)


def with_shares(rank: int, shares: str) -> None:
    """Each rank keeps the state of its share of the parameters, and must step it to the end."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    alone = copy.deepcopy(net)
    ddp = DistributedDataParallel(net)
    options = {"lr": 0.01}
    sharded: Any = (
        ShardedOptimizer(ddp, torch.optim.Adam, **options)
        if shares == "ours"
        else ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, **options)
    )
    rows = [
        torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * each + step)).double()
        for each in range(distributed.get_world_size())
        for step in range(9)
    ]
    with Join([ddp, sharded]):
        for step in range(steps(rank)):
            sharded.zero_grad()
            ddp(rows[9 * rank + step]).pow(2).mean().backward()
            sharded.step()
    assert_equal_models(ddp)
    # One process, with the mean over all ranks in which those without inputs count as zeros.
    optimizer = torch.optim.Adam(alone.parameters(), **options)
    for step in range(steps(distributed.get_world_size() - 1)):
        optimizer.zero_grad()
        losses = [alone(rows[9 * each + step]).pow(2).mean() for each in active(step)]
        (torch.stack(losses).sum() / distributed.get_world_size()).backward()
        optimizer.step()
    for mine, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shares", ["ours", "torch"])
def test_join_with_sharded_optimizer_states(ranks: RankPool, shares: str) -> None:
    ranks.run(with_shares, shares)


def early_end(rank: int) -> str:
    ddp = make()
    said = ""
    for throws in (True, False):
        try:
            with ddp.join(throw_on_early_termination=throws):
                for step in range(steps(rank)):
                    ddp.zero_grad()
                    ddp(inputs(rank, step)).backward()
                    assert_grads(ddp, mean(step))
        except RuntimeError as error:
            said += str(error)
    return said


def test_an_early_end_raises_on_every_rank_and_leaves_a_clean_state(pair: RankPool) -> None:
    first, second = pair.run(early_end)
    assert "Rank 0 exhausted all inputs" in first
    assert "Detected at least one rank that exhausted inputs." in second


def final_model(rank: int) -> None:
    """Each rank steps as long as it has inputs, so that their parameters drift apart."""
    ddp = make()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    with ddp.join():
        for step in range(steps(rank)):
            optimizer.zero_grad()
            ddp(inputs(rank, step)).backward()
            optimizer.step()
    want = -sum(mean(step) for step in range(steps(distributed.get_world_size() - 1)))
    assert ddp.module.weight.tolist() == pytest.approx([want] * 3)
    assert_equal_models(ddp)


def test_every_rank_ends_with_the_model_of_the_last_that_had_inputs(ranks: RankPool) -> None:
    ranks.run(final_model)


def off(rank: int) -> None:
    ddp = make()
    with ddp.join(enable=False):
        for _ in range(3):
            ddp.zero_grad()
            ddp(inputs(rank, 0)).backward()
            assert_grads(ddp, mean(0))
    assert not ddp._join_config.enable


def test_join_can_be_switched_off(pair: RankPool) -> None:
    pair.run(off)


def failing(rank: int) -> str:
    ddp = make()
    try:
        with ddp.join():
            for step in range(steps(rank)):
                ddp.zero_grad()
                if rank == 1 and step == 3:
                    raise_in_forward(ddp)
                ddp(inputs(rank, step)).backward()
    except (PeerError, ZeroDivisionError) as error:
        said = f"{type(error).__name__}: {error}"
    ddp.zero_grad()
    with ddp.join(enable=False):
        ddp(inputs(rank, 0)).backward()
    assert_grads(ddp, mean(0))
    return said


def raise_in_forward(ddp: DistributedDataParallel) -> None:
    handle = ddp.module.register_forward_pre_hook(lambda *_: 1 // 0)
    try:
        ddp(inputs(1, 0))
    finally:
        handle.remove()


def test_an_exhausted_rank_hears_of_an_exception(pair: RankPool) -> None:
    exhausted, raising = pair.run(failing)
    assert exhausted.startswith("PeerError: rank 1 raised ZeroDivisionError")
    assert raising.startswith("ZeroDivisionError")


def some_accumulate(rank: int) -> None:
    ddp = make()
    ddp.require_backward_grad_sync = bool(rank)
    with pytest.raises(StepError, match="some ranks synchronise"), ddp.join():
        ddp(inputs(rank, 0))


def test_ranks_that_disagree_on_syncing_all_raise(pair: RankPool) -> None:
    pair.run(some_accumulate)


def twice_over(rank: int) -> None:
    """A rank that has no inputs at all, in the first epoch, and many in the second."""
    ddp = make()
    for count in ([0, 3][rank], [3, 1][rank]):
        with warnings.catch_warnings(), ddp.join():
            for _ in range(count):
                ddp.zero_grad()
                ddp(inputs(rank, 0)).backward()
    assert_equal_models(ddp)


def test_ranks_without_any_inputs(pair: RankPool) -> None:
    pair.run(twice_over)


def unequal_groups(_: int) -> None:
    group = distributed.new_group([0, 1])
    first, second = make(), make(process_group=group)
    with pytest.raises(ValueError, match="multiple process groups"):
        Join([first, second])
    del first, second


def test_joinables_of_several_groups_are_refused(pair: RankPool) -> None:
    pair.run(unequal_groups)
