"""A process group in Python with three collectives, no name and no store, in a process without any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bare_groups import WORKS, BareGroup
from batches import rows
from hook_nets import HOOKS, Given, gradients, mean
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint
from wrappers import LOW, grads, of_whole_batch, train, two_layers

from paceline import DistributedDataParallel, PeerError, ShardedOptimizer, StalledError
from paceline.errors import MismatchError
from paceline.testing import RanksError, run_ranks

EACH_WORK = pytest.mark.parametrize("work", WORKS)
WORLD = 2


def run(fn: Callable[..., Any], *args: Any, world: int = WORLD) -> list[Any]:
    """Call a function on fresh ranks that have no process group."""
    return run_ranks(fn, world, args=args, backend=None)


class Deep(nn.Module):
    """Layers that are checkpointed in both ways, shared, normalised, and used on one rank or on none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.again = nn.Linear(8, 8, dtype=torch.float64)
        self.other = nn.Linear(8, 8, dtype=torch.float64)
        self.on_one = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(WORLD))
        self.on_none = nn.Linear(8, 8, dtype=torch.float64)
        self.last = nn.Linear(8, 2, dtype=torch.float64)

    def forward(self, x: Tensor, which: int) -> Tensor:
        h = self.norm(self.first(x))
        h = checkpoint(self.again, h, use_reentrant=True)
        h = checkpoint(self.other, self.again(h).tanh(), use_reentrant=False)
        return self.last(self.on_one[which](h))


def one_process(steps: int, step_of: Callable[[nn.Module, int, int], None]) -> list[Tensor | None]:
    """Gradients of one process for the batches of all ranks, after the same steps."""
    net = Deep().eval()
    for step in range(steps):
        net.zero_grad()
        for rank in range(WORLD):
            step_of(net, rank, step)
    return [None if each.grad is None else each.grad / WORLD for each in net.parameters()]


def plain_step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step, dtype=torch.float64), rank).square().mean().backward()


def assert_as_one_process(net: nn.Module, want: list[Tensor | None]) -> None:
    for (name, parameter), whole in zip(net.named_parameters(), want, strict=True):
        assert (parameter.grad is None) == (whole is None), name
        if whole is not None:
            torch.testing.assert_close(parameter.grad, whole, rtol=1e-12, atol=1e-14, msg=name)


def trained(rank: int, folder: Path, work: str, options: dict[str, Any]) -> int:
    group = BareGroup(folder, rank, WORLD, work=work)
    ddp = DistributedDataParallel(Deep(), process_group=group, bucket_cap_mb=0.0001, **options)
    ddp.eval()  # running means, which no rank changes: the same function on one process
    for step in range(4):
        ddp.zero_grad()
        plain_step(ddp, rank, step)
    assert_as_one_process(ddp.module, one_process(4, plain_step))
    return len(ddp._reducer.context.bucket_set.buckets)


@EACH_WORK
def test_many_buckets_checkpoints_and_unused_parameters(tmp_path: Path, work: str) -> None:
    buckets = run(trained, tmp_path, work, {})
    assert min(buckets) > 5


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"init_sync": False}],
    ids=lambda options: next(iter(options)),
)
def test_torchs_options(tmp_path: Path, options: dict[str, Any]) -> None:
    run(trained, tmp_path, "with a future", options)


def accumulated(rank: int, folder: Path) -> None:
    def step_of(net: nn.Module, rank: int, step: int) -> None:
        for part in range(2):
            plain_step(net, rank, 2 * step + part)

    group = BareGroup(folder, rank, WORLD)
    ddp = DistributedDataParallel(Deep(), process_group=group)
    ddp.eval()
    for step in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            plain_step(ddp, rank, 2 * step)
        plain_step(ddp, rank, 2 * step + 1)
    assert_as_one_process(ddp.module, one_process(2, step_of))


def test_accumulation(tmp_path: Path) -> None:
    run(accumulated, tmp_path)


def buffers_and_start(rank: int, folder: Path, work: str) -> dict[str, list[float]]:
    group = BareGroup(folder, rank, WORLD, work=work)
    net = Deep()
    with torch.no_grad():  # rank 0's values are everyone's
        net.first.weight.add_(rank)
        net.norm.running_mean.add_(rank)
    ddp = DistributedDataParallel(net, process_group=group)
    assert set(group.calls) == {"allgather", "broadcast"}
    for step in range(3):
        plain_step(ddp, rank, step)
    ddp(rows(dtype=torch.float64), 0)
    return {name: value.flatten().tolist() for name, value in net.state_dict().items()}


@EACH_WORK
def test_parameters_and_buffers_start_equal_and_buffers_stay_so(tmp_path: Path, work: str) -> None:
    first, second = run(buffers_and_start, tmp_path, work)
    assert first == second


