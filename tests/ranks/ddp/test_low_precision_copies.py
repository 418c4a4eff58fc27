"""Mixed precision: low-precision copies live as long as graphs need them; parameters keep full precision."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from wrappers import LOW, raise_planned, two_layers

from paceline import (
    DistributedDataParallel,
    MixedPrecision,
)
from paceline.testing import RankPool


def want(module: nn.Module, *steps: int) -> list[Tensor]:
    total = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for rank in range(2):
        for step in steps:
            low = copy.deepcopy(module).to(torch.bfloat16)
            low(rows(rank, step).bfloat16()).sum().backward()
            for into, parameter in zip(total, low.parameters(), strict=True):
                into += parameter.grad.float() / 2
    return total


def assert_close(module: nn.Module, wanted: list[Tensor]) -> None:
    for parameter, grad in zip(module.parameters(), wanted, strict=True):
        assert parameter.dtype is torch.float32
        torch.testing.assert_close(parameter.grad, grad, rtol=3e-2, atol=3e-2)


def twice_backward(ddp: Any, rank: int) -> tuple[int, ...]:
    loss = ddp(rows(rank)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return (0, 0)


def two_forwards(ddp: Any, rank: int) -> tuple[int, ...]:
    first, second = ddp(rows(rank)).sum(), ddp(rows(rank, 1)).sum()
    first.backward()
    second.backward()
    return (0, 1)


def failed_evaluation(ddp: Any, rank: int) -> tuple[int, ...]:
    loss = ddp(rows(rank)).sum()
    with torch.no_grad(), pytest.raises(RuntimeError):
        ddp(torch.ones(3, 3))
    loss.backward()
    return (0,)


def checkpointed(ddp: Any, rank: int) -> tuple[int, ...]:
    checkpoint(ddp, rows(rank).requires_grad_(), use_reentrant=False).sum().backward()
    return (0,)


def low_graphs(rank: int, act: Callable[[Any, int], tuple[int, ...]]) -> None:
    module = two_layers()
    before = copy.deepcopy(module)
    steps = act(DistributedDataParallel(module, mixed_precision=LOW), rank)
    assert_close(module, want(before, *steps))


@pytest.mark.parametrize("act", [twice_backward, two_forwards, failed_evaluation, checkpointed])
def test_low_copies_live_as_long_as_graphs_need_them(pair: RankPool, act: Callable[..., Any]) -> None:
    pair.run(low_graphs, act)


def local_steps(ddp: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.no_sync():
        ddp(rows(rank)).sum().backward()
        optimizer.step()


def step_after_a_look(ddp: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(rows(rank)).sum().backward()
    ddp(rows(rank))  # a validation with gradients on, and no backward
    optimizer.step()


def loading_after_a_look(ddp: Any, rank: int) -> None:
    values = {name: torch.full_like(value, 0.5) for name, value in ddp.state_dict().items()}
    ddp(rows(rank))
    ddp.load_state_dict(values)


def fused(ddp: Any, rank: int) -> None:
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    ddp(rows(rank)).sum().backward()


def written(rank: int, act: Callable[[Any, int], None]) -> None:
    module = two_layers()
    before = module[0].weight.detach().clone()
    ddp = DistributedDataParallel(module, mixed_precision=LOW)
    act(ddp, rank)
    ddp.zero_grad()
    ddp(rows(rank)).sum().backward()  # puts the full values back
    assert not torch.equal(module[0].weight, before), "what was written is gone"


@pytest.mark.parametrize("act", [local_steps, step_after_a_look, loading_after_a_look, fused])
def test_what_is_written_to_parameters_stays(pair: RankPool, act: Callable[..., Any]) -> None:
    pair.run(written, act)


def state_after_forward(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers(), mixed_precision=LOW)
    full = copy.deepcopy(ddp.state_dict())
    ddp(rows(rank))
    for name, value in ddp.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value, full[name])


def test_a_state_dict_is_in_full_precision(pair: RankPool) -> None:
    pair.run(state_after_forward)


def shared_by_two(rank: int) -> None:
    first, second = two_layers(), two_layers()
    second[0].weight = first[0].weight
    full = first[0].weight.detach().clone()
    wrappers = [DistributedDataParallel(each, mixed_precision=LOW) for each in (first, second)]
    sum(each(rows(rank)).sum() for each in wrappers).backward()
    assert first[0].weight.untyped_storage().nbytes()
    assert torch.equal(first[0].weight, full)


def wrapped_again(rank: int) -> None:
    module = two_layers()
    full = module[0].weight.detach().clone()
    DistributedDataParallel(module, mixed_precision=LOW)(rows(rank))
    DistributedDataParallel(module, mixed_precision=LOW)(rows(rank)).sum().backward()
    assert module[0].weight.untyped_storage().nbytes()
    assert torch.equal(module[0].weight, full)


def wrapped_again_in_another_type(rank: int) -> None:
    module = two_layers()
    half = MixedPrecision(param_dtype=torch.float16)
    first = DistributedDataParallel(module, mixed_precision=half)
    first(rows(rank)).sum().backward()
    del first
    module.zero_grad()
    before = copy.deepcopy(module)
    second = DistributedDataParallel(module, mixed_precision=LOW)
    second(rows(rank)).sum().backward()
    assert_close(module, want(before, 0))


@pytest.mark.parametrize("act", [shared_by_two, wrapped_again, wrapped_again_in_another_type])
def test_a_parameter_that_was_lowered_by_another_wrapper(pair: RankPool, act: Callable[..., Any]) -> None:
    pair.run(act)


def copied(rank: int, way: str, pending: bool) -> None:
    ddp = DistributedDataParallel(two_layers(), mixed_precision=LOW)
    ddp(rows(rank)).sum().backward()
    ddp.zero_grad()
    if pending:
        ddp(rows(rank))
    if way == "pickle":
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(ddp)
    assert torch.equal(twin.module[0].weight, two_layers()[0].weight)
    twin(rows(rank)).sum().backward()
    assert_close(twin.module, want(two_layers(), 0))


@pytest.mark.parametrize(("way", "pending"), [("pickle", False), ("pickle", True), ("deepcopy", True)])
def test_copies_of_the_wrapper(pair: RankPool, way: str, pending: bool) -> None:
    pair.run(copied, way, pending)


def lost_pass(rank: int) -> None:
    """A weighed pass that fails after an ordinary step: the error must stay the user's."""
    module = two_layers()
    ddp = DistributedDataParallel(module, mixed_precision=LOW)
    ddp(rows(rank)).sum().backward()
    handle = module[0].weight.register_hook(raise_planned)
    with pytest.raises(ZeroDivisionError), ddp.no_sync(), ddp.weigh(2.0):
        ddp(rows(rank)).sum().backward()
    handle.remove()


