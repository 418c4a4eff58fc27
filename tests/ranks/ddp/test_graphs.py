"""Backward passes of every shape: which of them are synced, and what they leave."""

import functools
from collections.abc import Callable
from typing import Any

import batches
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from wrappers import collectives

from paceline import DistributedDataParallel
from paceline.testing import RankPool

WIDE = 32768  # elements from which a gradient is taken at once

rows = functools.partial(batches.rows, count=3, dtype=torch.float64)


class Net(nn.Module):
    """A product, whose first operand is the input, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.large = nn.Parameter(torch.linspace(0, 1, WIDE).reshape(4, -1))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) * self.linear(x).tanh() + (x @ self.large).mean(1, keepdim=True)


class First(nn.Module):
    """Leads to its input first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def both(kind: type[nn.Module]) -> tuple[DistributedDataParallel, nn.Module]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(kind().double())
    torch.manual_seed(0)
    return ddp, kind().double()


def compare(ddp: DistributedDataParallel, plain: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        got, want = ddp.module.get_parameter(name).grad, parameter.grad
        assert (got is None) == (want is None), f"{name}: {got}, {want}"
        if want is not None:
            assert got is not None
            torch.testing.assert_close(
                got, want, rtol=1e-11, atol=1e-11, msg=f"{name}: {(got - want).abs().max()} off"
            )


# On one rank only: no collective may be begun.


def asks_parameters(ddp: nn.Module, x: Tensor) -> object:
    return torch.autograd.grad(ddp(x).sum(), list(ddp.parameters()))


def asks_one(ddp: nn.Module, x: Tensor) -> object:
    return torch.autograd.grad(ddp(x).sum(), next(iter(ddp.parameters())))


def asks_input(ddp: nn.Module, x: Tensor) -> object:
    return torch.autograd.grad(ddp(x).sum(), x)


def asks_inside(ddp: nn.Module, x: Tensor) -> object:
    h = x * 2
    return torch.autograd.grad(ddp(h).sum(), h, create_graph=True)


def asks_output(ddp: nn.Module, x: Tensor) -> object:
    out = ddp(x)
    return torch.autograd.grad(out.square().sum(), out)


def into_input(ddp: nn.Module, x: Tensor) -> object:
    return ddp(x).sum().backward(inputs=[x])


def twice(ddp: nn.Module, x: Tensor) -> object:
    (grad,) = torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x, allow_unused=True)


def jacobian(ddp: nn.Module, x: Tensor) -> object:
    return torch.autograd.functional.jacobian(ddp, x)


ASK = [asks_parameters, asks_one, asks_input, asks_inside, asks_output, into_input, twice, jacobian]


def on_one_rank(rank: int, ask: Callable[..., object], kind: type[nn.Module]) -> None:
    ddp, plain = both(kind)
    for step in range(3):
        if rank == 0:
            assert not collectives(lambda: ask(ddp, rows(7).requires_grad_())), f"step {step}"
            assert all(p.grad is None for p in ddp.parameters())
        ddp(rows(rank)).square().mean().backward()
        for r in range(2):
            (plain(rows(r)).square().mean() / 2).backward()
        compare(ddp, plain)
        ddp.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("kind", [Net, First])
@pytest.mark.parametrize("ask", ASK)
def test_a_backward_that_adds_to_no_parameter_is_nobodys_business(
    pair: RankPool, ask: Callable[..., object], kind: type[nn.Module]
) -> None:
    pair.run(on_one_rank, ask, kind)


# On all ranks.


def chosen(net: nn.Module, x: Tensor) -> None:
    inner = getattr(net, "module", net)
    net(x).square().mean().backward(inputs=[inner.large, inner.linear.weight])


def several(net: nn.Module, x: Tensor) -> None:
    out = net(x)
    torch.autograd.backward([out.sum(), out.square().mean(), net(2 * x).mean()])


