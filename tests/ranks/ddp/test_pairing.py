"""Ranks of which one leaves out a batch, repeats a forward, or runs a backward of its own."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from batches import rows
from torch import nn
from wrappers import be_impatient, equal_on_all, grads, of_whole_batch, two_layers

from paceline import DistributedDataParallel, PeerError, ShardedSampler
from paceline.errors import MispairedError
from paceline.testing import RankPool

TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "c10d"])


def nets(transport: Any, *, buffers: bool = False) -> tuple[nn.Module, DistributedDataParallel]:
    net, plain = two_layers().double(), two_layers().double()
    if buffers:
        net = nn.Sequential(*net, nn.BatchNorm1d(2).double())
    return plain, DistributedDataParallel(net, transport=transport)


def batch(rank: int, step: int) -> torch.Tensor:
    return rows(rank, step).double()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


# skip


def skipping(rank: int, transport: Any, skips: dict[int, tuple[int, ...]], buffers: bool) -> None:
    plain, ddp = nets(transport, buffers=buffers)
    size = torch.distributed.get_world_size()
    for step in range(6):
        ddp.zero_grad()
        if rank in skips.get(step, ()):
            ddp.skip()
        else:
            loss_of(ddp(batch(rank, step))).backward()
        trained = tuple(each for each in range(size) if each not in skips.get(step, ()))
        if not trained:
            assert not grads(ddp), "nobody had a gradient"
        elif not buffers:
            torch.testing.assert_close(grads(ddp), of_whole_batch(plain, step, trained), rtol=1e-12, atol=0)
        assert equal_on_all(grads(ddp))


@TRANSPORTS
@pytest.mark.parametrize("buffers", [False, True])
def test_gradients_are_those_of_the_ranks_that_did_not_skip(
    ranks: RankPool, transport: str, buffers: bool
) -> None:
    ranks.run(skipping, transport, {0: (0,), 2: (1,), 3: (0, 1), 5: (0,)}, buffers)


def test_if_all_ranks_skip_nobody_has_a_gradient(pair: RankPool) -> None:
    pair.run(skipping, "auto", {0: (0, 1), 2: (0, 1)}, False)


def skipping_keeps_what_was_there(rank: int) -> None:
    """Gradients are kept from step to step, and one rank skips the second."""
    plain, ddp = nets("auto")
    wanted = of_whole_batch(plain, 0)
    loss_of(ddp(batch(rank, 0))).backward()
    if rank:
        ddp.skip()
    else:
        loss_of(ddp(batch(rank, 1))).backward()
    more = of_whole_batch(plain, 1, (0,))
    torch.testing.assert_close(grads(ddp), [a + b for a, b in zip(wanted, more, strict=True)])


def test_a_skipped_step_adds_to_gradients_that_are_there(pair: RankPool) -> None:
    pair.run(skipping_keeps_what_was_there)


def skipping_under_weights(rank: int) -> None:
    plain, ddp = nets("auto")
    for step in range(3):
        ddp.zero_grad()
        if rank == 1 and step == 1:
            ddp.skip()
        else:
            ddp.backward(loss_of(ddp(batch(rank, step))), weight=4)
        wanted = of_whole_batch(plain, step, (0,) if step == 1 else (0, 1))
        torch.testing.assert_close(grads(ddp), wanted)


def test_skip_counts_as_no_weight_where_others_have_one(pair: RankPool) -> None:
    pair.run(skipping_under_weights)


def skipping_the_last_of_several(rank: int) -> None:
    """The last micro-batch is bad on one rank: its earlier ones count."""
    plain, ddp = nets("auto")
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            loss_of(ddp(batch(rank, 2 * step))).backward()
        if rank == 1:
            ddp.skip()
        else:
            loss_of(ddp(batch(rank, 2 * step + 1))).backward()
        both, more = of_whole_batch(plain, 2 * step), of_whole_batch(plain, 2 * step + 1, (0,))
        torch.testing.assert_close(grads(ddp), [a + b / 2 for a, b in zip(both, more, strict=True)])


def test_what_was_accumulated_before_skip_counts(pair: RankPool) -> None:
    pair.run(skipping_the_last_of_several)


def skipping_after_accumulation(rank: int) -> None:
    """Module buffers are made equal before the forward that follows a synced one, and none that was local."""
    _, ddp = nets("auto", buffers=True)
    for step in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            loss_of(ddp(batch(rank, 2 * step))).backward()
        if rank == 1 and step in (0, 2):
            ddp.skip()
        else:
            loss_of(ddp(batch(rank, 2 * step + 1))).backward()
        assert equal_on_all(grads(ddp))


def test_after_skip_module_buffers_are_synced_as_on_other_ranks(pair: RankPool) -> None:
    pair.run(skipping_after_accumulation)


def skipping_what_was_cleared(rank: int, set_to_none: bool) -> None:
    """What was accumulated before is bad too, so the user has cleared it."""
    plain, ddp = nets("auto")
    for step in range(3):
        with ddp.no_sync():
            loss_of(ddp(batch(rank, 7 + step))).backward()
        ddp.zero_grad(set_to_none=set_to_none)
        if rank == 1:
            ddp.skip()
        else:
            loss_of(ddp(batch(rank, step))).backward()
        torch.testing.assert_close(grads(ddp), of_whole_batch(plain, step, (0,)), rtol=1e-12, atol=0)
        ddp.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_was_accumulated_and_cleared_before_skip_does_not_count(
    pair: RankPool, set_to_none: bool
) -> None:
    pair.run(skipping_what_was_cleared, set_to_none)


def skipping_after_weights(rank: int) -> None:
    plain, ddp = nets("auto")
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp.backward(loss_of(ddp(batch(rank, step))), weight=2)
        if rank == 1:
            ddp.skip()
        else:
            ddp.backward(loss_of(ddp(batch(rank, 7 + step))), weight=6)
        both, more = of_whole_batch(plain, step), of_whole_batch(plain, 7 + step, (0,))
        torch.testing.assert_close(grads(ddp), [a * 0.4 + b * 0.6 for a, b in zip(both, more, strict=True)])


def test_what_was_accumulated_with_a_weight_before_skip_counts(pair: RankPool) -> None:
    pair.run(skipping_after_weights)


def skipping_after_forward(rank: int, transport: Any, buffers: bool) -> None:
    """The loss is bad on rank 1, in the first step and in a later one."""
    be_impatient()
    plain, ddp = nets(transport, buffers=buffers)
    size = torch.distributed.get_world_size()
    for step in range(7):
        ddp.zero_grad()
        loss = loss_of(ddp(batch(rank, step)))
        is_bad = step in (0, 4, 5)
        if rank == 1 and is_bad:
            ddp.skip()
        else:
            loss.backward()
        if not buffers:
            trained = tuple(each for each in range(size) if each != 1 or not is_bad)
            torch.testing.assert_close(grads(ddp), of_whole_batch(plain, step, trained), rtol=1e-12, atol=0)
        assert equal_on_all(grads(ddp))


@TRANSPORTS
@pytest.mark.parametrize("buffers", [False, True])
def test_skip_may_replace_the_backward_alone(ranks: RankPool, transport: str, buffers: bool) -> None:
    ranks.run(skipping_after_forward, transport, buffers)


# A forward without a backward


def caught(rank: int, transport: Any, how: str, buffers: bool) -> list[str]:
    """Rank 1 catches an exception between forward and backward in step 5, and goes on."""
    be_impatient()
    _, ddp = nets(transport, buffers=buffers)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    told = []
    for step in range(9):
        optimizer.zero_grad()
        handle = None
        try:
            output = ddp(batch(rank, step))
            if rank == 1 and step == 5 and how == "in the loss":
                raise ArithmeticError("planted")
            if rank == 1 and step == 5:
                handle = output.register_hook(lambda _: 1 / 0)
            loss_of(output).backward()
            optimizer.step()
        except ArithmeticError:
            continue
        except PeerError as error:
            told.append(f"{step}: {error}")
        finally:
            if handle is not None:
                handle.remove()
    assert equal_on_all([*ddp.parameters()])
    return told


@TRANSPORTS
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("how", ["in the loss", "in a hook on the output"])
def test_the_next_forward_tells_others_of_a_backward_that_did_not_come(
    ranks: RankPool, transport: str, how: str, buffers: bool
) -> None:
    first, culprit, *others = ranks.run(caught, transport, how, buffers)
    assert culprit == []
    for told in (first, *others):
        assert len(told) == 1
        assert told[0].startswith("5: rank 1 called forward again without a backward")


def repeated(rank: int, forwards: list[int]) -> None:
    """As many forwards before each backward as the list says."""
    be_impatient()
    _, ddp = nets("auto")
    for step, number in enumerate(forwards):
        loss = sum(loss_of(ddp(batch(rank, step + each))) for each in range(number))
        assert isinstance(loss, torch.Tensor)
        loss.backward()


@pytest.mark.parametrize("forwards", [[1, 1, 1, 1, 2, 3, 1, 2, 2], [2, 2, 2, 2, 3, 1], [1, 1, 1, 5, 1, 1, 9]])
def test_ranks_that_all_repeat_a_forward_go_on(pair: RankPool, forwards: list[int]) -> None:
    pair.run(repeated, forwards)


def evaluating_on_rank_0(rank: int) -> None:
    """A user forgets torch.no_grad() in an evaluation."""
    be_impatient()
    _, ddp = nets("auto")
    for step in range(12):
        if rank == 0 and step % 5 == 4:
            ddp.eval()
            for each in range(3):
                ddp(batch(0, each))
            ddp.train()
        loss_of(ddp(batch(rank, step))).backward()


def test_an_evaluation_on_one_rank_is_no_skipped_batch(pair: RankPool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair.run(evaluating_on_rank_0)


# Backward passes that do not go through forward


def alone(rank: int, transport: Any) -> tuple[list[str], list[str]]:
    plain, ddp = nets(transport)
    told, types = [], []
    for step in range(6):
        ddp.zero_grad()
        try:
            if rank == 1 and step == 3:
                loss_of(ddp.module(batch(rank, step))).backward()
            else:
                loss_of(ddp(batch(rank, step))).backward()
        except MispairedError as error:
            told.append(str(error))
            assert not grads(ddp)
        else:
            types.append(str(step))
            torch.testing.assert_close(grads(ddp), of_whole_batch(plain, step))
    return told, types


@TRANSPORTS
def test_a_backward_of_one_rank_alone_is_not_averaged_with_a_step_of_others(
    pair: RankPool, transport: str
) -> None:
    for told, right in pair.run(alone, transport):
        assert right == ["0", "1", "2", "4", "5"]
        assert len(told) == 1
        assert "the backward of rank 1 did not go through the wrapper's forward" in told[0]


def all_outside(rank: int) -> None:
    plain, ddp = nets("auto")
    for step in range(5):
        ddp.zero_grad()
        net = ddp.module if step % 2 else ddp
        loss_of(net(batch(rank, step))).backward()
        torch.testing.assert_close(grads(ddp), of_whole_batch(plain, step))


def test_backwards_that_go_through_no_forward_on_any_rank_are_averaged(pair: RankPool) -> None:
    pair.run(all_outside)


def local(rank: int) -> None:
    plain, ddp = nets("auto")
    for step in range(4):
        ddp.zero_grad()
        if rank == 0:
            with ddp.no_sync():
                loss_of(ddp.module(batch(7, step))).backward()
            ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        torch.testing.assert_close(grads(ddp), of_whole_batch(plain, step))


def test_under_no_sync_one_rank_may_run_a_backward_of_its_own(pair: RankPool) -> None:
    pair.run(local)


# What the report tells of the user's loop


def optimizing(rank: int, wrong: int | None) -> list[str]:
    _, ddp = nets("auto")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            optimizer.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
            if not (rank == 1 and step == wrong):
                optimizer.step()
    return [str(each.message) for each in caught if "different steps" in str(each.message)]


@pytest.mark.parametrize("wrong", [None, 0, 3])
def test_an_optimizer_that_did_not_step_on_one_rank_is_named(pair: RankPool, wrong: int | None) -> None:
    for told in pair.run(optimizing, wrong):
        assert len(told) == (wrong is not None)
        if wrong is not None:
            assert f"step: {wrong + 1}" in told[0]
            assert (
                "stepped optimizers differently often since the last step: rank 1 0 times, rank 0 1 time"
                in told[0]
            )


def training_after_join(rank: int) -> None:
    _, ddp = nets("auto")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
            optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
            optimizer.step()


def test_after_join_no_rank_is_said_to_be_in_another_step(pair: RankPool) -> None:
    pair.run(training_after_join)


def sampling(rank: int, workers: int) -> list[str]:
    """Rank 1 leaves out its sixth batch, before forward."""
    _, ddp = nets("auto")
    sampler = ShardedSampler(96)
    data = torch.utils.data.DataLoader(
        torch.arange(96.0).reshape(96, 1).expand(96, 4), batch_size=4, sampler=sampler, num_workers=workers
    )
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(StopIteration):
        warnings.simplefilter("always")
        batches = iter(data)
        for step in range(8):
            x = next(batches)
            if rank == 1 and step == 5:
                x = next(batches)
            loss_of(ddp(x.double())).backward()
    return [str(each.message) for each in caught if "different steps" in str(each.message)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_one_rank_leaves_out_is_seen_by_its_data_loader(pair: RankPool, workers: int) -> None:
    for told in pair.run(sampling, workers):
        assert len(told) == 1
        assert "rank 1 took 2 batches" in told[0]
