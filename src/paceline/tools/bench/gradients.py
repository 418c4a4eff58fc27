"""Whether sides have done the same work: their gradients, compared."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.tools.bench.training import Training

TOLERANCE = 1e-3
# As many of the last digit of the gradient's type, where that is coarser.
DIGITS = 4
# A gradient whose norm is a smaller share of the whole model's is rounding errors, as those of biases are
# that a norm takes out again. It is compared by this share.
LEAST_SHARE = 1e-3

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Off:
    """How far a gradient is from another, as a share of its norm; too far if ``excess`` is more than 1."""

    side: str
    parameter: str
    by: float
    excess: float

    def __str__(self) -> str:
        return f"(parameter: {self.parameter}, by: {self.by:.2g} of its norm)"


def compare(rank: int, alone: Training, sides: Mapping[str, Training]) -> str | None:
    """Say what is wrong with sides' gradients, in words; on all ranks.

    They should be the average over ranks of what the module alone makes, with the same seeds.
    """
    alone.backward(rank)
    own = {name: None if grad is None else grad.clone() for name, grad in _gradients(alone.module).items()}
    alone.backward(rank)
    if (off := _worst(_off("itself", own, alone.module))) is not None:
        why = "with the same seeds, gradients differ" if math.isfinite(off.by) else "gradients are not finite"
        return f"whether sides do the same work is unknown: {why} {off}"
    for training in sides.values():
        training.backward(rank)
    expected = {
        name: _average(grad, like) for (name, like), grad in zip(_slots(alone), own.values(), strict=True)
    }
    wrong = [_worst(_off(side, expected, training.module)) for side, training in sides.items()]
    named = [f"{off.side} {off}" for off in wrong if off is not None]
    return f"gradients are not the average of ranks' own, under: {'; '.join(named)}" if named else None


def _slots(training: Training) -> list[tuple[str, Tensor]]:
    return [(name, each) for name, each in training.module.named_parameters() if each.requires_grad]


def _average(grad: Tensor | None, like: Tensor) -> Tensor:
    """The mean over ranks; a gradient that is not there counts as zeros."""
    total = torch.zeros_like(like) if grad is None else _dense(grad).clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        # Wrappers call what they wrap so.
        name.removeprefix("module."): parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def _off(side: str, expected: Gradients, module: nn.Module) -> Iterator[Off]:
    norms = {name: _norm(grad) for name, grad in expected.items()}
    least = LEAST_SHARE * math.hypot(*norms.values())
    for name, grad in _gradients(module).items():
        theirs = expected[name]
        by = _norm(_less(grad, theirs)) / (max(norms[name], least) or 1.0)
        excess = by / max(TOLERANCE, DIGITS * _last_digit(theirs))
        yield Off(side, name, by, excess if math.isfinite(excess) else math.inf)


def _worst(found: Iterable[Off]) -> Off | None:
    """The worst of what any rank has found, if it is more than is tolerated; the same on all ranks."""
    worst: list[Off | None] = [None] * dist.get_world_size()
    dist.all_gather_object(worst, max(found, key=lambda off: off.excess))
    first = max((off for off in worst if off is not None), key=lambda off: off.excess)
    return first if first.excess > 1 else None


def _less(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """The difference; a gradient that is not there counts as zeros."""
    if ours is None or theirs is None:
        return ours if theirs is None else theirs
    return _dense(ours) - _dense(theirs)


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else _dense(tensor).abs().double().norm().item()


def _last_digit(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else torch.finfo(tensor.dtype).eps


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
