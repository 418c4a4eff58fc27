"""The toy device's process group: collectives are queued, and the host goes on."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.parallel
from torch import distributed, nn

import paceline
from paceline.testing import run_ranks, toy

WORLD = 2


def all_reduce_while_held(rank: int) -> list[float]:
    toy.register()
    group = toy.new_group()
    x = torch.full((3,), rank + 1.0, device="toy:0")
    toy.register().synchronize()
    with toy.counting() as counts, toy.hold():
        work = distributed.all_reduce(x, group=group, async_op=True)
        assert work.wait()
        assert not work.is_completed()
        assert x.memory.tolist() == [rank + 1] * 3
        x.mul_(10)  # on the current stream, which waits for the collective
        distributed.all_reduce(x, group=group)
    assert (counts.reads, counts.waits) == (0, 0)
    values: list[float] = x.tolist()
    assert work.is_completed()
    return values


def test_the_host_goes_on_while_an_all_reduce_is_queued() -> None:
    assert run_ranks(all_reduce_while_held, WORLD) == [[60.0] * 3] * WORLD


def every_collective(rank: int) -> dict[str, Any]:
    toy.register()
    group = toy.new_group()
    device = f"toy:{rank}"
    mine = torch.tensor([rank + 1.0, 10.0 * rank], device=device)
    found = {}
    toy.register().synchronize(rank)
    with toy.counting() as counts, toy.hold():
        found["broadcast"] = mine.clone()
        distributed.broadcast(found["broadcast"], 1, group=group)
        found["all_gather"] = [torch.empty_like(mine) for _ in range(WORLD)]
        distributed.all_gather(found["all_gather"], mine, group=group)
        found["into one"] = torch.empty(4, device=device)
        distributed.all_gather_into_tensor(found["into one"], mine, group=group)
        found["reduce_scatter"] = torch.empty(1, device=device)
        distributed.reduce_scatter_tensor(found["reduce_scatter"], mine, group=group)
        found["all_to_all"] = torch.empty_like(mine)
        distributed.all_to_all_single(found["all_to_all"], mine, group=group)
    assert (counts.reads, counts.waits) == (0, 0)
    listed = {
        name: [each.tolist() for each in value] if isinstance(value, list) else value.tolist()
        for name, value in found.items()
    }
    on_host = torch.ones(2)
    distributed.all_reduce(on_host, group=group)
    objects: list[Any] = [None] * WORLD
    distributed.all_gather_object(objects, rank, group=group)
    return listed | {"host": on_host.tolist(), "objects": objects}


def test_all_collectives_of_toy_tensors_are_queued_and_those_of_cpu_tensors_are_not() -> None:
    same = {
        "broadcast": [2, 10],
        "all_gather": [[1, 0], [2, 10]],
        "into one": [1, 0, 2, 10],
        "host": [2, 2],
        "objects": [0, 1],
    }
    assert run_ranks(every_collective, WORLD) == [
        same | {"reduce_scatter": [3], "all_to_all": [1, 2]},
        same | {"reduce_scatter": [10], "all_to_all": [0, 10]},
    ]


def callbacks(rank: int) -> list[list[float]]:
    toy.register()
    group = toy.new_group()
    x = torch.full((2,), rank + 1.0, device="toy:0")
    toy.register().synchronize()
    with toy.counting() as counts, toy.hold():
        future = distributed.all_reduce(x, group=group, async_op=True).get_future()
        assert future.done()
        half = future.then(lambda done: done.value()[0] / 2)
        third = half.then(lambda done: done.wait() / 3)
        total = half.wait() + third.wait()
        failed = future.then(lambda _: 1 // 0)
    assert (counts.reads, counts.waits) == (0, 0)
    with pytest.raises(Exception, match="division"):
        failed.wait()
    return [x.tolist(), total.tolist()]


def test_callbacks_run_at_once_and_their_kernels_after_the_collective() -> None:
    assert run_ranks(callbacks, WORLD) == [[[3.0, 3.0], [2.0, 2.0]]] * WORLD


def barrier(rank: int) -> None:
    toy.register()
    group = toy.new_group()
    x = torch.zeros(1, device="toy:0")
    with toy.counting() as counts:
        x.add_(rank)
        distributed.barrier(group=group)
    assert counts.waits == 1
    assert x.memory.tolist() == [rank]


def test_the_host_waits_in_a_barrier() -> None:
    run_ranks(barrier, WORLD)


def one_more_on_rank_0(rank: int) -> str | None:
    toy.register()
    group = toy.new_group(timeout=timedelta(seconds=1))
    x = torch.ones(2, device="toy:0")
    if rank == 1:
        return None
    distributed.all_reduce(x, group=group)
    with pytest.raises(RuntimeError) as raised:
        x.tolist()
    return str(raised.value)


def test_a_collective_that_fails_is_an_error_of_the_next_read() -> None:
    error, _ = run_ranks(one_more_on_rank_0, WORLD)
    assert "allreduce of rank 0 failed on the device, queued by" in error
    assert "test_toy_group.py" in error


WRAPPERS = {"torch": torch.nn.parallel.DistributedDataParallel, "paceline": paceline.DistributedDataParallel}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def rows(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


class Training:
    """A wrapper or a net, with its optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.module(x).square().mean().backward()
        self.optimizer.step()

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in self.module.parameters()]


def trained(rank: int, wrapper: str) -> list[torch.Tensor]:
    toy.register()
    training = Training(WRAPPERS[wrapper](net().to("toy:0"), process_group=toy.new_group()))
    with toy.set_latency(0.001):
        for step in range(3):
            training.step(rows(rank, step).to("toy:0"))
    return training.parameters()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_train_on_it_as_one_process_on_the_whole_batch(wrapper: str) -> None:
    whole = Training(net())
    for step in range(3):
        whole.step(torch.cat([rows(rank, step) for rank in range(WORLD)]))
    for of_rank in run_ranks(trained, WORLD, args=(wrapper,)):
        for ours, theirs in zip(of_rank, whole.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def held_step(rank: int) -> None:
    toy.register()
    training = Training(WRAPPERS["torch"](net().to("toy:0"), process_group=toy.new_group()))
    for step in range(2):  # in which the wrapper learns the order of gradients
        training.step(rows(rank, step).to("toy:0"))
    with toy.counting() as counts, toy.hold():
        training.step(rows(rank, 2).to("toy:0", non_blocking=True))
        assert toy.unfinished() > 0
    assert (counts.reads, counts.waits, counts.blocking_copies) == (0, 0, 0), counts
    assert all(value.isfinite().all() for value in training.parameters())


def test_a_step_of_torchs_wrapper_neither_reads_nor_waits() -> None:
    run_ranks(held_step, WORLD)
