"""The c10d backend "paceline": what torch builds on process groups gives the same on it as on gloo."""

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from wrappers import equal_on_all

from paceline.testing import RankPool, run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of TorchScript
    from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS = 3


@pytest.fixture(scope="module")
def sharing() -> Iterator[RankPool]:
    with RankPool(2, timeout=60.0, backend="paceline") as pool:
        yield pool


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def train(model: nn.Module, optimizer: Any, rank: int, steps: int = STEPS) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(5, 6, dtype=torch.float64, generator=generator)).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    parameters = [
        getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in model.parameters()
    ]
    return [parameter.detach().clone() for parameter in parameters]


def data_parallel(rank: int, **options: Any) -> list[Tensor]:
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.001, **options)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank)
    assert equal_on_all(values(ddp))
    return values(ddp)


def data_parallel_with_views(rank: int) -> list[Tensor]:
    return data_parallel(rank, gradient_as_bucket_view=True, static_graph=True)


def data_parallel_under_join(rank: int) -> list[Tensor]:
    # torch keeps the works of such a join in C++ alone, and waits for them there.
    ddp = DistributedDataParallel(net())
    with ddp.join(divide_by_initial_world_size=False):
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank, steps=STEPS + rank)
    return values(ddp)


def data_parallel_with_power_sgd(rank: int) -> list[Tensor]:
    # Its callbacks wait for further collectives.
    ddp = DistributedDataParallel(net())
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank)
    return values(ddp)


def fully_sharded(rank: int) -> list[Tensor]:
    model, mesh = net(), init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return values(model)


def sharded_optimizer(rank: int) -> list[Tensor]:
    ddp = DistributedDataParallel(net())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.05)
    train(ddp, zero, rank)
    zero.consolidate_state_dict(to=0)
    return values(ddp)


def redistributed(rank: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.full((6, 4), rank + 1.0), mesh, [Partial()])
    changed = [
        rows.redistribute(placements=[Replicate()]),
        rows.redistribute(placements=[Shard(1)]),
        rows @ rows.t(),
        partial.redistribute(placements=[Shard(0)]),
        partial.redistribute(placements=[Replicate()]),
    ]
    return [tensor.full_tensor().clone() for tensor in changed]


def objects(rank: int) -> list[Any]:
    gathered: list[Any] = [None, None]
    distributed.all_gather_object(gathered, {"rank": rank, "long": "x" * 1000 * rank})
    sent = [rank, "y" * rank]
    distributed.broadcast_object_list(sent, 1)
    mine: list[Any] = [None]
    distributed.scatter_object_list(mine, ["for 0", ("for", 1)] if rank == 0 else None, 0)
    collected: list[Any] | None = [None, None] if rank == 1 else None
    distributed.gather_object(("from", rank), collected, 1)
    return [gathered, sent, mine, collected]


def functionals(rank: int) -> list[Tensor]:
    world = distributed.group.WORLD
    own = torch.full((4,), rank + 1.0)
    results = [
        functional.all_reduce(own, "avg", world),
        functional.all_gather_tensor(own, 0, world),
        functional.reduce_scatter_tensor(own, "sum", 0, world),
        functional.all_to_all_single(own, [2, 2], [2, 2], world),
        functional.broadcast(own, 1, world),
        *functional.all_reduce_coalesced([own, own * 2], "sum", world),
        *functional.all_gather_into_tensor_coalesced([own, own[:1]], world),
        *functional.reduce_scatter_tensor_coalesced([own, own[:2]], "sum", [0, 0], world),
    ]
    compiled = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", world) + 1, backend="aot_eager")
    return [tensor.clone() for tensor in (*results, compiled(own))]


def left_to_gloo(rank: int) -> list[Any]:
    other = 1 - rank
    received = torch.zeros(3)
    messages = [
        distributed.P2POp(distributed.isend, torch.full((3,), float(rank)), other),
        distributed.P2POp(distributed.irecv, received, other),
    ]
    for work in distributed.batch_isend_irecv(messages):
        work.wait()
    from_any = torch.zeros(3)
    if rank == 0:
        distributed.send(torch.ones(3), 1)
    else:
        assert distributed.recv(from_any) == 0
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (2,), check_invariants=True)
    distributed.all_reduce(sparse)
    distributed.group.WORLD.monitored_barrier(timedelta(seconds=10))
    return [received, from_any, sparse.to_dense()]


