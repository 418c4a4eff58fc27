"""Changes of the module between two calls are seen; changes by a replica's forward are not kept."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replicas import TWO
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from paceline import DataParallel


class Chain(nn.Module):
    """Calls its children in order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.left, self.right = Chain(), Chain()
        self.left.a, self.left.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.right.c = nn.Linear(3, 3)
        self.deep = nn.Sequential(nn.LeakyReLU(0.1), nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0)))
        self.deep[1][1].eval()
        self.register_buffer("offset", torch.ones(3))
        self.factor = 2.0
        self.passing = 1.0
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.left(self.first(x) * self.factor).tanh()
        x = self.deep(self.right(x).tanh()) + self.offset
        return x * getattr(self, "passing", 3.0) + getattr(self, "extra", 0.0)


class Negating(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def move_child(net: Net) -> None:
    """The listing of all modules stays the same, child by child; only the parent of one differs."""
    moved, last = net.left.b, net.right.c
    del net.left.b, net.right.c
    net.right.b, net.right.c = moved, last


def insert_child(net: Net) -> None:
    last = net.right.c
    del net.right.c
    net.right.new, net.right.c = linear(), last


def swap_children(net: Net) -> None:
    net.left.a, net.left.b = net.left.b, net.left.a


def replace_hook_table(net: Net) -> None:
    net.first._forward_hooks = type(net.first._forward_hooks)()
    net.first.register_forward_hook(lambda _, __, y: y * 2)


def linear() -> nn.Linear:
    return nn.Linear(3, 3).double()


def on_instance(net: Net) -> None:
    net.first.forward = types.MethodType(lambda self, x: x * self.weight.sum(), net.first)


def delete(net: Net, name: str) -> None:
    delattr(net, name)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "data replaced": lambda net: setattr(net.first.weight, "data", torch.ones(3, 3).double()),
    "data changed in place": lambda net: net.first.weight.data.mul_(3),
    "parameter changed without grad": torch.no_grad()(lambda net: net.left.a.bias.add_(3)),
    "parameter replaced": lambda net: setattr(net.first, "weight", nn.Parameter(torch.ones(3, 3).double())),
    "parameter removed": lambda net: setattr(net.left.b, "bias", None),
    "parameters tied": lambda net: setattr(net.first, "weight", net.left.a.weight),
    "parameters untied and tied": lambda net: setattr(net.right.c, "bias", net.first.bias),
    "child replaced": lambda net: setattr(net, "first", linear()),
    "child replaced by another class": lambda net: setattr(net, "first", Doubling()),
    "child replaced by one used elsewhere": lambda net: setattr(net, "first", net.right.c),
    "child deep in the tree replaced": lambda net: net.deep[1].__setitem__(0, linear()),
    "child added": lambda net: net.deep[1].append(linear()),
    "child added in between": insert_child,
    "child removed": lambda net: net.deep[1].__delitem__(0),
    "child moved to its neighbour": move_child,
    "children swapped": swap_children,
    "subtree replaced": lambda net: setattr(net, "deep", nn.Sequential(linear(), nn.ReLU())),
    "mode of one part": lambda net: net.deep[1][1].train(),
    "attribute changed": lambda net: setattr(net, "factor", 5.0),
    "attribute deleted": lambda net: delete(net, "passing"),
    "attribute added": lambda net: setattr(net, "extra", 7.0),
    "attribute of a leaf changed": lambda net: setattr(net.deep[0], "negative_slope", 0.9),
    "buffer replaced": lambda net: setattr(net, "offset", torch.full((3,), 4.0).double()),
    "buffer changed in place": lambda net: net.offset.add_(1),
    "buffer that needs a gradient": lambda net: setattr(
        net, "offset", torch.ones(3).double().requires_grad_()
    ),
    "forward hook": lambda net: net.first.register_forward_hook(lambda _, __, y: y * 2),
    "forward pre-hook": lambda net: net.first.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "forward hook on an activation": lambda net: net.deep[0].register_forward_hook(lambda _, __, y: y * 2),
    "hook table replaced": replace_hook_table,
    "backward hook": lambda net: net.left.b.register_full_backward_hook(lambda _, inner, __: (inner[0] * 2,)),
    "weight norm": lambda net: parametrizations.weight_norm(net.first),
    "parametrization": lambda net: parametrize.register_parametrization(net.first, "weight", Doubling()),
    "forward replaced on a leaf": on_instance,
    "forward replaced by a function": lambda net: setattr(net.first, "forward", torch.sin),
    "forward replaced on an activation": lambda net: setattr(net.deep[0], "forward", torch.sin),
    "forward replaced on the module": lambda net: setattr(net, "forward", lambda x: net.first(x).sin()),
    "class changed": lambda net: setattr(net.first, "__class__", Negating),
    "one parameter frozen": lambda net: net.first.weight.requires_grad_(False),
    "all parameters frozen but one": lambda net: net.requires_grad_(False).first.bias.requires_grad_(),
    "dtype": lambda net: net.float(),
}

