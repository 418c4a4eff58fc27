"""A case on real ranks, and what one process makes of it."""

import copy
import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from torture import suite
from torture.case import BoomError, Case, Turn, Wrapping

LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Wrapper:
    """A way to wrap a module, which can be sent to a rank."""

    package: str
    options: dict[str, Any] = field(default_factory=dict)
    # Whether steps are ended by finalize_backward, right after each backward.
    manual: bool = False
    # Whether parameters are in memory that ranks share, and each rank steps its part of them.
    one_copy: bool = False

    def __call__(self, module: nn.Module) -> nn.Module:
        if self.package == "paceline":
            from paceline import DistributedDataParallel
        else:
            from torch.nn.parallel import DistributedDataParallel
        wrapped = DistributedDataParallel(module, **self.options)
        if self.manual:
            wrapped.require_manual_backward_finalization = True
            _manual.append(weakref.ref(wrapped))
        if self.one_copy:
            from paceline import HostOptimizer

            # Also those that are frozen: a case may unfreeze them.
            everything = [
                each for each in module.parameters() if each.is_floating_point() or each.is_complex()
            ]
            _optimizers.append(HostOptimizer(wrapped, torch.optim.SGD, everything, lr=LEARNING_RATE))
        return wrapped


# Wrappers whose steps are ended by finalize_backward.
_manual: list["weakref.ref[Any]"] = []


# The optimizers of wrappers whose parameters are in shared memory.
_optimizers: list[Any] = []


@dataclass(frozen=True)
class Grads:
    """What a rank has after a step."""

    grads: dict[str, torch.Tensor | None]
    local: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Lost:
    """A step that a rank lost, and the error it saw."""

    error: str


@dataclass(frozen=True)
class Refused:
    """The module was not wrapped at all."""

    error: str


@dataclass(frozen=True)
class Expected:
    """What all ranks must have after a step, and what each must have for itself."""

    grads: dict[str, torch.Tensor | None]
    local: list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class ExpectedLoss:
    """A step that must be lost on every rank, by the fault of ``culprits``."""

    culprits: list[int]


def train(rank: int, name: str, wrapper: Wrapper) -> list[Grads | Lost] | Refused:
    """Run a case on a rank."""
    try:
        with finalizing() if wrapper.manual else nullcontext():
            return train_case(rank, suite.CASES[name], wrapper)
    finally:
        _optimizers.clear()
        # torch's wrapper can hang if it outlives its group.
        gc.collect()


@contextmanager
def finalizing() -> Iterator[None]:
    """Have each backward end with ``finalize_backward`` of the wrappers that were in it, the last first."""
    plain = torch.Tensor.backward

    def backward(tensor: torch.Tensor, **how: Any) -> None:
        plain(tensor, **how)
        for reference in reversed(_manual):
            wrapper = reference()
            if wrapper is not None and wrapper._reducer.turns.awaits_finalize(wrapper._reducer):
                wrapper.finalize_backward()

    torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.backward = plain  # type: ignore[method-assign]


def train_case(rank: int, case: Case, wrapping: Wrapping) -> list[Grads | Lost] | Refused:
    """One rank's steps, with the module in what ``wrapping`` makes of it."""
    module = case.module()
    try:
        net = case.wrap(module, wrapping)
    except Exception as error:
        if case.refused or type(error).__name__ == "UnsupportedError":
            return Refused(str(error))
        raise
    return [_step(case, Turn(net, module, rank, step)) for step in range(case.steps)]


def _step(case: Case, turn: Turn) -> Grads | Lost:
    case.clear(turn.module)
    try:
        case.step(turn)
    except RuntimeError as error:
        if not case.catches:
            raise
        turn.module.zero_grad()
        return Lost(str(error))
    if _optimizers:
        seen = Grads(joined_grads(turn.module), turn.local)
        for optimizer in _optimizers:
            optimizer.step()
        return seen
    seen = Grads(grads_of(turn.module), turn.local)
    update(turn.module)
    return seen


def joined_grads(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients, from the parts of all ranks; every rank calls this."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    own: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for optimizer in _optimizers:
        for parameter in optimizer.whole_parameters:
            own[names[parameter]] = [
                (start, part.grad.clone())
                for start, part in optimizer._starts[parameter]
                if part.grad is not None
            ]
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, own)
    return {
        name: _joined_grad(parameter, [part for rank in ranks for part in rank.get(name, ())])
        for parameter, name in names.items()
    }


def _joined_grad(parameter: torch.Tensor, parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor | None:
    if parameter.grad is None or not parts:
        return None if parameter.grad is None else parameter.grad.clone()
    whole = torch.empty_like(parameter.detach())
    for start, part in parts:
        whole.as_strided(part.shape, part.stride(), start).copy_(part)
    return whole


def update(module: nn.Module) -> None:
    torch.optim.SGD(module.parameters(), lr=LEARNING_RATE).step()


def grads_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of the gradients, as they are: ``clone`` keeps layout and strides."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }


@cache
def oracle(case: Case, world: int) -> list[Expected | ExpectedLoss]:
    """One process runs every rank's part from the same start, and averages."""
    if case.refused:
        return []
    module = case.module()
    expected: list[Expected | ExpectedLoss] = []
    for step in range(case.steps):
        case.clear(module)
        turns = [_plain_turn(module, rank, step) for rank in range(world)]
        if culprits := [turn.rank for turn in turns if _is_lost(case, turn)]:
            module.zero_grad()
            expected.append(ExpectedLoss(culprits))
            continue
        grads = mean([grads_of(turn.module) for turn in turns])
        # Buffers, modes and what is trained go on as rank 0 left them.
        module = turns[0].module
        _put(module, grads)
        expected.append(Expected(grads_of(module), [turn.local for turn in turns]))
        update(module)
    return expected


def _plain_turn(module: nn.Module, rank: int, step: int) -> Turn:
    grads = grads_of(module)
    # A copy of a module has its parameters but not their gradients.
    own = copy.deepcopy(module)
    _put(own, grads)
    return Turn(own, own, rank, step)


def _put(module: nn.Module, grads: dict[str, torch.Tensor | None]) -> None:
    for name, parameter in module.named_parameters():
        parameter.grad = grads[name]


def _is_lost(case: Case, turn: Turn) -> bool:
    try:
        case.step(turn)
    except BoomError:
        return True
    return False


def mean(grads: Sequence[dict[str, torch.Tensor | None]]) -> dict[str, torch.Tensor | None]:
    """The average over ranks; None where no rank has a gradient, else a rank without one counts as zeros."""
    return {name: _mean([rank[name] for rank in grads], len(grads)) for name in grads[0]}


def _mean(parts: Sequence[torch.Tensor | None], world: int) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    dtype = present[0].dtype
    fine = [part.to(torch.promote_types(dtype, torch.double)) for part in present]
    return (sum(fine[1:], start=fine[0]) / world).to(dtype)
