"""Outputs that are remote references, and backward passes of distributed autograd."""

import functools
import tempfile
from typing import Any

import batches
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import autograd, rpc

from paceline import DistributedDataParallel
from paceline.testing import run_ranks

WORLD = 2

rows = functools.partial(batches.rows, count=3, dtype=torch.float64)


class Net(nn.Module):
    """Answers with a tensor, a reference to one, or a dict with a reference; may leave a layer out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(3, 4, sparse=True)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, answer: str = "tensor", all_layers: bool = True) -> Any:
        x = self.first(x) + self.words(torch.arange(3))
        x = self.last(x) if all_layers else x
        if answer == "tensor":
            return x
        return rpc.RRef(x) if answer == "reference" else {"rref": rpc.RRef(x)}


def dense(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.to_dense()


def tensor_in(answer: Any) -> Tensor:
    answer = answer["rref"] if isinstance(answer, dict) else answer
    return answer if isinstance(answer, Tensor) else answer.to_here()


def whole_batch(step: int, fewer: int | None) -> list[Tensor | None]:
    plain = Net().double()
    for rank in range(WORLD):
        ((plain(rows(rank, step), all_layers=rank != fewer) * 2).square().sum() / WORLD).backward()
    return [dense(parameter.grad) for parameter in plain.parameters()]


def backward(ddp: nn.Module, rank: int, step: int, **how: Any) -> list[Tensor | None]:
    """One backward through the other rank; returns what the context holds."""
    with autograd.context() as context:
        y = tensor_in(ddp(rows(rank, step), **how))
        far = rpc.rpc_sync(f"rank{1 - rank}", torch.mul, args=(y, 2))
        autograd.backward(context, [far.square().sum()])
        held = autograd.get_gradients(context)
        torch.distributed.barrier()  # the other's backward goes through this rank too
        return [dense(held.get(parameter)) for parameter in ddp.parameters()]


def check(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def in_contexts(rank: int, views: bool) -> None:
    ddp = DistributedDataParallel(Net().double(), gradient_as_bucket_view=views)
    local = torch.ones_like(ddp.module.first.bias)
    ddp.module.first.bias.grad = local
    answers = ["tensor", "reference", "tensor", "nested", "tensor"]
    for step, (answer, fewer) in enumerate(zip(answers, [None, None, 0, 1, None], strict=True)):
        got = backward(ddp, rank, step, answer=answer, all_layers=rank != fewer)
        check(got, whole_batch(step, fewer))
        assert ddp.module.first.bias.grad is local
        assert ddp.module.last.bias.grad is None
    with ddp.no_sync():
        got = backward(ddp, rank, 5)
    assert not torch.allclose(got[1], whole_batch(5, None)[1])
    ddp.zero_grad()
    (tensor_in(ddp(rows(rank, 6), answer="reference")) * 2).square().sum().backward()
    check([dense(parameter.grad) for parameter in ddp.parameters()], whole_batch(6, None))
    with (
        pytest.raises(RuntimeError),
        autograd.context() as context,
        ddp.weigh(2.0),
    ):
        autograd.backward(context, [ddp(rows(rank, 0)).sum()])
    assert "weighed in distributed autograd" in ddp._get_ddp_logging_data()["error"]


def with_rpc(rank: int, directory: str, views: bool) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/rpc")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=WORLD, rpc_backend_options=options)
    in_contexts(rank, views)
    rpc.shutdown()


@pytest.mark.parametrize("views", [False, True], ids=["own gradients", "views"])
def test_gradients_in_a_context_are_those_of_the_whole_batch(views: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(with_rpc, WORLD, args=(directory, views), timeout=60)
