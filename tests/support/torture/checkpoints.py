"""Activation checkpoints, inside the module and around the wrapper."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torture.case import WIDTH, Case, Turn, layers, loss_of, plain


class Checkpointed(nn.Module):
    """Runs its inner layers in ``times`` checkpoints, perhaps with one more inside each."""

    def __init__(self, *, reentrant: bool, times: int = 1, nested: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.outer = layers(2)
        self.inner = layers(2)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.times = times
        self.nested = nested
        self.checkpoint = partial(checkpoint, use_reentrant=reentrant)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.checkpoint(self.middle, x)
        return self.last(x)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outer(x)
        return self.checkpoint(self.inner, x) if self.nested else self.inner(x)


def wrapper_in_a_checkpoint(turn: Turn, *, reentrant: bool) -> None:
    x = turn.rows().requires_grad_()
    loss_of(checkpoint(turn.net, x, use_reentrant=reentrant)).backward()


def checkpointed(*, reentrant: bool, times: int = 1, nested: bool = False) -> partial[nn.Module]:
    return partial(Checkpointed, reentrant=reentrant, times=times, nested=nested)


CASES = [
    Case(name="re-entrant checkpoint", build=checkpointed(reentrant=True), step=plain),
    Case(name="non-reentrant checkpoint", build=checkpointed(reentrant=False), step=plain),
    Case(name="re-entrant checkpoints, nested", build=checkpointed(reentrant=True, nested=True), step=plain),
    Case(
        name="non-reentrant checkpoints, nested", build=checkpointed(reentrant=False, nested=True), step=plain
    ),
    Case(
        name="re-entrant checkpoint twice over one module",
        build=checkpointed(reentrant=True, times=2),
        step=plain,
    ),
    Case(
        name="non-reentrant checkpoint twice over one module",
        build=checkpointed(reentrant=False, times=2),
        step=plain,
    ),
    Case(
        name="re-entrant checkpoint around the wrapper",
        build=layers,
        step=partial(wrapper_in_a_checkpoint, reentrant=True),
    ),
    Case(
        name="non-reentrant checkpoint around the wrapper",
        build=layers,
        step=partial(wrapper_in_a_checkpoint, reentrant=False),
    ),
]