def averaged_by_hook(rank: int, folder: Path, name: str, size: int) -> None:
    group = BareGroup(folder, rank, size)
    ddp = DistributedDataParallel(Given(), process_group=group, bucket_cap_mb=0.003)
    ddp.register_comm_hook(None, HOOKS[name]())
    ddp(gradients(rank)).backward()
    want = mean([gradients(each) for each in range(size)])
    worst = max(float(each.abs().max()) for each in want if each.numel())
    for parameter, whole in zip(ddp.parameters(), want, strict=True):
        assert parameter.grad is not None
        if whole.numel():
            # int4 is the coarsest; top_k and power_sgd leave out what they remember for later steps.
            assert float((parameter.grad - whole).abs().max()) < (0.2 if "_" not in name else 4) * worst


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_our_hooks(tmp_path: Path, name: str, size: int) -> None:
    run(averaged_by_hook, tmp_path, name, size, world=size)


def averaged_by_torchs_hook(rank: int, folder: Path, name: str) -> None:
    group = BareGroup(folder, rank, WORLD, work="with a future")
    ddp = DistributedDataParallel(Deep(), process_group=group, bucket_cap_mb=0.0001)
    ddp.eval()
    if name == "built-in":
        ddp._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)
    else:
        ddp.register_comm_hook(group, getattr(default_hooks, name))
    for step in range(3):
        ddp.zero_grad()
        plain_step(ddp, rank, step)
    if name == "fp16_compress_hook":
        assert ddp.module.last.weight.grad is not None
        return
    assert_as_one_process(ddp.module, one_process(3, plain_step))


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "built-in"])
def test_torchs_hooks(tmp_path: Path, name: str) -> None:
    run(averaged_by_torchs_hook, tmp_path, name)


def built_in_without_future(rank: int, folder: Path) -> None:
    group = BareGroup(folder, rank, WORLD, work="plain")
    ddp = DistributedDataParallel(Deep(), process_group=group)
    ddp.eval()
    ddp._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)
    plain_step(ddp, rank, 0)
    assert_as_one_process(ddp.module, one_process(1, plain_step))


def test_a_built_in_hook_needs_no_future(tmp_path: Path) -> None:
    run(built_in_without_future, tmp_path)


def joined(rank: int, folder: Path) -> dict[str, list[float]]:
    group = BareGroup(folder, rank, WORLD)
    net = Deep().eval()
    ddp = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with ddp.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            plain_step(ddp, rank, step)
            optimizer.step()
    found = {name: value.flatten().tolist() for name, value in net.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number} {name}": value.flatten().tolist() for name, value in state.items()}
    return found


def test_join_ends_with_equal_models_and_optimizers(tmp_path: Path) -> None:
    first, second = run(joined, tmp_path)
    assert first == second
    assert any("exp_avg" in name for name in first)


def sharded(rank: int, folder: Path) -> None:
    group = BareGroup(folder, rank, WORLD)
    found = []
    for shard in (False, True):
        net = Deep().eval()
        ddp = DistributedDataParallel(net, process_group=group)
        optimizer: Any = (
            ShardedOptimizer(ddp, torch.optim.Adam, lr=0.01)
            if shard
            else torch.optim.Adam(net.parameters(), lr=0.01)
        )
        for step in range(3):
            optimizer.zero_grad()
            plain_step(ddp, rank, step)
            optimizer.step()
        if shard:
            optimizer.consolidate_state_dict()
        if rank == 0:
            found.append(optimizer.state_dict()["state"][0]["exp_avg"])
        found.append(net.first.weight.detach().clone())
    half = len(found) // 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[:half], found[half:], strict=True))


def test_the_sharded_optimizer(tmp_path: Path) -> None:
    run(sharded, tmp_path)


def in_mixed_precision(rank: int, folder: Path) -> None:
    group = BareGroup(folder, rank, WORLD)
    ddp = DistributedDataParallel(two_layers(), process_group=group, mixed_precision=LOW)
    for step in range(2):
        train(ddp, rank, step)
    for found, want in zip(grads(ddp), of_whole_batch(two_layers(), 1), strict=True):
        torch.testing.assert_close(found, want, rtol=0.05, atol=0.01)


def test_mixed_precision(tmp_path: Path) -> None:
    run(in_mixed_precision, tmp_path)


def weighed(rank: int, folder: Path) -> None:
    group = BareGroup(folder, rank, WORLD)
    ddp = DistributedDataParallel(Given([(3,)], torch.float64), process_group=group)
    with ddp.weigh(1 + 2 * rank):
        ddp([torch.full((3,), float(rank), dtype=torch.float64)]).backward()
    (parameter,) = ddp.parameters()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.75] * 3


def test_weights(tmp_path: Path) -> None:
    run(weighed, tmp_path)


def sparse(rank: int, folder: Path) -> list[float]:
    group = BareGroup(folder, rank, WORLD)
    net = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
    ddp = DistributedDataParallel(net, process_group=group)
    ddp(torch.tensor([rank, 4])).sum().backward()
    assert net.weight.grad is not None
    return net.weight.grad.to_dense()[:, 0].tolist()


def test_sparse_gradients(tmp_path: Path) -> None:
    assert run(sparse, tmp_path) == [[0.5, 0.5, 0, 0, 1, 0]] * WORLD


