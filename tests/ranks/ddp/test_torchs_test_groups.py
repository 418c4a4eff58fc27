"""torch's groups for tests: the fake one sends nothing, the ranks of the threaded one are threads."""

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import rows
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.testing._internal.distributed import fake_pg, multi_threaded_pg

from paceline import DistributedDataParallel, PeerError, hooks
from paceline.testing import run_ranks

WORLD = 3
_seeding = threading.Lock()  # torch has one generator for all threads


def net() -> nn.Module:
    with _seeding:
        torch.manual_seed(0)
        layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2), nn.Linear(2, 2))
        return nn.Sequential(*layers).double().eval()


def step_of(module: nn.Module, rank: int, step: int) -> None:
    module(rows(rank, step, dtype=torch.float64)).square().mean().backward()


def on_fake_group(_: int) -> list[Tensor]:
    warnings.simplefilter("error")
    distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=1, world_size=4)
    module = net().train()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.00001)
    for step in range(4):
        ddp.zero_grad()
        step_of(ddp, 1, step)
    distributed.destroy_process_group()
    return [parameter.grad for parameter in module.parameters()]


def test_on_the_fake_group_gradients_are_divided_and_not_summed() -> None:
    [found] = run_ranks(on_fake_group, 1, backend=None)
    alone = net().train()
    for step in range(4):
        alone.zero_grad()
        step_of(alone, 1, step)
    for ours, parameter in zip(found, alone.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(ours, parameter.grad / 4)


def in_threads(body: Callable[[int], Any]) -> list[Any]:
    """Call a function on ranks that are threads of this process."""
    results: list[Any] = [None] * WORLD
    store = distributed.HashStore()

    def run(rank: int) -> None:
        try:
            distributed.init_process_group("threaded", rank=rank, world_size=WORLD, store=store)
            results[rank] = body(rank)
        except BaseException as error:
            results[rank] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
    return results


def whole_batch(step: int) -> list[Tensor]:
    module = net()
    for rank in range(WORLD):
        step_of(module, rank, step)
    return [parameter.grad / WORLD for parameter in module.parameters()]  # type: ignore[operator]


HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "average": lambda _: None,
    "torch's": lambda ddp: ddp.register_comm_hook(ddp.process_group, default_hooks.allreduce_hook),
    "ours": lambda ddp: ddp.register_comm_hook(None, hooks.average()),
}


def trained_in_thread(name: str) -> Callable[[int], list[Tensor]]:
    def body(rank: int) -> list[Tensor]:
        module = net()
        with torch.no_grad():
            module[0].weight.add_(rank)  # rank 0's values are everyone's
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.00001)
        HOOKS[name](ddp)
        assert ddp._group.shared is None
        for step in range(5):
            ddp.zero_grad()
            step_of(ddp, rank, step)
        assert ddp._reducer.launched > 3
        return [parameter.grad for parameter in module.parameters()]  # type: ignore[misc]

    return body


def of_threads(_: int, name: str) -> None:
    for found in in_threads(trained_in_thread(name)):
        if isinstance(found, BaseException):
            raise found
        for ours, whole in zip(found, whole_batch(4), strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-14)
    gc.collect()
    assert torch.nn.parallel.DistributedDataParallel._active_ddp_module is None


@pytest.mark.parametrize("name", HOOKS)
def test_ranks_that_are_threads_train_as_one_process_would(name: str) -> None:
    run_ranks(of_threads, 1, args=(name,), backend=None)


def failing_in_thread(rank: int) -> list[float]:
    module = nn.Linear(2, 1, bias=False)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    ddp = DistributedDataParallel(module)
    hook = module.register_forward_hook(fail) if rank == 1 else None
    with pytest.raises(
        ZeroDivisionError if rank == 1 else PeerError, match="" if rank == 1 else "rank 1 raised"
    ):
        ddp(torch.ones(1, 2)).backward()
    if hook is not None:
        hook.remove()
    ddp(torch.full((1, 2), float(rank))).backward()
    assert module.weight.grad is not None
    return module.weight.grad[0].tolist()


def failure_in_threads(_: int) -> None:
    assert in_threads(failing_in_thread) == [[1.0, 1.0]] * WORLD


def test_an_exception_in_one_thread_is_a_peers_error_in_the_others() -> None:
    run_ranks(failure_in_threads, 1, backend=None)