each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())


def gradients(module: nn.Module, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of all that need one; zeros where there is none."""
    tensors = {n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if t.requires_grad}
    found = torch.autograd.grad(y.square().sum(), [*tensors.values()], allow_unused=True)
    return {n: torch.zeros_like(tensors[n]) if g is None else g for n, g in zip(tensors, found, strict=True)}


def assert_as_alone(wrapper: DataParallel[nn.Module], *, grad: bool) -> None:
    module = wrapper.module
    x = torch.randn(5, 3).to(next(module.parameters()).dtype)
    tolerance = 1e-12 if x.dtype == torch.double else 1e-5
    with torch.set_grad_enabled(grad):
        y, expected = wrapper(x), module(x)
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    assert y.requires_grad == expected.requires_grad
    if grad:
        torch.testing.assert_close(
            gradients(module, y), gradients(module, expected), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("used", [True, False], ids=["used with grad", "used without"])
@each_change
def test_a_change_between_two_calls_is_seen(change: Callable[[Net], Any], used: bool, grad: bool) -> None:
    wrapper = DataParallel(Net(), TWO)
    assert_as_alone(wrapper, grad=used)
    change(wrapper.module)
    assert_as_alone(wrapper, grad=grad)
    assert_as_alone(wrapper, grad=not grad)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_a_module_replaced_in_the_wrapper_is_seen(grad: bool) -> None:
    wrapper = DataParallel(Net(), TWO)
    assert_as_alone(wrapper, grad=grad)
    wrapper.module = Net()
    assert_as_alone(wrapper, grad=grad)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_a_removed_hook_no_longer_runs(grad: bool) -> None:
    wrapper = DataParallel(Net(), TWO)
    calls: list[int] = []
    handle = wrapper.module.first.register_forward_hook(lambda *_: calls.append(1))
    with torch.set_grad_enabled(grad):
        wrapper(torch.ones(4, 3).double())
        assert calls == [1, 1]
        handle.remove()
        wrapper(torch.ones(4, 3).double())
    assert calls == [1, 1]
    assert_as_alone(wrapper, grad=grad)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_a_removed_parametrization_is_gone(grad: bool) -> None:
    wrapper = DataParallel(Net(), TWO)
    parametrize.register_parametrization(wrapper.module.first, "weight", Doubling())
    assert_as_alone(wrapper, grad=grad)
    parametrize.remove_parametrizations(wrapper.module.first, "weight")
    assert_as_alone(wrapper, grad=grad)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_unfrozen_parameters_train_again(grad: bool) -> None:
    wrapper = DataParallel(Net().requires_grad_(False), TWO)
    assert_as_alone(wrapper, grad=False)
    wrapper.module.requires_grad_()
    assert_as_alone(wrapper, grad=grad)


def test_training_steps_are_those_of_the_module_alone() -> None:
    torch.manual_seed(3)
    one = Net()
    other = Net()
    other.load_state_dict(one.state_dict())
    wrapper = DataParallel(other, ["cpu"] * 3)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (one, other)]
    for _ in range(10):
        x = torch.randn(7, 3).double()
        for call, optimizer in zip((one, wrapper), optimizers, strict=True):
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=1e-10, atol=1e-10)


class Restless(nn.Module):
    """Changes itself and its children whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.drop = nn.Dropout(0.0)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.new = x
        self.layer = nn.Identity()
        self.linear.mark = x
        self.linear.scale = getattr(self.linear, "scale", 1.0) * 2
        self.drop.eval()
        self.drop.p += 0.1
        return self.drop(self.linear(x)) * self.calls * self.linear.scale


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_what_a_forward_sets_reaches_neither_the_module_nor_the_next_call(grad: bool) -> None:
    module, x = Restless(), torch.randn(4, 3).double()
    wrapper = DataParallel(module, TWO)
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            torch.testing.assert_close(wrapper(x), module.linear(x) * 2)
    after = {name: dict(vars(part)) for name, part in module.named_modules()}
    assert after == before


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_parameters_buffers_and_children_that_a_forward_replaces_stay_in_the_replica(grad: bool) -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3).double()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x) + self.count
            self.count = self.count + 1
            self.linear.weight = nn.Parameter(torch.zeros(3, 3).double())
            self.linear.bias = None
            self.linear = nn.Identity()
            return y

    module, x = Replacing(), torch.randn(4, 3).double()
    linear, weight, bias = module.linear, module.linear.weight, module.linear.bias
    wrapper = DataParallel(module, TWO)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            torch.testing.assert_close(wrapper(x), torch.nn.functional.linear(x, weight, bias))
    assert module.linear is linear
    assert linear.weight is weight
    assert linear.bias is bias
    assert float(module.count) == 0
