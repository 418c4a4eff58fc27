"""Our hooks, sharded states, DTensors and traced reductions, mixed with each other and with failures."""

import contextlib
import gc
from collections.abc import Sequence
from typing import Any

import meshes
import pytest
import torch
from hook_nets import (
    HOOKS,
    SHAPES,
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
from meshes import data_rank, full, parallel, same_on_data_ranks
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Join
from wrappers import Net, be_impatient, equal_on_all, rows

from paceline import (
    DistributedDataParallel,
    MixedPrecision,
    OptionError,
    ShardedOptimizer,
    UnsupportedError,
    hooks,
)
from paceline.comm.group import Group
from paceline.hooks.hook import Reduction
from paceline.testing import RankPool, run_ranks


def sums(totals: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    for total, grad in zip(totals, found, strict=True):
        total += grad


def zeros() -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]


# Hooks that raise between two of their collectives, on one rank.


class TwoRounds(hooks.Hook):
    """Averages, after a first round of another size; raises between the two, once, on rank 1."""

    step = 0

    def reduce(self, bucket: Any, group: Group) -> Reduction:
        yield group.all_reduce(torch.ones(100))
        if self.step == 1 and group.rank == 1:
            raise ZeroDivisionError("mine")
        buffer = bucket.buffer().div_(group.size)
        yield group.all_reduce(buffer)
        return buffer

    def finish(self, parameters: Any, used: Any, total: Any) -> None:  # noqa: ARG002
        self.step += 1


def raises_between(rank: int) -> list[str]:
    be_impatient()
    ddp = wrap(TwoRounds(), cap=25)
    said = []
    for step in range(2):
        try:
            run_step(ddp, gradients(rank, step=step))
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("world", [2, 3])
def test_a_hook_that_raises_in_a_later_round_aborts_nobody(world: int) -> None:
    said = run_ranks(raises_between, world, timeout=20.0)
    assert all("mine" in each[1] for each in said), said


class Exact:
    """A compressor that changes nothing; its fourth message's second encoding raises on rank 1."""

    name = "exact"
    keeps_places = True
    calls = 0

    def encode(self, given: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4 and distributed.get_rank() == 1:
            raise ZeroDivisionError("mine")
        return given.contiguous().view(torch.uint8)

    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return messages.contiguous().view(dtype)[:, :numel].clone()


def compressor_raises(rank: int) -> list[str]:
    be_impatient()
    ddp = wrap(hooks.with_error_feedback(Exact()), cap=25)
    said = []
    for step in range(2):
        try:
            run_step(ddp, gradients(rank, step=step))
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_users_compressor_that_raises_in_the_second_round_hangs_nobody() -> None:
    said = run_ranks(compressor_raises, 3, timeout=15.0)
    assert all("mine" in each[1] for each in said), said


# A lost step under a hook.


def culprit_goes_elsewhere(rank: int, name: str) -> str:
    ddp = wrap(HOOKS[name]())
    run_step(ddp, gradients(rank))
    said = ""
    try:
        ddp(gradients(rank), fail=rank == 1).backward()
    except Exception as error:
        said = type(error).__name__
    distributed.barrier()  # such as: does everyone want to go on?
    check_equal_on_all_ranks(run_step(ddp, gradients(rank, step=1)))
    return said


@pytest.mark.parametrize("name", ["average", "int8", "power_sgd"])
def test_after_a_lost_step_ranks_may_meet_before_the_next_forward(name: str) -> None:
    assert run_ranks(culprit_goes_elsewhere, 3, args=(name,), timeout=12.0)[1] == "ZeroDivisionError"


# The loss of the second rounding, with three ranks and more.


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


# ShardedOptimizer.


def accumulates_and_joins(rank: int) -> None:
    ddp = DistributedDataParallel(Net())
    optimizer = ShardedOptimizer(ddp, torch.optim.SGD, lr=0.1)
    with Join([ddp, optimizer]):
        for step in range(4 if rank == 0 else 2):
            with ddp.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                ddp(rows(rank, step)).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert equal_on_all(list(ddp.parameters()))


def test_a_sharded_optimizer_under_join_with_accumulation() -> None:
    run_ranks(accumulates_and_joins, 2, timeout=12.0)


def private_parameters(rank: int) -> float:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    nn.init.constant_(net[0].weight, rank + 1.0)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "0.bias"])
    ddp = DistributedDataParallel(net)
    optimizer = ShardedOptimizer(ddp, torch.optim.SGD, lr=0.0)
    ddp(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return float(net[0].weight[0, 0].detach())


def test_ignored_parameters_stay_each_ranks_own(pair: RankPool) -> None:
    assert pair.run(private_parameters) == [1.0, 2.0]


def closure_raises(rank: int) -> str:
    ddp = DistributedDataParallel(Net())
    optimizer = ShardedOptimizer(ddp, torch.optim.SGD, lr=0.1)

    def closure() -> Tensor:
        loss: Tensor = ddp(rows(rank, 0)).square().mean()
        loss.backward()
        if rank == 1:
            raise ZeroDivisionError
        return loss

    try:
        optimizer.step(closure)
    except ZeroDivisionError:
        return "raised"
    return "stepped"


def test_a_closure_that_raises_on_one_rank_holds_nobody() -> None:
    assert run_ranks(closure_raises, 2, timeout=10.0)[1] == "raised"


def steps_dtensors(_: int, model: str) -> list[bool]:
    mesh = meshes.mesh()["dp"]
    ours, theirs = parallel(model), parallel(model)
    wrapped = [DistributedDataParallel(each, device_mesh=mesh) for each in (ours, theirs)]
    optimizers: list[Any] = [
        ShardedOptimizer(wrapped[0], torch.optim.Adam, lr=0.1),
        torch.optim.Adam(theirs.parameters(), lr=0.1),
    ]
    for step in range(2):
        for ddp, optimizer in zip(wrapped, optimizers, strict=True):
            optimizer.zero_grad()
            ddp(meshes.rows(data_rank(), step)).square().mean().backward()
            optimizer.step()
    return [
        torch.equal(full(a), full(b)) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    ]


@pytest.mark.parametrize("model", ["mixed", "uneven"])
def test_a_sharded_optimizer_of_dtensors(four: RankPool, model: str) -> None:
    assert all(map(all, four.run(steps_dtensors, model)))


# post_local_sgd.


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


# The traced reduction: compiled autograd, python_reducer.


@contextlib.contextmanager
def python_reducer() -> Any:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        yield
    torch._dynamo.reset()


def refused_when_traced(rank: int) -> None:
    with python_reducer():
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        with pytest.raises(OptionError, match="nor with reductions in a compiled graph"):
            ddp.join()
        ddp.register_comm_hook(None, hooks.int4())
        with pytest.raises(UnsupportedError, match="int4 cannot be used in a compiled backward"):
            torch.compile(ddp, backend="eager")(rows(rank)).sum().backward()
        with pytest.raises(OptionError, match="mixed precision and reductions"):
            DistributedDataParallel(
                nn.Linear(4, 4), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
            )


def test_what_cannot_be_traced_is_refused() -> None:
    run_ranks(refused_when_traced, 2, timeout=60.0)


# Divisors.


def divides_by_active(rank: int, how: str) -> float:
    options = {"mixed_precision": MixedPrecision(param_dtype=torch.float32)} if how == "precision" else {}
    ddp = DistributedDataParallel(Net(), **options)  # type: ignore[arg-type]
    if how == "hook":
        ddp.register_comm_hook(None, hooks.average())
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(2 if rank == 0 else 1):
            ddp.zero_grad()
            ddp(rows(rank, step)).square().mean().backward()
            if step == 1:
                net = Net()
                net(rows(0, 1)).square().mean().backward()
                found = [p.grad for p in ddp.parameters()]
                return distance(found, [p.grad for p in net.parameters()])  # type: ignore[arg-type, misc]
    return 0.0


@pytest.mark.parametrize("how", ["hook", "precision"])
def test_sums_are_divided_by_the_ranks_that_have_inputs(how: str) -> None:
    off = run_ranks(divides_by_active, 2, args=(how,), timeout=15.0)[0]
    assert off < 1e-6


# Very large and very small gradients.


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


# Smaller things.


class Moody(hooks.Hook):
    """Averages; raises on rank 1 when a step begins or has ended."""

    def __init__(self, where: str) -> None:
        self.where = where

    def reduce(self, bucket: Any, group: Group) -> Reduction:
        buffer = bucket.buffer().div_(group.size)
        yield group.all_reduce(buffer)
        return buffer

    def begin(self, weight: float | None) -> None:  # noqa: ARG002
        self._raise("begin")

    def finish(self, parameters: Any, used: Any, total: Any) -> None:  # noqa: ARG002
        self._raise("finish")

    def _raise(self, where: str) -> None:
        if self.where == where and distributed.get_rank() == 1:
            self.where = ""
            raise ZeroDivisionError("mine")


def moody_hook(rank: int, where: str) -> None:
    be_impatient()
    ddp = wrap(Moody(where))
    for step in range(3):
        with contextlib.suppress(ZeroDivisionError, RuntimeError):
            run_step(ddp, gradients(rank, step=step))
    if where == "begin":  # what the hook would have sent is not known
        ddp._update_process_group(distributed.new_group())
    assert equal_on_all([*run_step(ddp, gradients(rank, step=3))], ddp.process_group)


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_a_hook_that_raises_outside_reduce_breaks_nobody(where: str) -> None:
    run_ranks(moody_hook, 3, args=(where,), timeout=12.0)


def passed_on(rank: int) -> None:
    hook = hooks.int8()
    gc.collect()
    gc.disable()
    try:
        ddp = wrap(hook)
        with contextlib.suppress(ZeroDivisionError, RuntimeError):
            ddp(gradients(rank), fail=rank == 1).backward()
        run_step(ddp, gradients(rank))
        del ddp
        wrap(hook)
    finally:
        gc.enable()


def test_a_wrapper_is_freed_at_once_after_a_lost_step_too(pair: RankPool) -> None:
    pair.run(passed_on)
