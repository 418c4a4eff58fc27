"""Optimizers under join: at the end every rank takes over the state of one that had inputs to the last.

A rank whose inputs have run out does not step, because its user's loop is over. It could not step as the
others do, who clip and schedule in theirs. So it takes over what became of their state, as it does with the
parameters: otherwise its moments are old ones, and its parameters differ from the next step on.
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
from paceline.comm.joining import Joinable
from paceline.tensors.dtensor import local_of
from paceline.tensors.param_groups import group_options

# An optimizer to other ranks: its class, and which slots each of its parameter groups has.
Kind = tuple[str, tuple[tuple[int, ...], ...]]

_stepped: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_owed: "list[_Owed]" = []


class _Sent(NamedTuple):
    """In the place of a tensor, which is sent by itself; the so manyth."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


class _State(NamedTuple):
    """An optimizer's options by parameter group, and its state by slot."""

    kind: Kind
    groups: list[dict[str, Any]]
    slots: dict[int, dict[str, Any]]

    def map(self, change: Callable[[Any], Any]) -> "_State":
        """The same with every value changed."""
        groups = [{key: change(value) for key, value in group.items()} for group in self.groups]
        slots = {
            slot: {key: change(value) for key, value in state.items()} for slot, state in self.slots.items()
        }
        return _State(self.kind, groups, slots)

    def values(self) -> Iterator[Any]:
        """Every value, in the order of ``map``."""
        for each in (*self.groups, *self.slots.values()):
            yield from each.values()


class _Owed(NamedTuple):
    """State for an optimizer that has not stepped on this rank, and so is not known yet."""

    parameters: "list[weakref.ref[Parameter]]"
    state: _State


@functools.cache
def watch_optimizers() -> None:
    """Know from now on which optimizers step."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _stepped:
        return
    _stepped.add(optimizer)
    for owed in list(_owed):
        parameters = [parameter() for parameter in owed.parameters]
        if _kind(optimizer, parameters) == owed.state.kind:
            _owed.remove(owed)
            _load(optimizer, parameters, owed.state)


def take_over(
    group: Group, parameters: Sequence[Parameter], device: torch.device, *, source: int, bytes_at_once: int
) -> None:
    """Give the optimizers of a wrapper's parameters the state that they have on one rank.

    Left alone are those that share their state out over the ranks: they train other slots on each.

    Args:
        group: the wrapper's; every rank of it calls this.
        parameters: the wrapper's, by slot.
        device: where tensors can be sent.
        source: the rank.
        bytes_at_once: how much goes in one message.
    """
    kinds = {each: _kind(each, parameters) for each in _stepped if not isinstance(each, Joinable)}
    known = {kind: each for each, kind in kinds.items() if any(kind[1])}
    tensors: list[Tensor] = []
    own = []
    if group.rank == source:
        own = [_pack(each, parameters, kind, tensors) for kind, each in known.items()]
    told: list[_State] = group.gather_objects(own)[source]
    if group.rank == source:
        tensors = [tensor.to(device).contiguous() for tensor in tensors]
    else:
        sent = [value for state in told for value in state.values() if isinstance(value, _Sent)]
        tensors = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in sent]
    group.broadcast(tensors, source=source, bytes_at_once=bytes_at_once)
    if group.rank == source:
        return
    _owed[:] = [owed for owed in _owed if not _concerns(owed, parameters)]
    for state in told:
        whole = state.map(functools.partial(_received, tensors))
        if state.kind in known:
            _load(known[state.kind], parameters, whole)
        elif not known:
            _owed.append(_Owed([weakref.ref(parameter) for parameter in parameters], whole))


def _kind(optimizer: Optimizer, parameters: Sequence[Parameter | None]) -> Kind:
    slots = {id(parameter): slot for slot, parameter in enumerate(parameters)}
    groups = (
        tuple(slots[id(parameter)] for parameter in group["params"] if id(parameter) in slots)
        for group in optimizer.param_groups
    )
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", tuple(groups)


def _pack(optimizer: Optimizer, parameters: Sequence[Parameter], kind: Kind, tensors: list[Tensor]) -> _State:
    """The state without its tensors, which are put in a list."""

    def packed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        part = local_of(value).detach()
        tensors.append(part)
        return _Sent(len(tensors) - 1, part.shape, part.dtype, on_cpu=part.device.type == "cpu")

    groups = [group_options(group) for group in optimizer.param_groups]
    slots = {slot: optimizer.state.get(parameters[slot], {}) for members in kind[1] for slot in members}
    return _State(kind, groups, slots).map(packed)


def _received(tensors: Sequence[Tensor], value: Any) -> Any:
    if not isinstance(value, _Sent):
        return value
    return tensors[value.number].cpu() if value.on_cpu else tensors[value.number]


@torch.no_grad()
def _load(optimizer: Optimizer, parameters: Sequence[Parameter | None], state: _State) -> None:
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
    """Take values over; into the tensors that are there, which others may hold."""
    for key, value in values.items():
        here = current.get(key)
        if isinstance(value, Tensor) and isinstance(here, Tensor) and local_of(here).shape == value.shape:
            local_of(here).copy_(value)
        else:
            current[key] = value


def _concerns(owed: _Owed, parameters: Sequence[Parameter]) -> bool:
    """Whether state was for these parameters, or for some that are no more."""
    here = [parameter() for parameter in owed.parameters]
    return None in here or any(mine is theirs for mine, theirs in zip(here, parameters, strict=False))
