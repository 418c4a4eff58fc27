"""A subclass that never calls our constructor and wraps the children of its module, as libraries have."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batches import rows
from torch import Tensor, nn
from wrappers import WRAPPERS, assert_equal_bits, equal_on_all

from paceline.testing import RankPool


class Pair(nn.Module):
    """Two parts that take turns, each with an optimizer of its own, and one without parameters."""

    note = "the module's own"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.between = nn.Tanh()
        self.judge = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.between(self.maker(x)))

    def train_step(self, x: Tensor, optimizers: dict[str, Any]) -> None:
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            made = self.maker(x)
            if name == "judge":
                made = made.detach()
            self.judge(self.between(made)).square().mean().backward()
            optimizer.step()


def wrapping_children(wrapper: str) -> type:
    base: Any = WRAPPERS[wrapper]

    class WrappedChildren(base):
        def __init__(self, module: nn.Module) -> None:
            super(base, self).__init__()
            self.module = module
            self.broadcast_buffers = False
            self.require_backward_grad_sync = True
            for name, child in module.named_children():
                if any(parameter.requires_grad for parameter in child.parameters()):
                    setattr(module, name, base(child))

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

        def train(self, mode: bool = True) -> Any:
            self.training = mode
            self.module.train(mode)
            return self

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for child in self.module.children():
                    if isinstance(child, base):
                        stack.enter_context(child.no_sync())
                yield

    return WrappedChildren


def trained(rank: int, wrapper: str) -> list[Tensor]:
    net = wrapping_children(wrapper)(Pair())
    optimizers = {
        "judge": torch.optim.Adam(net.judge.parameters(), lr=0.05),
        "maker": torch.optim.SGD(net.maker.parameters(), lr=0.1),
    }
    net.train()
    for step in range(3):
        net.module.train_step(rows(rank, step), optimizers)
    with net.no_sync():
        net.module(rows(rank, 3)).sum().backward()
    net.module(rows(rank, 4)).sum().backward()
    assert equal_on_all([parameter.grad for parameter in net.parameters()])
    return [*net.state_dict().values(), *(parameter.grad for parameter in net.parameters())]


def test_its_children_train_to_torchs_bits(pair: RankPool) -> None:
    ours, theirs = (pair.run(trained, wrapper)[0] for wrapper in ("paceline", "torch"))
    assert_equal_bits(ours, theirs)


def answers(_: int, wrapper: str) -> list[Any]:
    net = wrapping_children(wrapper)(Pair())
    found = [
        net.note,
        net.broadcast_buffers,
        net.require_backward_grad_sync,
        getattr(net, "forward_sync_buffers", net.broadcast_buffers),  # not before torch 2.13
        hasattr(net, "require_forward_param_sync"),
        hasattr(net, "process_group"),
        net.train(False).training,
        net.module.judge.training,
        net.train().module.judge.training,
        list(net.state_dict()),
        str(net.load_state_dict(net.state_dict())),
        [name for name, _ in net.named_parameters()],
        isinstance(net, torch.nn.parallel.DistributedDataParallel),
        str(net.to(torch.float64).module.judge.module.weight.dtype),
    ]
    net.require_backward_grad_sync = False
    return [*found, net.require_backward_grad_sync]


def test_its_attributes_and_state_are_torchs(pair: RankPool) -> None:
    ours, theirs = (pair.run(answers, wrapper)[0] for wrapper in ("paceline", "torch"))
    assert ours == theirs


def of_bare(_: int) -> None:
    base: Any = WRAPPERS["paceline"]

    class Bare(base):
        def __init__(self) -> None:
            super(base, self).__init__()
            self.module = nn.Linear(2, 2)

    bare = Bare()
    with pytest.raises(AttributeError, match="require_backward_grad_sync"):
        assert bare.require_backward_grad_sync
    bare.broadcast_buffers = False
    assert bare.forward_sync_buffers is False


def test_an_attribute_that_nobody_has_set_is_missing(pair: RankPool) -> None:
    pair.run(of_bare)
