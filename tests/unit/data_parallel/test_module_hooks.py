"""Hooks on modules, parameters and tensors, with replicas."""

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
    small_net,
    trained,
)
from torch import nn

from paceline import DataParallel


def test_a_parameters_hook_runs_once_per_backward_with_the_full_sum() -> None:
    module, x = small_net(), random_rows()
    expected = trained(module, module, x)[1]["0.weight"]
    seen: list[torch.Tensor] = []
    module[0].weight.register_hook(lambda g: seen.append(g.clone()))
    trained(DataParallel(module, ["cpu"] * 3), module, x)
    assert_same(seen, [expected])


def test_a_post_accumulate_hook_runs_once_per_backward() -> None:
    module, seen = small_net(), []
    module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    trained(DataParallel(module, ["cpu"] * 3), module, random_rows())
    assert [*map(id, seen)] == [id(module[0].weight)]


def test_a_hook_on_the_input_runs_once_with_the_full_gradient() -> None:
    module, x, seen = small_net(), random_rows().requires_grad_(), []
    expected = torch.autograd.grad(module(x).sum(), x)
    x.register_hook(lambda g: seen.append(g.clone()))
    DataParallel(module, TWO)(x).sum().backward()
    assert_same(tuple(seen), expected)


def test_forward_hooks_run_for_each_replica_and_may_change_the_output() -> None:
    module, x, seen = small_net(), random_rows(), []

    def double(_: nn.Module, _args: Any, y: torch.Tensor) -> torch.Tensor:
        seen.append(len(y))
        return y * 2

    module[0].register_forward_hook(double)
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    y = DataParallel(module, ["cpu"] * 3)(x)
    assert seen == [2, 2, 2]
    assert_same(y, module(x))


def test_backward_hooks_run_for_each_replica_and_may_change_the_gradient() -> None:
    module, x, seen = small_net(), random_rows().requires_grad_(), []
    module[0].register_full_backward_hook(lambda _, inner, __: seen.append(len(inner[0])) or (inner[0] * 3,))
    module[2].register_full_backward_pre_hook(lambda _, outer: (outer[0] * 5,))
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), inputs)
    seen.clear()
    assert_same(torch.autograd.grad(DataParallel(module, ["cpu"] * 3)(x).square().sum(), inputs), expected)
    assert seen == [2, 2, 2]


def reversing(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(torch.neg)
    return x * m.weight


def scaling_weight(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = m.weight.view(-1)
    weight.register_hook(lambda g: 3 * g)
    return x * weight


def scaling_output(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * m.weight
    y.register_hook(lambda g: 3 * g)
    return y


@pytest.mark.parametrize("forward", [reversing, scaling_weight, scaling_output])
@pytest.mark.parametrize("count", COUNTS)
def test_hooks_that_forward_registers_on_tensors_run_once(forward: Callable[..., Any], count: int) -> None:
    module, x = Call(forward), random_rows().requires_grad_()
    inputs = [x, module.weight]
    expected = torch.autograd.grad(module(x.sin()).square().sum(), inputs)
    got = torch.autograd.grad(DataParallel(module, ["cpu"] * count)(x.sin()).square().sum(), inputs)
    assert_same(got, expected)


def test_a_hook_that_forward_registers_on_a_parameter_runs_once_per_replica() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        m.weight.register_hook(lambda g: 3 * g)
        return x * m.weight

    module, x = Call(forward), random_rows()
    DataParallel(module, TWO)(x).sum().backward()
    assert_same(module.weight.grad, 3 * x.sum(0))


def test_forward_may_call_retain_grad_on_its_input() -> None:
    seen: dict[int, torch.Tensor] = {}

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x.retain_grad()
        seen[len(x)] = x
        return x * m.weight

    module = Call(forward)
    DataParallel(module, TWO)(random_rows(5, 2).requires_grad_() * 1).sum().backward()
    assert_same(
        [seen[n].grad for n in (3, 2)], [module.weight.detach().expand(n, 2).contiguous() for n in (3, 2)]
    )
