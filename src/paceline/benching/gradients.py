"""Whether sides have done the same work: their gradients, compared."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.benching.training import Training

TOLERANCE = 1e-3
# As many of the last digit of the gradient's type, where that is coarser.
DIGITS = 4
# A gradient whose norm is a smaller share of the whole model's is rounding errors, as those of biases are
# that a norm takes out again. It is compared by this share.
LEAST_SHARE = 1e-3

T = TypeVar("T")
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


def compare(rank: int, sides: Mapping[str, Training]) -> str | None:
    """Let each side make gradients with the same seeds; in words what is wrong with them. On all ranks."""
    (first, base), *others = sides.items()
    for training in sides.values():
        training.backward(rank)
    expected = _gradients(base.module)
    if strange := _gathered([name for name, grad in expected.items() if not math.isfinite(_norm(grad))]):
        return f"gradients are not finite (parameter: {strange[0]})"
    worst = _worst([off for name, other in others for off in _off(name, expected, other.module)])
    if worst is None:
        return None
    before = {name: None if grad is None else grad.clone() for name, grad in expected.items()}
    base.backward(rank)
    if (itself := _worst(list(_off(first, before, base.module)))) is not None:
        return (
            f"gradients differ from one step to the next, with the same seeds {itself}: no side can be judged"
        )
    return f"gradients differ: those of {worst.side} are not those of {first} {worst}"


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
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


def _worst(found: Sequence[Off]) -> Off | None:
    """The worst of what any rank has found, if it is more than is tolerated."""
    worst = max(found, key=lambda off: off.excess)
    worst = max(_gathered([worst]), key=lambda off: off.excess)
    return worst if worst.excess > 1 else None


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


def _gathered(found: list[T]) -> list[T]:
    """What all ranks have found, so that all of them go on in the same way."""
    everyone: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    return [each for rank in everyone for each in rank]
