"""The ways to gather outputs: cat, stack, mean, list."""

from typing import Any

import pytest
import torch
from batches import random_rows
from replicas import (
    COUNTS,
    TWO,
    Call,
    assert_same,
    gradients,
    small_net,
)
from torch import nn

from paceline import DataParallel


def mean_loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (x * m.weight).square().mean()


@pytest.mark.parametrize("size", [1, 5, 6, 7])
@pytest.mark.parametrize("count", COUNTS)
def test_the_mean_mode_gives_the_mean_over_the_whole_batch(size: int, count: int) -> None:
    module, x = Call(mean_loss), random_rows(size, 2).requires_grad_()
    inputs = [x, module.weight]
    expected = module(x)
    got = DataParallel(module, ["cpu"] * count, gather="mean")(x)
    assert_same(got, expected)
    assert_same(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs))


def test_the_mean_mode_counts_rows_of_keyword_arguments_and_of_other_dimensions() -> None:
    module, x = Call(lambda m, *, x: (x * m.weight[:, None]).mean()), random_rows(2, 5)
    assert_same(DataParallel(module, TWO, dim=1, gather="mean")(x=x), module(x=x))


def test_the_mean_mode_keeps_structures() -> None:
    module, x = Call(lambda m, x: {"loss": mean_loss(m, x), "parts": [x.mean(0)]}), random_rows(5, 2)
    assert_same(DataParallel(module, TWO, gather="mean")(x), module(x))


def test_the_stack_mode_stacks_outputs() -> None:
    module, x = Call(mean_loss), random_rows(5, 2)
    got = DataParallel(module, TWO, gather="stack")(x)
    assert_same(got, torch.stack([module(x[:3]), module(x[3:])]))
    got.sum().backward()
    grads = gradients(module)
    (module(x[:3]) + module(x[3:])).backward()
    assert_same(grads, gradients(module))


def test_the_list_mode_gives_each_replicas_output() -> None:
    module, x = Call(lambda m, x: {"y": x * m.weight, "size": len(x)}), random_rows(5, 2)
    got = DataParallel(module, TWO, gather="list")(x)
    assert type(got) is list
    assert_same(got, [module(x[:3]), module(x[3:])])


@pytest.mark.parametrize(
    ("mode", "shape"), [("cat", (4, 2)), ("stack", (1, 4, 2)), ("mean", (4, 2)), ("list", None)]
)
@pytest.mark.parametrize("devices", [None, ["cpu"]])
def test_modes_apply_to_a_single_replica_too(mode: Any, shape: Any, devices: Any) -> None:
    module, x = small_net(), random_rows(4, 2)
    got = DataParallel(module, devices, gather=mode)(x)
    assert_same(got, [module(x)] if shape is None else module(x).expand(shape))


@pytest.mark.parametrize("mode", ["sum", "", None, 3])
def test_an_unknown_mode_is_refused_and_the_allowed_ones_are_listed(mode: Any) -> None:
    with pytest.raises(ValueError, match="'cat', 'stack', 'mean', 'list'"):
        DataParallel(nn.Linear(2, 2), TWO, gather=mode)
