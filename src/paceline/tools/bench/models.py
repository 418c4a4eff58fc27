"""The models that are trained unless there is one of the user's: from many tiny parameters to a few large."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from paceline.tools.bench.training import Training, natural_loss


@dataclass(frozen=True)
class Model:
    """How to build a module, what it takes, and how many steps of it are timed in a row."""

    what: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    # Several for a small model, whose first step after another's finds colder caches than training does.
    steps: int

    def make(self, rank: int) -> Training:
        """The same module each time, on each rank, with the rank's own batch."""
        torch.manual_seed(0)
        module = self.build()
        torch.manual_seed(rank)
        return Training(module, (torch.randn(self.shape),), {}, natural_loss)


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
        # Keeps lengths, so that gradients do not shrink to denormal numbers, which are slow.
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


TINY_PARAMETERS = {f"parameters-{count}": count for count in (500, 5_000, 20_000)}

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