def signatures(rank: int) -> list[Any]:
    """torch's groups can be called without options, too."""
    group, own = distributed.group.WORLD, torch.full((2,), rank + 1.0)
    outputs, halves = [torch.zeros(2), torch.zeros(2)], [torch.zeros(1), torch.zeros(1)]
    tensors = [own.clone() for _ in range(6)]
    short = timedelta(seconds=10)
    works = [
        group.allreduce(tensors[0]),
        group.allreduce([tensors[1]], distributed.ReduceOp.MAX),
        group.allreduce(tensors[2], op=distributed.ReduceOp.MIN, timeout=short),
        group.broadcast(tensors[3], 1),
        group.broadcast(tensors[4], root=0),
        group.reduce(tensors[5], 0, distributed.ReduceOp.SUM),
        group.allgather(outputs, own),
        group.reduce_scatter(halves[0], [own[:1], own[1:]], distributed.ReduceOp.SUM),
        group.scatter(halves[1], [own[:1], own[1:]] if rank == 0 else [], root=0),
        group.alltoall_base(own.clone(), own, [], [], timeout=short),
        group.barrier(timeout=short),
        group.barrier(),
    ]
    for work in works:
        work.wait()
    return [*tensors[: 6 if rank == 0 else 5], *outputs, *halves]


BODIES: list[Callable[[int], list[Any]]] = [
    data_parallel,
    data_parallel_with_views,
    data_parallel_under_join,
    data_parallel_with_power_sgd,
    fully_sharded,
    sharded_optimizer,
    redistributed,
    objects,
    functionals,
    left_to_gloo,
    signatures,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_same_as_on_gloo(pool: RankPool, sharing: RankPool, body: Callable[[int], list[Any]]) -> None:
    for ours, theirs in zip(sharing.run(body), pool.run(body), strict=True):
        if isinstance(ours[0], Tensor):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        else:
            assert ours == theirs


# Groups and meshes.


def overlapping(rank: int) -> None:
    sets = [[0, 1], [1, 2], [0, 1, 2], [2]]
    groups = [distributed.new_group(ranks) for ranks in sets]
    for ranks, group in zip(sets, groups, strict=True):
        if rank in ranks:
            own = torch.tensor([float(rank)])
            distributed.all_reduce(own, group=group)
            assert own.item() == sum(ranks)
    kinds = {type(group).__name__ for ranks, group in zip(sets, groups, strict=True) if rank in ranks}
    assert kinds == {"PacelineGroup"}


def meshed(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for dimension, wanted in (("inner", 4 * (rank // 2) + 1), ("outer", 2 * (rank % 2) + 2)):
        own = torch.tensor([float(rank)])
        distributed.all_reduce(own, group=mesh[dimension].get_group())
        assert own.item() == wanted
    model = net()
    fully_shard(model, mesh=mesh)  # replicas of shards
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    assert equal_on_all(values(model))


@pytest.mark.parametrize(("body", "world"), [(overlapping, 3), (meshed, 4)])
def test_groups_of_some_ranks(body: Callable[[int], None], world: int) -> None:
    run_ranks(body, world, backend="cpu:paceline")


def beside(rank: int, path: str, backend: str) -> None:
    import torch.testing._internal.distributed.fake_pg  # registers "fake", which does nothing

    store = distributed.FileStore(path, 2)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=2)
    own, meta = torch.tensor([rank + 1.0]), torch.ones(3, device="meta")
    world = distributed.group.WORLD
    for group in (world, distributed.new_group()):
        assert {device.type for device in group._device_types} == {"cpu", "meta"}
        distributed.all_reduce(own, group=group)
        distributed.all_reduce(meta, group=group)
        assert type(distributed.broadcast(meta, 0, group=group, async_op=True)).__name__ == "FakeWork"
        assert type(group._get_backend(torch.device("meta"))).__name__ == "FakeProcessGroup"
    assert own.item() == 6.0
    with pytest.raises(RuntimeError, match="cuda"):
        world._get_backend(torch.device("cuda"))
    distributed.destroy_process_group(group)
    distributed.destroy_process_group()


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"),
    reason="this version of torch has no collectives of meta tensors",
)
@pytest.mark.parametrize("backend", ["cpu:paceline,meta:fake", "meta:fake,cpu:paceline"])
def test_other_devices_keep_their_own_backend(tmp_path: Any, backend: str) -> None:
    run_ranks(beside, args=(str(tmp_path / "store"), backend), backend=None)


def test_a_rank_by_itself() -> None:
    assert run_ranks(alone, 1, backend="paceline") == [[1.0]]


def alone(_: int) -> list[float]:
    own = torch.ones(1)
    distributed.all_reduce(own)
    distributed.all_gather([own], own)
    distributed.barrier()
    return own.tolist()