def test_a_weighed_pass_that_fails(pair: RankPool) -> None:
    pair.run(lost_pass)


def many_tokens(rank: int) -> None:
    """More than float16 can hold, reduced in float32."""
    module = nn.Linear(1, 1, bias=False)
    policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    ddp = DistributedDataParallel(module, mixed_precision=policy)
    ddp.backward(ddp(torch.full((1, 1), 1.0 + rank)).sum(), weight=70000)
    assert float(module.weight.grad) == 1.5


def test_a_weight_of_many_tokens_under_mixed_precision(pair: RankPool) -> None:
    pair.run(many_tokens)


class Checkpointed(nn.Module):
    """Two layers and what is between them are recomputed in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.outer = two_layers(), nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def checkpoints_inside(rank: int, reentrant: bool) -> None:
    module, plain = Checkpointed(reentrant=reentrant), Checkpointed(reentrant=reentrant)
    low = DistributedDataParallel(module, mixed_precision=LOW)
    plain.load_state_dict(module.state_dict())
    for step in range(2):
        low.zero_grad()
        low(rows(rank, step).requires_grad_()).sum().backward()
        assert_close(module, want(nn.Sequential(plain.inner, plain.outer), step))
    assert all(parameter.dtype is torch.float32 for parameter in module.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_the_module_under_mixed_precision(pair: RankPool, reentrant: bool) -> None:
    pair.run(checkpoints_inside, reentrant)
