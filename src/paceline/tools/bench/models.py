"""What is trained: a module with inputs and a loss. Has the models that are measured by default."""

import itertools
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import OptionError
from paceline.tensors.tree import leaves

# A step costs the same with any rate. With zero the parameters never change, so no model diverges in hundreds
# of steps, and the sides' gradients can be compared after them.
LEARNING_RATE = 0.0


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that steps are measured with.

    Attributes:
        optimizer_class: the class.
        options: its arguments after the parameters.
        state_copies: how many times the size of the parameters its state has.
    """

    optimizer_class: type[Optimizer]
    options: Mapping[str, Any]
    state_copies: int

    def __str__(self) -> str:
        return self.optimizer_class.__name__

    def make(self, module: nn.Module) -> Optimizer:
        """The plain optimizer of all parameters of a module."""
        return self.optimizer_class(module.parameters(), **self.options)


SGD = OptimizerKind(torch.optim.SGD, {"lr": LEARNING_RATE, "foreach": True}, 0)
# With torch's default implementation.
ADAMW = OptimizerKind(torch.optim.AdamW, {"lr": LEARNING_RATE}, 2)


@dataclass(frozen=True)
class Training:
    """A module on one rank, its arguments, the function that turns its output into a loss, its optimizer.

    Attributes:
        make_optimizer: makes the optimizer of a step, from the module.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Any]
    make_optimizer: Callable[[nn.Module], Optimizer] = field(default=SGD.make)

    def forward(self) -> Tensor:
        """Call the module, and return the loss of its output."""
        loss: object = self.loss(self.module(*self.args, **self.kwargs))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = (
                f"shape: {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type: {type(loss).__name__}"
            )
            raise OptionError(f"a loss must be a tensor of one element ({given})")
        return loss

    def backward(self, seed: int) -> None:
        """Compute gradients from scratch; what is random in the model depends on the seed."""
        seed_all(seed)
        self.module.zero_grad(set_to_none=True)
        self.forward().backward()

    def step(self, after_part: Callable[[], None] = lambda: None) -> "TrainingStep":
        """Make the optimizer; a call of the result is a step.

        Args:
            after_part: called after forward, after backward, and after the optimizer's step.
        """
        return TrainingStep(self, self.make_optimizer(self.module), after_part)


@dataclass(frozen=True)
class TrainingStep:
    """A training with its optimizer: zero_grad, forward, backward and the optimizer's step."""

    training: Training
    optimizer: Optimizer
    after_part: Callable[[], None]

    def __call__(self) -> None:
        """Take a step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.training.forward()
        self.after_part()
        loss.backward()
        self.after_part()
        self.optimizer.step()
        self.after_part()


class BenchModel(Protocol):
    """A model that can be measured: it is pickled, and built on each rank once for each side."""

    @property
    def what(self) -> str:
        """Its name in tables."""

    def make(self, rank: int) -> Training:
        """Build it on one rank; the same each time."""


def seed_all(seed: int) -> None:
    """Seed torch, Python, and numpy if it is imported."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def default_loss(output: Any) -> Tensor:
    """The output if it is one number, its ``.loss`` or ``["loss"]``, else the mean square of its tensors."""
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
    # The square of a complex number is complex, which a loss must not be.
    return tensor.abs().square() if tensor.is_complex() else tensor.square()


@dataclass(frozen=True)
class Model:
    """How to build a module, the shape of its input, and how many steps of it are timed in a row."""

    what: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    # Several for a small model: after another side's turn, caches are colder than in training.
    steps: int

    def make(self, rank: int) -> Training:
        """The same module each time, on each rank, with the rank's own batch."""
        torch.manual_seed(0)
        module = self.build()
        torch.manual_seed(rank)
        return Training(module, (torch.randn(self.shape),), {}, default_loss)


class TinyParameters(nn.Module):
    """Parameters of 16 elements, each used in one multiplication."""

    def __init__(self, count: int) -> None:
        super().__init__()
        # Near one, so that a product of thousands stays in range.
        self.factors = nn.ParameterList(1 + 0.001 * torch.randn(16) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product of the input and all parameters."""
        for factor in self.factors:
            x = x * factor
        return x


def tiny_layers() -> nn.Module:
    """200 linear layers in a row."""
    layers = [nn.Linear(64, 64) for _ in range(200)]
    for layer in layers:
        # Orthogonal matrices keep lengths; otherwise gradients shrink to denormal numbers, which are slow.
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


def transformer() -> nn.Module:
    """Encoder layers, whose parameters are of many sizes."""
    layers = [nn.TransformerEncoderLayer(320, 8, 1280, dropout=0.0, batch_first=True) for _ in range(8)]
    # Without a head, the last norm would make the mean square constant, and the gradients rounding errors.
    return nn.Sequential(*layers, nn.Linear(320, 64))


def mlp() -> nn.Module:
    """A few large layers."""
    sizes = (1024, 4096, 4096, 4096, 2048)
    layers = [(nn.Linear(ins, outs), nn.ReLU()) for ins, outs in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def conv() -> nn.Module:
    """Convolutions, with buffers that change in each step."""
    channels, strides = (3, 64, 64, 128, 128, 256, 256, 256), (1, 1, 2, 1, 2, 1, 1)
    blocks = [
        nn.Sequential(nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs), nn.ReLU())
        for (ins, outs), stride in zip(itertools.pairwise(channels), strides, strict=True)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


TINY_PARAMETERS = {f"parameters-{count}": count for count in (500, 5_000, 20_000, 100_000)}

MODELS = {
    "tiny-layers": Model("200 tiny layers", tiny_layers, (16, 64), 4),
    "transformer": Model("10M transformer", transformer, (4, 32, 320), 1),
    "mlp": Model("46M MLP", mlp, (16, 1024), 1),
    "conv": Model("1.7M conv net with batch norm", conv, (4, 3, 16, 16), 4),
    **{
        name: Model(
            f"{count:,} tiny parameters", partial(TinyParameters, count), (16,), max(1, 2_000 // count)
        )
        for name, count in TINY_PARAMETERS.items()
    },
}