def given_up(rank: int, folder: Path, where: str) -> str:
    group = BareGroup(folder, rank, WORLD, work="with a future")
    ddp = DistributedDataParallel(Given([(3,), (4,)]), process_group=group, bucket_cap_mb=0.00001)

    def fail(_: Tensor) -> Tensor:
        raise ZeroDivisionError

    hooks = []
    if where == "backward" and rank:
        hooks = [ddp.module.weights[0].register_hook(fail)]
    with pytest.raises((ZeroDivisionError, PeerError)) as caught:
        ddp(gradients(rank, shapes=[(3,), (4,)]), fail=where == "forward" and rank == 1).backward()
    for hook in hooks:
        hook.remove()
    assert [parameter.grad for parameter in ddp.parameters()] == [None, None]
    ddp([torch.full((3,), float(rank)), torch.ones(4)]).backward()
    assert [parameter.grad[0].item() for parameter in ddp.parameters()] == [0.5, 1.0]
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_on_one_rank_loses_the_step_on_every_rank(tmp_path: Path, where: str) -> None:
    first, second = run(given_up, tmp_path, where)
    assert f"PeerError: rank 1 raised an exception in {where} of step 0" in first
    assert "ZeroDivisionError" in second


def missing(rank: int, folder: Path) -> str:
    group = BareGroup(folder, rank, WORLD, work="with a future", seconds=2)
    ddp = DistributedDataParallel(Given([(3,)]), process_group=group)
    if rank:
        return ""
    with pytest.raises(StalledError) as caught:
        ddp(gradients(0, shapes=[(3,)])).backward()
    return str(caught.value)


def test_a_rank_that_never_comes_ends_in_the_groups_own_timeout(tmp_path: Path) -> None:
    said = run(missing, tmp_path)[0]
    assert "bucket 0 (weights.0) of step 0 was not reduced on rank 0" in said
    assert "the group has no store that could tell which" in said


def different(rank: int, folder: Path) -> None:
    group = BareGroup(folder, rank, WORLD)
    DistributedDataParallel(nn.Linear(2, 2 + rank), process_group=group)


def test_different_models_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run(different, tmp_path)
    assert all(isinstance(each, MismatchError) for each in caught.value.exceptions)
    assert "'weight' in rank 0 is not 'weight' in rank 1" in str(caught.value.exceptions[0])


def two_wrappers(rank: int, folder: Path) -> None:
    """Both in one loss, each rank in another order of its own gradients."""
    group = BareGroup(folder, rank, WORLD)
    nets = [Given([(3,)]), Given([(5,)])]
    first, second = (DistributedDataParallel(net, process_group=group) for net in nets)
    for _ in range(2):
        losses = [first([torch.full((3,), float(rank))]), second([torch.full((5,), 1.0 + rank)])]
        sum(reversed(losses) if rank else losses).backward()
        assert [net.weights[0].grad[0].item() for net in nets] == [0.5, 1.5]
        for net in nets:
            net.zero_grad()


def test_two_wrappers_of_one_group_take_turns(tmp_path: Path) -> None:
    run(two_wrappers, tmp_path)


def moved(rank: int, folder: Path) -> None:
    group = BareGroup(folder, rank, WORLD)
    ddp = DistributedDataParallel(Given([(3,)]), process_group=group)
    ddp([torch.ones(3)]).backward()
    (folder / "second").mkdir(exist_ok=True)
    ddp._update_process_group(BareGroup(folder / "second", rank, WORLD))
    ddp.zero_grad()
    ddp([torch.full((3,), float(rank))]).backward()
    assert ddp.module.weights[0].grad.tolist() == [0.5] * 3
    said = ddp._get_ddp_logging_data()
    assert (said["world_size"], said["rank"], said["backend_name"]) == (WORLD, rank, "BareGroup")


def test_a_wrapper_moves_to_another_bare_group(tmp_path: Path) -> None:
    run(moved, tmp_path)


class Lonely(distributed.ProcessGroup):
    """One rank, whose collectives have nothing to do."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.waits = 0

    def allreduce(self, tensors: Any, _: Any) -> Any:
        return Waited(self, tensors)

    broadcast = allreduce

    def allgather(self, outputs: Any, inputs: Any, _: Any) -> Any:
        for output, given in zip(outputs[0], inputs, strict=True):
            output.copy_(given)
        return Waited(self, outputs)


class Waited(distributed.Work):
    def __init__(self, group: Lonely, result: Any) -> None:
        super().__init__()
        self._group = group
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, _: Any) -> bool:
        self._group.waits += 1
        return True

    def get_future(self) -> Any:
        return self._future


def test_a_group_of_one_rank_needs_no_process_group_at_all() -> None:
    assert not distributed.is_initialized()
    group = Lonely()
    unsynced = DistributedDataParallel(Deep(), process_group=group, init_sync=False)
    assert group.waits == 0
    for ddp in (unsynced, DistributedDataParallel(Deep(), process_group=group, gradient_as_bucket_view=True)):
        ddp.eval()
        for step in range(3):
            ddp.zero_grad()
            plain_step(ddp, 0, step)
        net = Deep().eval()
        plain_step(net, 0, 2)
        assert_as_one_process(ddp.module, [parameter.grad for parameter in net.parameters()])
    assert group.waits > 0
