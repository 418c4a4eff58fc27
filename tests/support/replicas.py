"""Modules for DataParallel, and what one process without replicas gives for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline import DataParallel

TWO = ["cpu", "cpu"]
COUNTS = [1, 2, 3, 5]
Gradients = dict[str, torch.Tensor | None]


class Call(nn.Module):
    """A module from a function, with a parameter for it to use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor([2.0, -3.0], dtype=torch.double))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def gradients(module: nn.Module) -> Gradients:
    """The module's gradients, which are set to None."""
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return found


def trained(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Gradients]:
    """The output of a call, and the gradients that its backward leaves in the module."""
    y = call(*args, **kwargs)
    y.square().sum().backward()
    return y.detach(), gradients(module)


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def assert_same_as_module(module: nn.Module, *args: Any, count: int = 2, **kwargs: Any) -> None:
    """The wrapper gives the outputs and gradients of the module itself."""
    expected = trained(module, module, *args, **kwargs)
    assert_same(trained(DataParallel(module, ["cpu"] * count), module, *args, **kwargs), expected)


class FailsBackward(torch.autograd.Function):
    """Copies; backward raises for fewer than three rows."""

    @staticmethod
    def forward(_: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        if len(gradient) < 3:
            raise KeyError("because")
        return gradient
