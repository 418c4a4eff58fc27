"""Mixed precision: low-precision forward and backward, full-precision parameters for the optimizer."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from batches import rows
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecision as ShardedPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel.distributed import _MixedPrecision

from paceline import DistributedDataParallel, MixedPrecision, OptionError
from paceline.testing import RankPool

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
LOW = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


class Net(nn.Module):
    """Remembers the data types that it worked in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 2)
        self.unused = nn.Linear(2, 2)
        self.types: set[torch.dtype] = set()

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.types = {x.dtype, *(p.dtype for p in self.parameters())}
        if fail:
            raise ZeroDivisionError("planned")
        return self.last(self.frozen(torch.tanh(self.norm(self.first(x)))))


def policy(low: torch.dtype, reduce: torch.dtype | None = None, **more: Any) -> MixedPrecision:
    return MixedPrecision(param_dtype=low, reduce_dtype=reduce, buffer_dtype=torch.float32, **more)


def low_grads(net: Net, low: torch.dtype, x: Tensor) -> dict[str, Tensor]:
    """The gradients of one rank, computed in low precision by hand."""
    lowered = copy.deepcopy(net)
    for parameter in lowered.parameters():
        parameter.data = parameter.data.to(low)
    lowered(x.to(low)).sum().backward()
    return {name: p.grad for name, p in lowered.named_parameters() if p.grad is not None}


def by_hand(net: Net, low: torch.dtype, reduce: torch.dtype, step: int) -> dict[str, Tensor]:
    world = distributed.get_world_size()
    ranks = [low_grads(net, low, rows(rank, step)) for rank in range(world)]
    return {
        name: (sum(grads[name].to(reduce) for grads in ranks) / world).float()  # type: ignore[attr-defined]
        for name in ranks[0]
    }


def averaged(rank: int, view: bool, low: torch.dtype, reduce: torch.dtype | None) -> None:
    net = Net()
    ddp = DistributedDataParallel(
        net, mixed_precision=policy(low, reduce), gradient_as_bucket_view=view, bucket_cap_mb=1e-4
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        want = by_hand(net, low, reduce or low, step)
        optimizer.zero_grad(set_to_none=step != 1)
        ddp(rows(rank, step)).sum().backward()
        assert net.types == {low}
        for name, parameter in net.named_parameters():
            assert parameter.dtype is torch.float32
            if name in want:
                assert parameter.grad is not None
                assert parameter.grad.dtype is torch.float32
                torch.testing.assert_close(parameter.grad, want[name], rtol=1e-2, atol=1e-3)
            else:
                assert parameter.grad is None
        optimizer.step()
    assert all(value.dtype in (torch.float32, torch.int64) for value in ddp.state_dict().values())


@VIEWS
@LOW
@pytest.mark.parametrize("reduce", [None, torch.float32], ids=["reduced low", "reduced full"])
def test_gradients_are_the_mean_of_low_precision_ones(
    pair: RankPool, view: bool, low: torch.dtype, reduce: torch.dtype | None
) -> None:
    pair.run(averaged, view, low, reduce)


def memory(rank: int) -> None:
    """Low-precision copies live as long as the graph that needs them; the parameter itself never changes."""
    net = nn.Linear(4, 3, bias=False)
    weight, full = net.weight, net.weight.data_ptr()
    copies = []
    net.register_forward_pre_hook(
        lambda module, _: copies.append(StorageWeakRef(module.weight.untyped_storage()))
    )
    ddp = DistributedDataParallel(net, mixed_precision=policy(torch.float16))
    for step in range(2):
        loss = ddp(rows(rank, step).requires_grad_()).sum()  # whose gradient needs the weight
        assert not copies[-1].expired()
        assert net.weight is weight
        assert weight.data_ptr() == full
        loss.backward()
        del loss
        assert copies[-1].expired()


def test_low_precision_copies_take_memory_only_for_a_step(pair: RankPool) -> None:
    pair.run(memory)


def small_gradients(rank: int) -> None:
    """Half of the smallest float16 is zero: dividing before the sum would lose it."""
    net = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(net, mixed_precision=policy(torch.float16))
    tiny = 2.0**-24
    ddp(torch.tensor([[tiny]])).sum().backward()
    assert net.weight.grad is not None
    assert float(net.weight.grad) == tiny, rank


def test_small_gradients_survive(pair: RankPool) -> None:
    pair.run(small_gradients)


def accumulated(rank: int, view: bool) -> None:
    net = Net().eval()
    ddp = DistributedDataParallel(net, mixed_precision=policy(torch.bfloat16), gradient_as_bucket_view=view)
    for step in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(rows(rank, 0)).sum().backward()
        ddp(rows(rank, 1)).sum().backward()
        parts = [by_hand(net, torch.bfloat16, torch.bfloat16, each) for each in (0, 1)]
        for name, parameter in net.named_parameters():
            assert parameter.dtype is torch.float32, step
            if name in parts[0]:
                assert parameter.grad is not None
                want = parts[0][name] + parts[1][name]
                torch.testing.assert_close(parameter.grad, want, rtol=3e-2, atol=3e-2)


@VIEWS
def test_accumulation(pair: RankPool, view: bool) -> None:
    pair.run(accumulated, view)


def full_again(rank: int) -> None:
    net = Net()
    ddp = DistributedDataParallel(net, mixed_precision=policy(torch.bfloat16))
    full = net.first.weight.detach().clone()
    with torch.no_grad():
        ddp(rows(rank))
    assert net.types == {torch.bfloat16}
    assert torch.equal(net.first.weight, full)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        ddp(rows(rank), fail=True)
    assert torch.equal(net.first.weight, full)
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError, RuntimeError):
            ddp(rows(rank), fail=rank == 0).sum().backward()
        assert net.first.weight.dtype is torch.float32
    assert torch.equal(net.first.weight, full)
    ddp(rows(rank)).sum().backward()
    assert net.first.weight.grad is not None
    # An evaluation between forward and backward leaves the low-precision copies in place for backward.
    loss = ddp(rows(rank)).sum()
    with torch.no_grad():
        ddp(rows(rank))
    loss.backward()
    assert net.first.weight.dtype is torch.float32


