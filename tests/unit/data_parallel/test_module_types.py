"""Recurrent, sparse, complex, normalized, lazy, frozen and partly unused modules."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import random_rows
from replicas import (
    COUNTS,
    TWO,
    Call,
    Gradients,
    assert_same,
    assert_same_as_module,
    gradients,
    small_net,
    trained,
)
from torch import nn

from paceline import DataParallel


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(2, 3, num_layers=2, batch_first=True).double()
        self.head = nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rnn.flatten_parameters()
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("count", COUNTS)
def test_recurrent_modules_have_the_modules_outputs_and_gradients(kind: type[nn.RNNBase], count: int) -> None:
    module, x = Recurrent(kind), random_rows(6, 4, 2)
    assert_same_as_module(module, x, count=count)
    with torch.no_grad():
        assert_same(DataParallel(module, ["cpu"] * count)(x), module(x))


def test_transformer_layers_have_the_modules_outputs_and_gradients() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    assert_same_as_module(layer, random_rows(6, 3, 4))
    layer.eval()
    with torch.no_grad():
        assert_same(DataParallel(layer, TWO)(random_rows(6, 3, 4) * 0), layer(random_rows(6, 3, 4) * 0))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_stay_sparse(kind: Any, count: int) -> None:
    module = kind(7, 3, sparse=True).double()
    x = torch.tensor([[0, 1], [1, 2], [3, 3], [0, 6], [5, 1]])
    expected = trained(module, module, x)[1]["weight"].to_dense()
    got = trained(DataParallel(module, ["cpu"] * count), module, x)[1]["weight"]
    assert got.is_sparse
    assert_same(got.to_dense(), expected)


@pytest.mark.parametrize("first", ["sparse", "dense"])
def test_a_sparse_gradient_and_a_dense_one_of_the_same_parameter_are_added(first: str) -> None:
    class Either(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            is_first = bool((x < 2).all())
            return super().forward(x) if is_first == (first == "sparse") else self.weight[x]

    module, x = Either(4, 3, sparse=True).double(), torch.tensor([0, 1, 2, 3])
    module.weight.grad = None
    DataParallel(module, TWO)(x).square().sum().backward()
    got = module.weight.grad
    assert_same(got.to_dense() if got.is_sparse else got, 2 * module.weight.detach())


def test_an_embedding_with_a_norm_limit_renorms_the_modules_weight() -> None:
    module = nn.Embedding(5, 3, max_norm=1.0).double()
    module.weight.data.mul_(10)
    twin, x = copy.deepcopy(module), torch.tensor([0, 1, 2, 2])
    expected = trained(twin, twin, x)
    assert_same(trained(DataParallel(module, TWO), module, x), expected)
    assert_same(module.weight, twin.weight)


@pytest.mark.parametrize("count", COUNTS)
def test_complex_parameters_have_the_modules_gradients(count: int) -> None:
    module = nn.Linear(2, 3, dtype=torch.cdouble)
    x = torch.randn(6, 2, dtype=torch.cdouble)

    def run(call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, Gradients]:
        y = call(x)
        y.abs().sum().backward()
        return y.detach(), gradients(module)

    expected = run(module)
    assert_same(run(DataParallel(module, ["cpu"] * count)), expected)


def test_gradients_reach_buffers_that_require_them() -> None:
    module = Call(lambda m, x: x * m.scale)
    module.register_buffer("scale", random_rows(2).requires_grad_())
    x = random_rows()
    (expected,) = torch.autograd.grad(module(x).square().sum(), module.scale)
    DataParallel(module, TWO)(x).square().sum().backward()
    assert_same(module.scale.grad, expected)


def test_one_module_may_have_several_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(2, 2, dtype=torch.bfloat16)
            self.mid = nn.Linear(2, 2)
            self.high = nn.Linear(2, 2, dtype=torch.double)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(self.mid(self.low(x.bfloat16()).float()).double())

    module, x = Mixed(), torch.randn(6, 2)
    expected = trained(module, module, x)
    got = trained(DataParallel(module, TWO), module, x)
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
    assert [g.dtype for g in got[1].values()] == [p.dtype for p in module.parameters()]


@pytest.mark.parametrize("dtypes", [(torch.float, torch.double), (torch.double, torch.bfloat16)])
def test_gradients_keep_the_memory_format_of_their_parameters(dtypes: tuple[torch.dtype, ...]) -> None:
    first, second = dtypes
    module = nn.Sequential(nn.Conv2d(4, 8, 3, dtype=first), Call(lambda _, x: x.to(second)))
    module.append(nn.Conv2d(8, 4, 3, dtype=second))
    module[0].to(memory_format=torch.channels_last)
    module[2].to(memory_format=torch.channels_last)
    x = torch.randn(6, 4, 8, 8, dtype=first).to(memory_format=torch.channels_last)
    wrapper = DataParallel(module, TWO)
    for _ in range(2):
        wrapper(x).sum().backward()
    for convolution in (module[0], module[2]):
        assert convolution.weight.grad.stride() == convolution.weight.stride()
        assert convolution.weight.grad.dtype == convolution.weight.dtype


def test_batch_norm_takes_its_statistics_from_the_first_chunk() -> None:
    module, x = nn.BatchNorm1d(2).double(), random_rows(7, 2)
    twin = copy.deepcopy(module)
    chunks = x.chunk(2)
    outputs = [copy.deepcopy(twin)(chunks[1])]
    outputs.insert(0, twin(chunks[0]))
    assert_same(DataParallel(module, TWO)(x), torch.cat(outputs))
    assert_same(dict(module.named_buffers()), dict(twin.named_buffers()))


def test_batch_norm_counts_one_batch_per_call() -> None:
    module = nn.BatchNorm1d(2).double()
    wrapper = DataParallel(module, ["cpu"] * 3)
    for _ in range(4):
        wrapper(random_rows())
    assert int(module.num_batches_tracked) == 4


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal]
)
def test_parametrized_modules_have_the_modules_outputs_and_gradients(norm: Callable[..., nn.Module]) -> None:
    assert_same_as_module(norm(nn.Linear(3, 3)).double(), random_rows(6, 3))


def test_spectral_norm_updates_its_vectors_in_the_module() -> None:
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).double()
    before = module.parametrizations.weight[0]._u.clone()
    DataParallel(module, TWO)(random_rows(6, 3))
    assert not torch.equal(module.parametrizations.weight[0]._u, before)


def test_lazy_modules_are_refused_with_several_devices() -> None:
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        DataParallel(nn.LazyLinear(2), TWO)(torch.ones(4, 3))


def test_lazy_modules_are_refused_without_grad_too() -> None:
    module = nn.LazyLinear(2)
    with torch.no_grad(), pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        DataParallel(module, TWO)(torch.ones(4, 3))
    assert module.has_uninitialized_params()


def test_unused_parameters_get_zeros() -> None:
    module = Call(lambda m, x: x * m.weight)
    module.unused = nn.Linear(2, 2).double()
    grads = trained(DataParallel(module, TWO), module, random_rows())[1]
    assert grads["unused.weight"].eq(0).all()
    assert grads["unused.bias"].eq(0).all()


def test_a_parameter_may_be_used_by_one_replica_only() -> None:
    module = Call(lambda m, x: m.other * x if bool((x > 0).all()) else m.weight * x)
    module.other = nn.Parameter(random_rows(2))
    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.double)
    grads = trained(DataParallel(module, TWO), module, x)[1]
    assert_same(grads["other"], 2 * module.other.detach() * x[0] ** 2)
    assert_same(grads["weight"], 2 * module.weight.detach() * x[1] ** 2)


def test_frozen_modules_pass_gradients_to_their_inputs() -> None:
    module, x = small_net().requires_grad_(False), random_rows().requires_grad_()
    expected = torch.autograd.grad(module(x).square().sum(), x)
    assert_same(torch.autograd.grad(DataParallel(module, TWO)(x).square().sum(), x), expected)


def test_outputs_of_frozen_modules_require_no_gradient() -> None:
    assert not DataParallel(small_net().requires_grad_(False), TWO)(random_rows()).requires_grad
