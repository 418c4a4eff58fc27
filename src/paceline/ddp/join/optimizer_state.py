"""Optimizers under join: at the end every rank takes over the state of one that had inputs to the last.

An exhausted rank does not step its optimizers: its training loop is over, and clipping and schedules are in
the loops of the others. So at the end it takes over the state of their optimizers, as it does with their
parameters. Otherwise its momentum would be old, and its parameters would differ from the next step on.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.comm.group import Group
from paceline.comm.torch_distributed import Joinable
from paceline.tensors.dtensor import local_of
from paceline.tensors.param_groups import group_options

# How ranks recognise the same optimizer: its class, and the slots of each of its parameter groups.
Signature = tuple[str, tuple[tuple[int, ...], ...]]

_stepped: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_waiting: "list[_WaitingState]" = []


class _TensorHeader(NamedTuple):
    """Stands for a tensor that is sent apart: its place among those, and what is needed to receive it."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


class _OptimizerState(NamedTuple):
    """An optimizer's options by parameter group, and its state by slot."""

    signature: Signature
    groups: list[dict[str, Any]]
    slots: dict[int, dict[str, Any]]

    def map(self, change: Callable[[Any], Any]) -> "_OptimizerState":
        """The same state with every value changed."""
        groups = [{key: change(value) for key, value in group.items()} for group in self.groups]
        slots = {
            slot: {key: change(value) for key, value in state.items()} for slot, state in self.slots.items()
        }
        return _OptimizerState(self.signature, groups, slots)

    def values(self) -> Iterator[Any]:
        """Every value, in the order of ``map``."""
        for each in (*self.groups, *self.slots.values()):
            yield from each.values()


class _WaitingState(NamedTuple):
    """State for an optimizer that has not stepped on this rank, and so is not known yet."""

    parameters: "list[weakref.ref[Parameter]]"
    state: _OptimizerState


@functools.cache
def watch_optimizers() -> None:
    """Note from now on which optimizers step."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _stepped:
        return
    _stepped.add(optimizer)
    for waiting in list(_waiting):
        parameters = [parameter() for parameter in waiting.parameters]
        if _signature(optimizer, parameters) == waiting.state.signature:
            _waiting.remove(waiting)
            _load(optimizer, parameters, waiting.state)


def copy_optimizer_state(
    group: Group, parameters: Sequence[Parameter], device: torch.device, *, source: int, bytes_at_once: int
) -> None:
    """Give the optimizers of a wrapper's parameters the state that they have on one rank.

    Optimizers that shard their state are left alone: they train other slots on each rank.

    Args:
        group: the wrapper's; every rank of it calls this.
        parameters: the wrapper's, by slot.
        device: where tensors can be sent from and received.
        source: the rank whose state counts.
        bytes_at_once: bytes per broadcast.
    """
    signatures = {each: _signature(each, parameters) for each in _stepped if not isinstance(each, Joinable)}
    known = {signature: each for each, signature in signatures.items() if any(signature[1])}
    tensors: list[Tensor] = []
    own = []
    if group.rank == source:
        own = [_pack(each, parameters, signature, tensors) for signature, each in known.items()]
    states: list[_OptimizerState] = group.gather_objects(own, device)[source]
    if group.rank == source:
        tensors = [tensor.to(device).contiguous() for tensor in tensors]
    else:
        headers = [value for state in states for value in state.values() if isinstance(value, _TensorHeader)]
        tensors = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in headers]
    group.broadcast(tensors, source=source, bytes_at_once=bytes_at_once)
    if group.rank == source:
        return
    _waiting[:] = [waiting for waiting in _waiting if not _concerns(waiting, parameters)]
    for state in states:
        whole = state.map(functools.partial(_received, tensors))
        if state.signature in known:
            _load(known[state.signature], parameters, whole)
        elif not known:
            _waiting.append(_WaitingState([weakref.ref(parameter) for parameter in parameters], whole))


def _signature(optimizer: Optimizer, parameters: Sequence[Parameter | None]) -> Signature:
    slots = {id(parameter): slot for slot, parameter in enumerate(parameters)}
    groups = (
        tuple(slots[id(parameter)] for parameter in group["params"] if id(parameter) in slots)
        for group in optimizer.param_groups
    )
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", tuple(groups)


def _pack(
    optimizer: Optimizer, parameters: Sequence[Parameter], signature: Signature, tensors: list[Tensor]
) -> _OptimizerState:
    """The state with headers for its tensors, which are appended to a list."""

    def packed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        part = local_of(value).detach()
        tensors.append(part)
        return _TensorHeader(len(tensors) - 1, part.shape, part.dtype, on_cpu=part.device.type == "cpu")

    groups = [group_options(group) for group in optimizer.param_groups]
    slots = {slot: optimizer.state.get(parameters[slot], {}) for members in signature[1] for slot in members}
    return _OptimizerState(signature, groups, slots).map(packed)


def _received(tensors: Sequence[Tensor], value: Any) -> Any:
    if not isinstance(value, _TensorHeader):
        return value
    return tensors[value.number].cpu() if value.on_cpu else tensors[value.number]


@torch.no_grad()
def _load(optimizer: Optimizer, parameters: Sequence[Parameter | None], state: _OptimizerState) -> None:
    for group, options in zip(optimizer.param_groups, state.groups, strict=True):
        _update(group, options)
    for slot, values in state.slots.items():
        parameter = parameters[slot]
        assert parameter is not None
        if values:
            _update(optimizer.state[parameter], values)
        else:
            optimizer.state.pop(parameter, None)


def _update(current: dict[str, Any], values: dict[str, Any]) -> None:
    """Take values over, into the tensors that are there: others may hold those."""
    for key, value in values.items():
        here = current.get(key)
        if isinstance(value, Tensor) and isinstance(here, Tensor) and local_of(here).shape == value.shape:
            local_of(here).copy_(value)
        else:
            current[key] = value


def _concerns(waiting: _WaitingState, parameters: Sequence[Parameter]) -> bool:
    """Whether waiting state is for these parameters, or for some that no longer exist."""
    here = [parameter() for parameter in waiting.parameters]
    return None in here or any(mine is theirs for mine, theirs in zip(here, parameters, strict=False))
