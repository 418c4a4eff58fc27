"""Modules of DTensor parameters: how they are wrapped, what hooks and state dicts see, torch's own way."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import meshes
import pytest
import torch
from meshes import data_rank, full, local, parallel, rows, same_on_data_ranks
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import _data_parallel_utils as theirs
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from wrappers import WRAPPERS, refusal

from paceline import DistributedDataParallel
from paceline.tensors import dtensor as ours
from paceline.testing import RankPool


def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, device_mesh=meshes.mesh()["dp"], **options)


def step(module: nn.Module, number: int = 0) -> None:
    module.zero_grad()
    module(rows(data_rank(), number)).square().mean().backward()


def starts(rank: int) -> list[bool]:
    """Each rank's own values at first: afterwards a shard's are those of the first rank that holds it."""
    net = parallel("mixed")
    for parameter in net.parameters():
        local(parameter).fill_(rank)
    net.scale.fill_(rank)
    DistributedDataParallel(net, process_group=meshes.mesh()["dp"].get_group())
    first = rank % 2
    values = [local(each) for each in (*net.parameters(), net.scale)]
    return [bool((each == first).all()) for each in values]


def test_every_shard_starts_from_the_first_data_rank(four: RankPool) -> None:
    for right in four.run(starts):
        assert all(right), right


def over_all_ranks() -> None:
    DistributedDataParallel(parallel("mixed"))


def over_tensor_ranks() -> None:
    DistributedDataParallel(parallel("mixed"), device_mesh=meshes.mesh()["tp"], init_sync=False)


def other_placements() -> None:
    net, whole = nn.Linear(4, 4), torch.ones(4, 4)
    placement = Shard(data_rank())
    net.weight = nn.Parameter(distribute_tensor(whole, meshes.mesh()["tp"], [placement]))
    wrap(net)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "shards over all ranks": (over_all_ranks, "must hold the same part"),
    "shards over the wrong dimension": (over_tensor_ranks, "'inner.0.up.weight'"),
    "different placements": (other_placements, "placements [Shard(dim=1)]"),
}


def refuses(_: int, name: str) -> tuple[str, str] | None:
    return refusal(REFUSED[name][0])


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_that_hold_other_parts_are_refused(name: str, four: RankPool) -> None:
    for refused in four.run(refuses, name):
        assert refused is not None
        assert refused[0] == "RuntimeError"
        assert REFUSED[name][1] in refused[1]


def replicated_over_all(_: int) -> list[bool]:
    """What is whole on every rank may be averaged over all of them."""
    net = nn.Linear(4, 4).double()
    net.weight = nn.Parameter(distribute_tensor(torch.eye(4, dtype=torch.float64), meshes.mesh()["tp"]))
    net.bias = nn.Parameter(distribute_tensor(torch.zeros(4, dtype=torch.float64), meshes.mesh()["tp"]))
    ddp = DistributedDataParallel(net)
    x = DTensor.from_local(rows(data_rank()), meshes.mesh()["tp"], [Replicate()])
    ddp(x).square().mean().backward()
    return [same_on_data_ranks([net.weight.grad, net.bias.grad])]


def test_replicated_parameters_may_be_averaged_over_all_ranks(four: RankPool) -> None:
    for right in four.run(replicated_over_all):
        assert all(right), right


def saves(_: int) -> list[bool]:
    """A trained model's state, loaded into another wrapper with the prefix and without it."""
    trained = wrap(parallel("mixed"))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for number in range(3):
        step(trained, number)
        optimizer.step()
    right = []
    for state in (trained.state_dict(), trained.module.state_dict()):
        fresh = wrap(parallel("mixed"))
        right.append(
            not torch.equal(full(fresh.module.inner[0].up.weight), full(trained.module.inner[0].up.weight))
        )
        fresh.load_state_dict(state)
        right += map(torch.equal, map(full, fresh.parameters()), map(full, trained.parameters()))
        right += [type(a) is type(b) for a, b in zip(fresh.parameters(), trained.parameters(), strict=True)]
        for net in (fresh, trained):
            step(net, 9)
        grads = [[full(each.grad) for each in net.parameters()] for net in (fresh, trained)]
        right += map(torch.equal, *grads)
    return right