def test_parameters_are_full_again_after_evaluation_and_after_failures(pair: RankPool) -> None:
    pair.run(full_again)


def loaded(rank: int) -> None:
    """Parameters that get other data between steps are used with it."""
    net = nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(net, mixed_precision=policy(torch.bfloat16))
    for value in (1.0, 2.0, 3.0):
        net.weight.data = torch.full((1, 2), value)
        out = ddp(torch.ones(1, 2))
        out.sum().backward()
        assert float(out) == 2 * value, rank
        assert net.weight.tolist() == [[value, value]]


def test_data_assigned_between_steps_is_used(pair: RankPool) -> None:
    pair.run(loaded)


def kept_low(rank: int) -> None:
    net = Net()
    ddp = DistributedDataParallel(
        net, mixed_precision=policy(torch.bfloat16, torch.float32, keep_low_precision_grads=True)
    )
    want = by_hand(net, torch.bfloat16, torch.float32, 0)
    ddp(rows(rank)).sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.dtype is torch.float32
        if name in want:
            assert parameter.grad is not None
            assert parameter.grad.dtype is torch.bfloat16
            torch.testing.assert_close(parameter.grad.float(), want[name], rtol=1e-2, atol=1e-2)


def test_gradients_can_stay_in_low_precision(pair: RankPool) -> None:
    pair.run(kept_low)


def other_policies(rank: int) -> None:
    for given in (
        _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float16),
        ShardedPolicy(torch.float16, torch.float32, torch.float16, cast_forward_inputs=True),
    ):
        net = nn.Sequential(nn.Linear(4, 4))
        net.register_buffer("kept", torch.ones(2))
        net.register_buffer("count", torch.ones(2, dtype=torch.int64))
        ddp = DistributedDataParallel(net, mixed_precision=given)
        assert net.kept.dtype is torch.float16
        assert net.count.dtype is torch.int64
        out = ddp(rows(rank))
        assert out.dtype is torch.float16
        out.sum().backward()
    uncast = policy(torch.float16, cast_forward_inputs=False)
    ddp = DistributedDataParallel(nn.Linear(4, 4), mixed_precision=uncast)
    with torch.no_grad(), pytest.raises(RuntimeError, match="must have the same dtype"):
        ddp(rows(rank))
    with pytest.raises(OptionError, match=r"param_dtype: torch\.int64"):
        DistributedDataParallel(nn.Linear(4, 4), mixed_precision=policy(torch.int64))


def test_policies_of_torch_and_their_options(pair: RankPool) -> None:
    pair.run(other_policies)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2, sparse=True)
        self.out = nn.Linear(2, 1, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words))


def sparse(rank: int) -> None:
    net = Bag()
    ddp = DistributedDataParallel(net, mixed_precision=policy(torch.bfloat16))
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.tensor([1, 2 + rank])).sum().backward()
        grad = net.table.weight.grad
        assert grad is not None
        assert grad.is_sparse
        assert grad.dtype is torch.float32
        rows_used = grad.to_dense().abs().sum(dim=1).nonzero().flatten().tolist()
        assert rows_used == [1, 2, 3]


def test_sparse_gradients(pair: RankPool) -> None:
    pair.run(sparse)


def weighed(rank: int) -> None:
    net = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(net, mixed_precision=policy(torch.bfloat16, torch.float32))
    x = torch.full((1, 4), float(1 + 3 * rank))
    for _ in range(2):
        ddp.zero_grad()
        ddp.backward(ddp(x).sum(), weight=1 + 2 * rank)
        assert net.weight.grad is not None
        assert net.weight.grad.dtype is torch.float32
        assert net.weight.grad.tolist() == [[(1 * 1 + 3 * 4) / 4] * 4]
        # Over two passes, the first of them only accumulated.
        ddp.zero_grad()
        with ddp.no_sync():
            ddp.backward(ddp(x).sum(), weight=1)
        ddp.backward(ddp(2 * x).sum(), weight=1)
        assert net.weight.grad.tolist() == [[(1 + 4 + 2 + 8) / 4] * 4]


def test_weights(pair: RankPool) -> None:
    pair.run(weighed)
