"""Whether all sides do the same work: compares their gradients."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.tools.bench.models import Training

TOLERANCE = 1e-3
# For a coarse dtype the tolerance is this many units of its last digit.
DIGITS = 4
# A gradient whose norm is a smaller share of the whole model's consists of rounding errors, for example that
# of a bias before a batch norm. It is compared by this share of the model's norm.
LEAST_SHARE = 1e-3

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Deviation:
    """How far a gradient is from the expected one, in shares of its norm; wrong if ``excess`` is above 1."""

    side: str
    parameter: str
    share: float
    excess: float

    def __str__(self) -> str:
        return f"(parameter: {self.parameter}, by: {self.share:.2g} of its norm)"


def compare_gradients(rank: int, alone: Training, sides: Mapping[str, Training]) -> str | None:
    """Compare each side's gradients with the average over ranks of what the module alone computes.

    Returns a warning, the same on all ranks, or None if they agree.
    """
    alone.backward(rank)
    own = {name: None if grad is None else grad.clone() for name, grad in _gradients(alone.module).items()}
    alone.backward(rank)
    if (found := _worst(_deviations("itself", own, alone.module))) is not None:
        why = (
            "gradients differ with the same seeds"
            if math.isfinite(found.share)
            else "gradients are not finite"
        )
        return f"the sides cannot be compared: {why} {found}"
    for training in sides.values():
        training.backward(rank)
    expected = _averages(own, alone.module)
    worst = [_worst(_deviations(side, expected, training.module)) for side, training in sides.items()]
    wrong = [f"{found.side} {found}" for found in worst if found is not None]
    return f"gradients are not the average over ranks under: {'; '.join(wrong)}" if wrong else None


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in module.named_parameters() if each.requires_grad]


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    # Wrappers hold the module under this name.
    return {name.removeprefix("module."): parameter.grad for name, parameter in _trained(module)}


def _averages(own: Gradients, module: nn.Module) -> dict[str, Tensor]:
    """The means over ranks, by one collective per data type; a missing gradient counts as zeros."""
    averages: dict[str, Tensor] = {}
    trained = sorted(_trained(module), key=lambda each: str(each[1].dtype))
    for _, group in itertools.groupby(trained, key=lambda each: each[1].dtype):
        names, parameters = zip(*group, strict=True)
        grads = [own[name] for name in names]
        dense = [
            torch.zeros_like(parameter) if grad is None else _dense(grad)
            for grad, parameter in zip(grads, parameters, strict=True)
        ]
        total = torch.cat([each.reshape(-1) for each in dense])
        dist.all_reduce(total)
        parts = (total / dist.get_world_size()).split([each.numel() for each in dense])
        averages |= {
            name: part.view_as(parameter)
            for name, part, parameter in zip(names, parts, parameters, strict=True)
        }
    return averages


def _deviations(side: str, expected: Gradients, module: nn.Module) -> Iterator[Deviation]:
    norms = {name: _norm(grad) for name, grad in expected.items()}
    least = LEAST_SHARE * math.hypot(*norms.values())
    for name, grad in _gradients(module).items():
        share = _norm(_difference(grad, expected[name])) / (max(norms[name], least) or 1.0)
        excess = share / max(TOLERANCE, DIGITS * _last_digit(expected[name]))
        yield Deviation(side, name, share, excess if math.isfinite(excess) else math.inf)


def _worst(deviations: Iterable[Deviation]) -> Deviation | None:
    """The worst on any rank, if it is above the tolerance; the same on all ranks."""
    by_rank: list[Deviation | None] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, max(deviations, key=lambda each: each.excess))
    worst = max((each for each in by_rank if each is not None), key=lambda each: each.excess)
    return worst if worst.excess > 1 else None


def _difference(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """A missing gradient counts as zeros."""
    if ours is None or theirs is None:
        return ours if theirs is None else theirs
    return _dense(ours) - _dense(theirs)


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else _dense(tensor).abs().double().norm().item()


def _last_digit(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else torch.finfo(tensor.dtype).eps


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
