"""Graphs that do not end at the replica's own parameters and inputs: checkpoints, outside tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import random_rows
from replicas import (
    COUNTS,
    TWO,
    Call,
    assert_same,
    assert_same_as_module,
    gradients,
    small_net,
    trained,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import DataParallel


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_checkpointing_inside_the_module_works(use_reentrant: bool, count: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x * 2, use_reentrant=use_reentrant)

    module, x = Net(), random_rows().requires_grad_()
    assert_same_as_module(module, x, count=count)


def test_checkpointing_by_a_function_that_calls_backward_works() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
            ctx.part, ctx.x = part, x.detach()
            return part(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
            # As such functions outside torch ask, too.
            assert torch.autograd._is_checkpoint_valid()
            x = ctx.x.requires_grad_()
            with torch.enable_grad():
                ctx.part(x).backward(gradient)
            return None, x.grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = small_net(), small_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Again.apply(self.second, self.first(x))

    assert_same_as_module(Net(), random_rows())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_around_the_wrapper_works(use_reentrant: bool) -> None:
    module, x = small_net(), random_rows().requires_grad_()
    wrapper = DataParallel(module, TWO)
    expected = trained(module, module, x)
    got = trained(lambda x: checkpoint(wrapper, x, use_reentrant=use_reentrant), module, x)
    assert_same(got, expected)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["leaf", "not a leaf", "attribute", "attribute that is not a leaf"])
def test_tensors_from_outside_the_module_get_their_gradients(kind: str, count: int) -> None:
    leaf = random_rows(2).requires_grad_()
    outside = leaf if "not" not in kind else leaf.sin()
    module = Call(lambda m, x: x * m.weight * (m.outside if "attribute" in kind else outside))
    module.outside = outside
    x = random_rows()
    inputs = [leaf, module.weight]
    expected = torch.autograd.grad(module(x).square().sum(), inputs, retain_graph=True)
    DataParallel(module, ["cpu"] * count)(x).square().sum().backward()
    assert_same(tuple(tensor.grad for tensor in inputs), expected)


def test_a_bound_method_kept_as_an_attribute_gets_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2).double()
            self.run = self.compute

        def compute(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x)

    module, x = Net(), random_rows()
    grads = trained(DataParallel(module, TWO), module, x)
    assert_same(grads, trained(module, module, x))


def test_weights_passed_by_functional_call_get_the_gradients() -> None:
    module, x = nn.Linear(2, 2).double(), random_rows()
    given = random_rows(2, 2).requires_grad_()
    wrapper = DataParallel(module, TWO)

    def run(call: nn.Module, name: str) -> Any:
        y = torch.func.functional_call(nn.Sequential(call), {name: given.sin()}, (x,))
        return torch.autograd.grad(y.square().sum(), given)

    assert_same(run(wrapper, "0.module.weight"), run(module, "0.weight"))
    assert_same(wrapper(x), module(x))


def test_a_module_may_use_a_graph_of_an_earlier_call() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x * m.weight
        for kept in [k for k in m.kept if len(k) == len(y)][:1]:
            y = y + kept
        m.kept.append(y)
        return y

    def run(call: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> Any:
        module.kept.clear()
        call(x)
        y = call(x)
        y.square().sum().backward()
        return y.detach(), gradients(module)

    module, x = Call(forward), random_rows(5, 2)
    module.kept = []
    assert_same(run(DataParallel(module, TWO), module, x), run(module, module, x))
