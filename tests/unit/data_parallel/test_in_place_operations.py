"""Operations in place, on inputs and outputs of replicas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import random_rows
from replicas import (
    TWO,
    Call,
    assert_same,
    assert_same_as_module,
    gradients,
    small_net,
    trained,
)
from torch import nn

from paceline import DataParallel


def add_in_place(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * m.weight
    return y.mul_(2).add_(x)


def relu_of_a_clone(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.relu_(x.clone()) * m.weight


def write_rows(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 1] * m.weight[0]
    return y


@pytest.mark.parametrize("forward", [add_in_place, relu_of_a_clone, write_rows])
def test_in_place_operations_inside_the_module_work(forward: Callable[..., torch.Tensor]) -> None:
    assert_same_as_module(Call(forward), random_rows().requires_grad_())


@pytest.mark.parametrize("policy", ["cat", "list"])
def test_in_place_operations_on_the_output_work(policy: Any) -> None:
    module, x = small_net(), random_rows()
    outputs = DataParallel(module, TWO, gather=policy)(x)
    torch.cat([y.mul_(3) for y in outputs] if policy == "list" else [outputs.mul_(3)]).sum().backward()
    got = gradients(module)
    (3 * module(x)).sum().backward()
    assert_same(got, gradients(module))


def test_a_module_may_change_an_input_with_a_graph_in_place() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2).double())
    x = random_rows().requires_grad_()
    expected = torch.autograd.grad(module(x * 2).square().sum(), x)
    assert_same(torch.autograd.grad(DataParallel(module, TWO)(x * 2).square().sum(), x), expected)


def test_replicas_that_change_inputs_in_place_do_not_disturb_each_others_backward() -> None:
    module, x = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2).double()), random_rows()
    expected = trained(module, module, x.clone())
    wrapper = DataParallel(module, ["cpu"] * 3)
    for _ in range(50):
        assert_same(trained(wrapper, module, x.clone()), expected)


def test_a_module_may_multiply_its_input_in_place_by_a_parameter() -> None:
    module, x = Call(lambda m, x: x.mul_(m.weight).tanh()), random_rows()
    expected = trained(module, module, x.clone())
    assert_same(trained(DataParallel(module, TWO), module, x.clone()), expected)


def test_an_output_may_be_the_input_itself() -> None:
    module, x = Call(lambda m, x: (x, x * m.weight)), random_rows().requires_grad_()
    expected = torch.autograd.grad(sum(y.square().sum() for y in module(x)), x)
    got = torch.autograd.grad(sum(y.square().sum() for y in DataParallel(module, TWO)(x)), x)
    assert_same(got, expected)