def test_state_dicts_hold_the_parameters_and_can_be_loaded(four: RankPool) -> None:
    for right in four.run(saves):
        assert all(right), right


def converts(_: int) -> list[bool]:
    ddp = wrap(parallel("mixed").float())
    right = []
    for dtype in (torch.float64, torch.float32):
        ddp.to(dtype)
        for number in range(3):
            ddp.zero_grad()
            ddp(rows(data_rank(), number).to(dtype)).square().mean().backward()
            right.append(same_on_data_ranks([each.grad for each in ddp.parameters()]))
        right.append({each.grad.dtype for each in ddp.parameters()} == {dtype})
    return right


def test_a_wrapped_module_may_be_converted(four: RankPool) -> None:
    for right in four.run(converts):
        assert all(right), right


def hooked(_: int, name: str) -> list[bool]:
    """A hook gets the module's own parameters with flat local gradients."""
    net = parallel("mixed")
    ddp = wrap(net)
    plain = wrap(parallel("mixed"))
    group = meshes.mesh()["dp"].get_group()
    seen: list[nn.Parameter] = []

    def hook(state: Any, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.extend(bucket.parameters())
        return getattr(default_hooks, name)(state, bucket)

    ddp.register_comm_hook(group, hook)
    right = []
    for number in range(3):
        seen.clear()
        step(ddp, number)
        step(plain, number)
        right.append({id(each) for each in seen} == {id(each) for each in net.parameters()})
        tolerance = 1e-12 if name == "allreduce_hook" else 1e-2
        grads = [[full(each.grad) for each in wrapper.parameters()] for wrapper in (ddp, plain)]
        right += map(functools.partial(torch.allclose, rtol=tolerance, atol=tolerance), *grads)
    return right


@pytest.mark.parametrize("name", ["allreduce_hook", "bf16_compress_hook"])
def test_torchs_hooks_run_on_local_gradients(name: str, four: RankPool) -> None:
    for right in four.run(hooked, name):
        assert all(right), right


class Averaging(nn.Module):
    """Keeps a mean of its inputs, as BatchNorm does, which is no operation of DTensor in torch 2.10."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("num_batches_tracked", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.running_mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            self.num_batches_tracked.add_(1)
        return x * self.weight


def buffers(rank: int) -> list[bool]:
    """Buffers that are DTensors come from the first data rank, as others do."""
    net = meshes.spread(Averaging().double())
    ddp = wrap(net)
    right = [isinstance(net.running_mean, DTensor)]
    for number in range(6):
        local(net.running_mean).add_(rank)  # what no operation of DTensor tells of
        ddp(DTensor.from_local(rows(data_rank(), number), meshes.mesh()["tp"], [Replicate()]))
        ddp.zero_grad()
        ddp.module.weight.sum().full_tensor().backward()
        right.append(not same_on_data_ranks([net.running_mean]))
        ddp._sync_buffers()
        right.append(same_on_data_ranks([net.running_mean, net.num_batches_tracked]))
    return right


def test_buffers_that_are_dtensors_are_kept_equal(four: RankPool) -> None:
    for right in four.run(buffers):
        assert all(right), right


def freed(_: int) -> list[object]:
    net = parallel("mixed")
    gc.collect()
    gc.disable()
    ddp = wrap(net)
    for number in range(3):
        step(ddp, number)
    alive = weakref.ref(ddp)
    del ddp
    hooks = [len(each._post_accumulate_grad_hooks or ()) for each in net.parameters()]
    gc.enable()
    return [alive() is None, not any(hooks)]


def test_a_wrapper_is_freed_at_once_and_takes_its_hooks_along(four: RankPool) -> None:
    for right in four.run(freed):
        assert all(right), right


def torchs_way(_: int, wrapper: str, transform: bool) -> list[torch.Tensor]:
    """Train in float32 as torch combines the two; this rank's part of each parameter afterwards."""
    net = parallel("mixed").float()
    if transform:
        _pre_dp_module_transform(net)
        net = WRAPPERS[wrapper](net, process_group=meshes.mesh()["dp"].get_group())
    else:
        net = WRAPPERS[wrapper](net, device_mesh=meshes.mesh()["dp"])
    # Torch's way takes parameters out of the module at the first forward.
    parameters = list(net.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for number in range(5):
        optimizer.zero_grad()
        net(rows(data_rank(), number).float()).square().mean().backward()
        optimizer.step()
    return [local(each) for each in parameters]


@pytest.mark.parametrize("transform", [True, False], ids=["by hand", "by mesh"])
def test_torchs_way_gives_the_same_bits(transform: bool, four: RankPool) -> None:
    with_torch = four.run(torchs_way, "torch", transform)
    for ours_, theirs_ in zip(four.run(torchs_way, "paceline", transform), with_torch, strict=True):
        assert len(ours_) == len(theirs_) > 0
        assert all(map(torch.equal, ours_, theirs_))


def flat_and_back(_: int, named: Any) -> list[Any]:
    """What the functions do, in words: over torch's and over ours."""
    mesh = meshes.mesh()["tp"]
    plain = torch.ones(2)
    said: list[Any] = [theirs_ is plain and spec is None for theirs_, spec in [named._flatten_tensor(plain)]]
    whole = distribute_tensor(torch.arange(12.0).view(4, 3).t(), mesh, [Shard(1)])
    part, spec = named._flatten_tensor(whole)
    said += [part is whole._local_tensor, part.requires_grad, spec is whole._spec]
    leaf = nn.Parameter(part.detach())
    back = named._unflatten_tensor(leaf, spec)
    said += [back.placements, back.shape, back.stride(), torch.equal(full(back), full(whole))]
    back.redistribute(placements=[Replicate()]).to_local().square().sum().backward()
    said += [leaf.grad, type(leaf.grad).__name__, len(leaf._backward_hooks)]
    frozen = named._unflatten_tensor(part.detach().requires_grad_(False), spec)
    return [*said, frozen.requires_grad, frozen._backward_hooks]


def compared(rank: int) -> list[bool]:
    pairs = zip(flat_and_back(rank, ours), flat_and_back(rank, theirs), strict=True)
    return [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs]


def test_flat_and_back_is_as_torchs(four: RankPool) -> None:
    for same in four.run(compared):
        assert len(same) == 13
        assert all(same), same


class Streams:
    """A device's module that notes which stream was current."""

    def __init__(self) -> None:
        self.entered: list[object] = []

    def stream(self, stream: object) -> "Streams":
        self.entered.append(stream)
        return self

    def __enter__(self) -> None:
        self.entered.append("in")

    def __exit__(self, *_: object) -> None:
        self.entered.append("out")


def waits(_: int, named: Any) -> list[Any]:
    group = meshes.mesh()["tp"].get_group()
    ready, streams = torch.ones(2), Streams()
    said: list[Any] = [named.sync_grad_hook(ready) is ready, named.sync_grad_hook(None)]
    said.append(named.sync_grad_hook(ready, device_handle=streams, compute_stream="s") is ready)
    for options in ({}, {"device_handle": streams, "compute_stream": "s"}):
        pending = distributed._functional_collectives.all_reduce(torch.ones(2), "sum", group)
        waited = named.sync_grad_hook(pending, **options)
        said += [type(pending).__name__, type(waited).__name__, waited.tolist(), [*streams.entered]]
    return said


def waited(rank: int) -> tuple[list[Any], list[Any]]:
    return waits(rank, ours), waits(rank, theirs)


def test_gradients_of_a_collective_are_waited_for(four: RankPool) -> None:
    for said, theirs_ in four.run(waited):
        assert said == theirs_
        assert said[:3] == [True, None, True]
        assert said[3:] == [
            *("AsyncCollectiveTensor", "Tensor", [2.0, 2.0], []),
            *("AsyncCollectiveTensor", "Tensor", [2.0, 2.0], ["s", "in", "out"]),
        ]
