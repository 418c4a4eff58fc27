"""Ranks that step by themselves and average their parameters now and then."""

from typing import Any

import meshes
import pytest
import torch
from batches import rows
from hook_nets import (
    SHAPES,
    Given,
    check_equal_on_all_ranks,
    distance,
    everyones,
    gradients,
    mean,
    run_step,
    wrap,
)
from meshes import data_rank, parallel, same_on_data_ranks
from torch import distributed, nn
from wrappers import Net

from paceline import (
    DistributedDataParallel,
    OptionError,
    hooks,
)
from paceline.errors import HookError
from paceline.testing import RankPool, run_ranks

START, PERIOD = 2, 3


def phases(rank: int) -> list[bool]:
    hook = hooks.post_local_sgd(start_step=START, period=PERIOD)
    ddp = wrap(hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    summed = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    averaged = []
    for step in range(START + 2 * PERIOD + 1):
        found = run_step(ddp, gradients(rank, step=step))
        together = mean(everyones(step))
        assert distance(found, together if step < START else gradients(rank, step=step)) < 1e-6
        for sum_, grad in zip(summed, together, strict=True):
            sum_ -= grad
        optimizer.step()
        averaged.append(hook.average_parameters(ddp.parameters()))
        if averaged[-1]:
            # Gradients do not depend on parameters here, so the average is that of plain training.
            assert distance([*ddp.parameters()], summed) < 1e-5
            check_equal_on_all_ranks([p.detach() for p in ddp.parameters()])
    hook.average_now(ddp.parameters())
    assert distance([*ddp.parameters()], summed) < 1e-5
    check_equal_on_all_ranks([p.detach() for p in ddp.parameters()])
    return averaged


def test_gradients_are_averaged_first_and_parameters_later(ranks: RankPool) -> None:
    wanted = [False] * START + 2 * ([False] * (PERIOD - 1) + [True]) + [False]
    assert ranks.run(phases) == [wanted] * len(ranks.run(rank_of))


def rank_of(rank: int) -> int:
    return rank


def forgotten(rank: int) -> None:
    ddp = wrap(hooks.post_local_sgd(start_step=0, period=2))
    for step in range(2):
        run_step(ddp, gradients(rank, step=step))
    with pytest.raises(HookError, match=r"call average_parameters after each step .*\(steps: 2, period: 2\)"):
        run_step(ddp, gradients(rank))


def test_parameters_that_nobody_averages_are_missed(pair: RankPool) -> None:
    pair.run(forgotten)


def near(rank: int) -> None:
    groups = [distributed.new_group(members) for members in ([0, 1], [2, 3])]
    mine = [0, 1] if rank < 2 else [2, 3]
    ddp = wrap(hooks.post_local_sgd(start_step=1, period=2, process_group=groups[rank // 2]))
    for step in range(2):
        found = run_step(ddp, gradients(rank, step=step))
        members = mine if step else range(4)
        assert distance(found, mean([gradients(each, step=step) for each in members])) < 1e-6


def test_gradients_may_go_on_being_averaged_among_some() -> None:
    run_ranks(near, 4)


def weighed(rank: int) -> None:
    """By its share of the weights, a rank's step counts for the average as it should."""
    hook = hooks.post_local_sgd(start_step=0, period=1)
    ddp = wrap(hook)
    weights = [3.0, 1.0]
    ddp.backward(ddp(gradients(rank)), weight=weights[rank])
    torch.optim.SGD(ddp.parameters(), lr=1.0).step()
    assert hook.average_parameters(ddp.parameters())
    whole = mean([[-2 * w / 4 * g for g in each] for w, each in zip(weights, everyones(), strict=True)])
    assert distance([*ddp.parameters()], whole) < 1e-6


def test_weights_count(pair: RankPool) -> None:
    pair.run(weighed)


def mixed(rank: int) -> None:
    hook = hooks.post_local_sgd(start_step=0, period=1)
    net = nn.Module()
    net.add_module("real", Given([(3, 2), (0,)], torch.float16))
    net.add_module("complex", Given([(2,)], torch.complex64))
    net.forward = lambda each: net.real([each[0].half(), None]) + net.complex([each[1]])  # type: ignore[method-assign]
    ddp = wrap(hook, net)
    grads: list[Any] = [torch.full((3, 2), rank + 1.0), torch.full((2,), (rank + 1) * 2j)]
    ddp.zero_grad()
    ddp(grads).backward()
    torch.optim.SGD(ddp.parameters(), lr=1.0).step()
    assert hook.average_parameters(ddp.parameters())
    assert net.real.weights[0].unique().tolist() == [-1.5]
    assert net.complex.weights[0].tolist() == [-3j, -3j]


def test_parameters_of_several_types(pair: RankPool) -> None:
    pair.run(mixed)


def alone(rank: int) -> None:
    hook = hooks.post_local_sgd(start_step=0, period=1)
    ddp = wrap(hook)
    for _ in range(3):
        run_step(ddp, gradients(rank))
        assert not hook.average_parameters(ddp.parameters())
    hook.average_now(ddp.parameters())


def test_a_rank_alone() -> None:
    run_ranks(alone, 1)


def moves_to_a_group_of_one(rank: int) -> None:
    hook = hooks.post_local_sgd(start_step=0, period=1)
    ddp = DistributedDataParallel(Net())
    ddp.register_comm_hook(None, hook)
    ddp(rows(rank)).sum().backward()
    hook.average_parameters(ddp.parameters())
    alone = [distributed.new_group([each]) for each in range(2)][rank]
    if rank == 0:
        ddp._update_process_group(alone)
        ddp(rows(rank)).sum().backward()
        assert not hook.average_parameters(ddp.parameters())  # a rank alone has nobody to average with
    distributed.barrier()


def test_local_sgd_follows_its_wrapper_to_a_group_of_one() -> None:
    run_ranks(moves_to_a_group_of_one, 2, timeout=10.0)


def local_sgd_joins(_: int) -> None:
    ddp = DistributedDataParallel(Net())
    ddp.register_comm_hook(None, hooks.post_local_sgd(start_step=0, period=1))
    with pytest.raises(OptionError, match="join does not work with hooks that average parameters"):
        ddp.join()


def test_local_sgd_does_not_join(pair: RankPool) -> None:
    pair.run(local_sgd_joins)


def averages_dtensors(_: int, model: str) -> bool:
    module = parallel(model)
    ddp = DistributedDataParallel(module, device_mesh=meshes.mesh()["dp"])
    hook = hooks.post_local_sgd(start_step=0, period=1)
    ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ddp(meshes.rows(data_rank(), 0)).square().mean().backward()
    optimizer.step()
    hook.average_parameters(ddp.parameters())
    return same_on_data_ranks(list(module.parameters()))


@pytest.mark.parametrize("model", ["mixed", "uneven"])
def test_local_sgd_of_dtensors(four: RankPool, model: str) -> None:
    assert all(four.run(averages_dtensors, model))
