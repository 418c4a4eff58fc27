"""What a case of the torture suite is: a model, and one rank's part of a training step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

WIDTH = 3


class BoomError(RuntimeError):
    """What a case raises on purpose."""


@dataclass(frozen=True)
class Turn:
    """One rank's part of one step. For the oracle, ``net`` is the plain module itself."""

    net: Any
    module: Any
    rank: int
    step: int
    # What must be as it is without a wrapper, such as the gradient of an input.
    local: dict[str, torch.Tensor] = field(default_factory=dict)

    def rows(self, count: int = 4, width: int = WIDTH, *, batch: int = 0) -> torch.Tensor:
        """Inputs that differ from rank to rank, step to step and batch to batch."""
        return torch.randn(count, width, dtype=torch.double, generator=self._generator(batch))

    def indexes(self, count: int, below: int, *, batch: int = 0) -> torch.Tensor:
        """As ``rows``, for embeddings."""
        return torch.randint(below, (count,), generator=self._generator(batch))

    def no_sync(self) -> AbstractContextManager[None]:
        """The wrapper's ``no_sync``."""
        return nullcontext() if self.net is self.module else self.net.no_sync()

    def _generator(self, batch: int) -> torch.Generator:
        return torch.Generator().manual_seed(10_000 * batch + 100 * self.step + self.rank)


Wrapping = Callable[[nn.Module], nn.Module]


def whole(module: nn.Module, wrapping: Wrapping) -> nn.Module:
    return wrapping(module)


def each(modules: nn.Module, wrapping: Wrapping) -> nn.Module:
    return nn.ModuleList([wrapping(module) for module in modules.children()])


def forget(module: nn.Module) -> None:
    module.zero_grad()


def keep(_: nn.Module) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    build: Callable[[], nn.Module]
    step: Callable[[Turn], None]
    steps: int = 4
    # What the user does to the gradients before a step.
    clear: Callable[[nn.Module], None] = forget
    wrap: Callable[[nn.Module, Wrapping], nn.Module] = whole
    # Whether the user's loop catches a RuntimeError and goes on with the next step.
    catches: bool = False
    # A word of the error that the wrapper must raise, where it must refuse the module.
    refused: str = ""
    # Whether torch's broadcast_buffers is worth a try.
    has_buffers: bool = False

    def module(self) -> nn.Module:
        """The module, alike on every rank."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.build()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def plain(turn: Turn) -> None:
    """One forward and one backward."""
    loss_of(turn.net(turn.rows())).backward()


class Branches(nn.Module):
    """Parts that a call can leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.double()

    def forward(
        self, x: torch.Tensor, *, left: bool = True, right: bool = True, gain: bool = True
    ) -> torch.Tensor:
        stem = out = self.stem(x).tanh()
        if left:
            out = out + self.left(stem)
        if right:
            out = out + self.right(stem)
        return out * self.gain if gain else out


def layers(count: int = 3) -> nn.Sequential:
    parts = [part for _ in range(count) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*parts).double()
