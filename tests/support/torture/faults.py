"""A step that one rank loses by an exception, after which all must train on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torture.case import BoomError, Case, Turn, layers, loss_of

BAD_STEP = 1


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = layers(2)
        self.second = layers(2)

    def forward(self, x: torch.Tensor, between: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return self.second(between(self.first(x)))


def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def boom(_: torch.Tensor) -> torch.Tensor:
    raise BoomError("boom")


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return boom(grad)


def trap(x: torch.Tensor) -> torch.Tensor:
    return Trap.apply(x)


def is_bad(turn: Turn) -> bool:
    return turn.rank == 0 and turn.step == BAD_STEP


def in_forward(turn: Turn) -> None:
    loss_of(turn.net(turn.rows(), boom if is_bad(turn) else same)).backward()


def in_backward(turn: Turn) -> None:
    loss_of(turn.net(turn.rows(), trap if is_bad(turn) else same)).backward()


def in_every_backward(turn: Turn) -> None:
    loss_of(turn.net(turn.rows(), trap if turn.step == BAD_STEP else same)).backward()


CASES = [
    Case(name="exception in forward on one rank, then clean", build=Fragile, step=in_forward, catches=True),
    Case(name="exception in backward on one rank, then clean", build=Fragile, step=in_backward, catches=True),
    Case(
        name="exception in backward on all ranks, then clean",
        build=Fragile,
        step=in_every_backward,
        catches=True,
    ),
]
