"""Steps on an accelerator: the host issues them and goes on; nothing is read back from the device."""

import copy
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline import DistributedDataParallel
from paceline.ddp.buckets.dense import LARGE_NUMEL
from paceline.errors import PeerError
from paceline.testing import run_ranks, toy

STEPS = 4
Make = Callable[[], nn.Module]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Skipping(nn.Module):
    """A module of which each rank uses other parameters, and none uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 3) for _ in range(4)])
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x) + self.parts[1 + self.rank](x)  # type: ignore[no-any-return]


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * rank + step))


def train(module: nn.Module, rank: int, device: str, group: Any, **options: Any) -> dict[str, Tensor]:
    """Train for some steps, the last ones while the device holds; returns the parameters."""
    module = module.to(device)
    if isinstance(module, Skipping):
        module.rank = rank
    hook = options.pop("hook", None)
    weights = options.pop("weights", None)
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.0002, **options)
    if hook is not None:
        ddp.register_comm_hook(group, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs = [rows(rank, step).to(device) for step in range(STEPS)]

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = ddp(inputs[number]).square().mean()
        if weights is None:
            loss.backward()
        else:
            ddp.backward(loss, weight=weights[rank])
        optimizer.step()

    for number in range(STEPS - 2):
        step(number)
    if device == "cpu":
        for number in range(STEPS - 2, STEPS):
            step(number)
        return module.state_dict()
    toy.register().synchronize()
    with toy.counting() as counts, toy.hold():  # a host that waits for the device raises
        for number in range(STEPS - 2, STEPS):
            step(number)
        assert toy.unfinished() > 0
    assert (counts.reads, counts.waits, counts.host_copies) == (0, 0, 0), counts
    return {name: value.cpu() for name, value in module.state_dict().items()}


def compare(rank: int, make: Make, options: dict[str, Any]) -> None:
    toy.register()
    torch.manual_seed(0)
    module = make()
    found = train(copy.deepcopy(module), rank, "toy:0", toy.new_group(), **options)
    wanted = train(module, rank, "cpu", None, transport="c10d", **options)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("make", [layers, with_buffers, Skipping])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"weights": (2.0, 3.0)}, {"hook": default_hooks.allreduce_hook}],
    ids=["default", "views", "weighted", "hook"],
)
def test_a_step_has_no_reads_and_no_waits_and_the_cpus_bits(make: Make, options: dict[str, Any]) -> None:
    run_ranks(compare, 2, args=(make, options))


def one_rank(rank: int) -> None:
    compare(rank, with_buffers, {})


def test_nor_has_a_step_of_one_rank() -> None:
    run_ranks(one_rank, 1)


def allocations(rank: int) -> tuple[int, int]:
    toy.register()
    torch.manual_seed(0)
    module = layers().to("toy:0")
    x = rows(rank, 0).to("toy:0")

    def count(net: nn.Module) -> int:
        for _ in range(3):
            net.zero_grad()
            net(x).sum().backward()
        net.zero_grad()
        with toy.counting() as counts:
            net(x).sum().backward()
        return counts.allocations

    alone = count(module)
    return alone, count(DistributedDataParallel(module, process_group=toy.new_group()))


def test_the_wrapper_allocates_nothing_on_the_device_in_a_step() -> None:
    for alone, wrapped in run_ranks(allocations, 2):
        assert wrapped == alone


class Copies(TorchDispatchMode):
    """Counts calls with tensors of the device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "toy" in {tensor.device.type for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}:
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def copies(rank: int, numel: int) -> tuple[int, Counter[str]]:
    toy.register()
    torch.manual_seed(0)
    module = nn.ParameterList([nn.Parameter(torch.ones(numel)) for _ in range(100)]).to("toy:0")
    net = Summing(module)
    ddp = DistributedDataParallel(net, process_group=toy.new_group(), bucket_cap_mb=numel * 4e-5)
    for _ in range(3):
        ddp(rank + 1.0).backward()
        ddp.zero_grad()
    loss = ddp(rank + 1.0)
    with Copies() as counted:
        loss.backward()
    return len(ddp._reducer.context.bucket_set.buckets), counted.names


