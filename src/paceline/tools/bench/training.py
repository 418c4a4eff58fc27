"""What a training step needs: a module, its inputs and a loss."""

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import OptionError
from paceline.tensors.tree import leaves

# Costs what any other does, and leaves every side with the parameters that it began with: no model can run
# off in hundreds of steps, and gradients can be compared after them.
LEARNING_RATE = 0.0

Step = Callable[[], None]


@dataclass(frozen=True)
class Training:
    """A module on one rank, what it is called with, and what makes a loss of its output."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Any]

    def forward(self) -> Tensor:
        """The loss of the module's output."""
        loss: object = self.loss(self.module(*self.args, **self.kwargs))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = (
                f"shape: {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type: {type(loss).__name__}"
            )
            raise OptionError(f"a loss must be a tensor of one element ({given})")
        return loss

    def backward(self, seed: int) -> None:
        """Make gradients, from scratch, with whatever is random in the model as the seed has it."""
        seed_all(seed)
        self.module.zero_grad(set_to_none=True)
        self.forward().backward()

    def step(self, point: Callable[[], None] = lambda: None) -> Step:
        """zero_grad, forward, backward and plain SGD; ``point`` is called after each of its parts."""
        optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE, foreach=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss = self.forward()
            point()
            loss.backward()
            point()
            optimizer.step()
            point()

        return step


class Subject(Protocol):
    """What is trained: pickled by the caller, made on each rank as often as there are sides."""

    @property
    def what(self) -> str:
        """Its name, as tables show it."""

    def make(self, rank: int) -> Training:
        """The training of one rank, the same each time."""


def seed_all(seed: int) -> None:
    """Seed torch, Python, and numpy where somebody has imported it."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def natural_loss(output: Any) -> Tensor:
    """The loss that an output is or holds, or else the mean square of the float tensors in it."""
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    held = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(held, Tensor):
        return held
    floats = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not floats:
        kind = type(output).__name__
        raise OptionError(f"there is no tensor with a gradient in the model's output (type: {kind})")
    if len(floats) == 1:
        return _square(floats[0]).mean()
    return torch.stack([_square(each).sum() for each in floats]).sum() / sum(each.numel() for each in floats)


def _square(tensor: Tensor) -> Tensor:
    # A complex number's own square would be complex, and no loss.
    return tensor.abs().square() if tensor.is_complex() else tensor.square()
