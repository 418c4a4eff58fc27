"""Whether all sides do the same work: compares their gradients, and whether they step all parameters."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.optim.host_optimizer import HostOptimizer
from paceline.tensors.part_parameter import part_of
from paceline.tools.bench.models import Training, TrainingStep

TOLERANCE = 1e-3
# For a coarse dtype the tolerance is this many units of its last digit.
DIGITS = 4
# A gradient whose norm is a smaller share of the whole model's consists of rounding errors, for example that
# of a bias before a batch norm. It is compared by this share of the model's norm.
LEAST_SHARE = 1e-3
# A step with this learning rate must change what plain SGD would change with the lower rate.
RATE, LOWER_RATE = 1.0, 0.1

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Deviation:
    """How far a gradient or a step is from the expected one; wrong if ``excess`` is above 1.

    ``share`` is in shares of what ``of`` names.
    """

    side: str
    parameter: str
    share: float
    excess: float
    of: str

    def __str__(self) -> str:
        return f"(parameter: {self.parameter}, by: {self.share:.2g} of its {self.of})"


def compare_gradients(rank: int, alone: Training, sides: Mapping[str, TrainingStep]) -> str | None:
    """Compare each side's gradients with the average over ranks of what the module alone computes.

    If they agree, each side takes a step, after which the parameters are of no use: every element has to
    change, except for those that have no gradient to speak of.

    Returns a warning, the same on all ranks, or None if all is well.
    """
    alone.backward(rank)
    own = {name: None if grad is None else grad.clone() for name, grad in _gradients(alone.module).items()}
    alone.backward(rank)
    if (found := _worst(_deviations("itself", own, _gradients(alone.module)))) is not None:
        why = (
            "gradients differ with the same seeds"
            if math.isfinite(found.share)
            else "gradients are not finite"
        )
        return f"the sides cannot be compared: {why} {found}"
    for step in sides.values():
        step.training.backward(rank)
    expected = _averages(own, alone.module)
    worst = [_worst(_deviations(side, expected, _averaged(step))) for side, step in sides.items()]
    if wrong := [f"{found.side} {found}" for found in worst if found is not None]:
        return f"gradients are not the average over ranks under: {'; '.join(wrong)}"
    worst = [_worst(_unchanged(side, expected, step)) for side, step in sides.items()]
    wrong = [f"{found.side} {found}" for found in worst if found is not None]
    return f"a step does not change all of the parameters under: {'; '.join(wrong)}" if wrong else None


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in module.named_parameters() if each.requires_grad]


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    # Wrappers hold the module under this name.
    return {name.removeprefix("module."): parameter.grad for name, parameter in _trained(module)}


def _averaged(step: TrainingStep) -> Gradients:
    """A side's averages; if each rank has parts of them, the sum of all ranks' parts."""
    if isinstance(step.optimizer, HostOptimizer):
        return _sums(_own_parts(step.optimizer, step.training.module))
    return _gradients(step.training.module)


def _own_parts(optimizer: HostOptimizer, module: nn.Module) -> dict[str, Tensor]:
    """Each parameter's gradient as far as this rank has it, and zeros elsewhere.

    A part belongs to the parameter in whose memory it is, whatever the optimizer says.
    """
    parts = [part for group in optimizer.param_groups for part in group["params"] if part.numel()]
    own: dict[str, Tensor] = {}
    unplaced = sorted(parts, key=Tensor.data_ptr, reverse=True)
    for name, parameter in sorted(_trained(module), key=lambda each: each[1].data_ptr()):
        whole = own[name.removeprefix("module.")] = torch.zeros_like(parameter.detach())
        end = parameter.data_ptr() + parameter.nbytes
        while unplaced and unplaced[-1].data_ptr() < end:
            part = unplaced.pop()
            start = (part.data_ptr() - parameter.data_ptr()) // part.itemsize
            if part.grad is not None:
                part_of(whole, start, part).add_(part.grad)
    return own


def _averages(own: Gradients, module: nn.Module) -> dict[str, Tensor]:
    """The means over ranks; a missing gradient counts as zeros."""
    dense = {
        name: torch.zeros_like(parameter) if (grad := own[name]) is None else _dense(grad)
        for name, parameter in _trained(module)
    }
    return {name: total / dist.get_world_size() for name, total in _sums(dense).items()}


def _sums(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums over ranks, by one collective per data type."""
    sums: dict[str, Tensor] = {}
    ordered = sorted(own, key=lambda name: str(own[name].dtype))
    for _, group in itertools.groupby(ordered, key=lambda name: own[name].dtype):
        names = [*group]
        total = torch.cat([own[name].reshape(-1) for name in names])
        dist.all_reduce(total)
        parts = total.split([own[name].numel() for name in names])
        sums |= {name: part.view(own[name].shape) for name, part in zip(names, parts, strict=True)}
    return sums


def _deviations(side: str, expected: Gradients, computed: Gradients) -> Iterator[Deviation]:
    norms = {name: _norm(grad) for name, grad in expected.items()}
    least = LEAST_SHARE * math.hypot(*norms.values())
    for name, grad in computed.items():
        share = _norm(_difference(grad, expected[name])) / (max(norms[name], least) or 1.0)
        excess = share / max(TOLERANCE, DIGITS * _last_digit(expected[name]))
        yield Deviation(side, name, share, excess if math.isfinite(excess) else math.inf, "norm")


def _unchanged(side: str, expected: Mapping[str, Tensor], step: TrainingStep) -> Iterator[Deviation]:
    """Take a step of the gradients that are there, and say of which elements it changes too few."""
    trained = _trained(step.training.module)
    before = [parameter.detach().clone() for _, parameter in trained]
    for group in step.optimizer.param_groups:
        group["lr"] = RATE
    step.optimizer.step()
    for (wrapped_name, parameter), old in zip(trained, before, strict=True):
        name = wrapped_name.removeprefix("module.")
        due = old - LOWER_RATE * expected[name] != old
        share = (due & (parameter == old)).sum().item() / max(1, due.sum().item())
        yield Deviation(side, name, share, share / TOLERANCE, "elements")


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