class Summing(nn.Module):
    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.all = parameters

    def forward(self, x: float) -> Tensor:
        return sum((parameter * x).sum() for parameter in self.all)  # type: ignore[return-value]


@pytest.mark.parametrize("numel", [8, LARGE_NUMEL])
def test_a_bucket_is_copied_by_one_call_and_scaled_by_one(numel: int) -> None:
    for buckets, names in run_ranks(copies, 2, args=(numel,)):
        assert buckets > 1
        assert names["_foreach_copy_"] == buckets
        assert names["_foreach_mul_"] == buckets
        assert not names["copy_"]


def raise_in_forward(rank: int) -> None:
    toy.register()
    ddp = DistributedDataParallel(layers().to("toy:0"), process_group=toy.new_group())
    x = rows(rank, 0).to("toy:0")
    for number in range(4):
        ddp.zero_grad()
        if number == 2:
            error, text = (TypeError, "") if rank == 1 else (PeerError, "in forward of step 2")
            with pytest.raises(error, match=text):
                ddp("no tensor" if rank == 1 else x).sum().backward()
        else:
            ddp(x).sum().backward()
            assert all(parameter.grad is not None for parameter in ddp.parameters())


def test_a_step_that_one_rank_gives_up_is_lost_on_all_and_the_next_is_fine() -> None:
    run_ranks(raise_in_forward, 2)


class Changing(distributed.ProcessGroup):
    """A group that counts its ranks anew whenever it is asked, as torchft's do."""

    def __init__(self, inner: Any, now: int) -> None:
        super().__init__(0, 1)
        self.inner = inner
        self.now = now

    def size(self) -> int:
        return self.now

    def allreduce(self, *args: Any) -> Any:
        return self.inner.allreduce(*args)


def meet_later(rank: int) -> None:
    toy.register()
    torch.manual_seed(0)
    group = Changing(toy.new_group(), now=rank)  # rank 1 believes to be alone, rank 0 knows of nobody
    ddp = DistributedDataParallel(nn.Linear(3, 2).to("toy:0"), process_group=group)
    group.now = 2
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((1, 3), rank + 1.0, device="toy:0")).sum().backward()
        assert ddp.module.weight.grad.cpu().unique().tolist() == [1.5]


def test_ranks_that_change_report_on_the_device_whoever_was_there_at_first() -> None:
    run_ranks(meet_later, 2)


def some_and_all(rank: int) -> None:
    """Ranks 0 and 1 have opened more groups than rank 2 when all three meet."""
    toy.register()
    timeout = timedelta(seconds=10)
    some, everyone = toy.new_group([0, 1], timeout), toy.new_group(timeout=timeout)
    if rank < 2:
        DistributedDataParallel(layers().to("toy:0"), process_group=some)
    ddp = DistributedDataParallel(layers().to("toy:0"), process_group=everyone)
    assert ddp._group.host is not None
    ddp(rows(rank, 0).to("toy:0")).sum().backward()


def test_ranks_meet_on_the_host_whatever_groups_each_has_opened_before() -> None:
    run_ranks(some_and_all, 3)


def open_files(rank: int) -> list[int]:
    toy.register()
    group = toy.new_group()
    counts = []
    for _ in range(8):
        ddp = DistributedDataParallel(layers().to("toy:0"), process_group=group)
        ddp(rows(rank, 0).to("toy:0")).sum().backward()
        del ddp
        counts.append(sum(1 for _ in Path("/proc/self/fd").iterdir()))
    return counts


def test_a_wrapper_that_is_gone_leaves_no_connections_behind() -> None:
    for first, *later in run_ranks(open_files, 2):
        # The thread that asks the store has a connection of its own, and opens it when it comes to it.
        assert later[-1] - first < len(later), "each wrapper leaves a file open"