def penalty(net: nn.Module, x: Tensor) -> None:
    grads = torch.autograd.grad(net(x).square().mean(), list(net.parameters()), create_graph=True)
    sum(g.square().sum() for g in grads).backward()  # type: ignore[union-attr]


def functional(net: nn.Module, x: Tensor) -> None:
    doubled = {name: 2 * p for name, p in net.named_parameters()}
    functional_call(net, doubled, (x,)).square().mean().backward()


def in_place(net: nn.Module, x: Tensor) -> None:
    out = net(x)
    out.mul_(3).add_(1)
    out.square().mean().backward()


def view_in_place(net: nn.Module, x: Tensor) -> None:
    out = net(x)
    part = out[:, 1]
    part.mul_(3)
    out.square().mean().backward()


def hook_on_output(net: nn.Module, x: Tensor) -> None:
    out = net(x)
    out.register_hook(lambda grad: 2 * grad)
    out.retain_grad()
    out.square().mean().backward()


def into_everything(net: nn.Module, x: Tensor) -> None:
    x = x.requires_grad_()
    net(x).square().mean().backward(inputs=[x, *net.parameters()])
    assert x.grad is not None


def with_a_graph(net: nn.Module, x: Tensor) -> None:
    net(x).square().mean().backward(create_graph=True)
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.detach()


def two_at_once(net: nn.Module, x: Tensor) -> None:
    loss = net(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def inside_another(net: nn.Module, x: Tensor) -> None:
    out = net(x)
    other = net(2 * x).square().mean()
    out.register_hook(lambda _: other.backward())
    out.square().mean().backward()


WAYS = [
    chosen,
    several,
    penalty,
    functional,
    in_place,
    view_in_place,
    hook_on_output,
    into_everything,
    with_a_graph,
    two_at_once,
    inside_another,
]


def on_all_ranks(rank: int, way: Callable[..., None]) -> None:
    ddp, plain = both(Net)
    for step in range(3):
        way(ddp, rows(10 * step + rank))
        for r in range(2):
            alone = Net().double()
            alone.load_state_dict(plain.state_dict())
            way(alone, rows(10 * step + r))
            for mine, theirs in zip(plain.parameters(), alone.parameters(), strict=True):
                if theirs.grad is not None:
                    mine.grad = theirs.grad / 2 if mine.grad is None else mine.grad + theirs.grad / 2
        compare(ddp, plain)
        ddp.zero_grad()
        plain.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("way", WAYS)
def test_any_backward_is_averaged(pair: RankPool, way: Callable[..., None]) -> None:
    pair.run(on_all_ranks, way)


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = Net()

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        return {
            "a box": Box(out),
            "a parameter": self.inner.scale,
            "input and output": (x, out),
            "a scalar": out.square().mean(),
            "a view": out.view(-1)[2:8],
            "nothing": None,
            "the same twice": [out, {"again": out}],
        }[self.kind]

    def loss(self, returned: Any, x: Tensor) -> Tensor:
        value = {
            "a box": lambda: returned.value,
            "input and output": lambda: returned[0] + returned[1],
            "nothing": lambda: self.inner(x),
            "the same twice": lambda: returned[0] + returned[1]["again"],
        }.get(self.kind, lambda: returned)()
        return value.square().mean()


def outputs(rank: int, kind: str) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Returns(kind).double())
    torch.manual_seed(0)
    plain = Returns(kind).double()
    for step in range(3):
        x = 2 * rows(10 * step + rank).requires_grad_()
        ddp.module.loss(ddp(x), x).backward()
        for r in range(2):
            x = 2 * rows(10 * step + r).requires_grad_()
            (plain.loss(plain(x), x) / 2).backward()
        compare(ddp, plain)
        ddp.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize(
    "kind",
    ["a box", "a parameter", "input and output", "a scalar", "a view", "nothing", "the same twice"],
)
def test_a_module_may_return_anything(pair: RankPool, kind: str) -> None:
    pair.run(outputs, kind)
