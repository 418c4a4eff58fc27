"""A module's parameters as slots."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn import Parameter

from paceline.buckets.plan import Slot
from paceline.errors import OptionError


class Slots(NamedTuple):
    """Every parameter that may get a gradient, in the module's order.

    Attributes:
        slots: what never changes of each.
        parameters: the parameters themselves.
        trainable: the indices of those that require a gradient now.
    """

    slots: list[Slot]
    parameters: list[Parameter]
    trainable: list[int]


def delayed(module: nn.Module, named: Iterable[tuple[str, Parameter]] | None, awaited: Any) -> list[str]:
    """The names of parameters that are to be reduced last, with the one whose gradient they wait for."""
    if (named is None) != (awaited is None):
        raise OptionError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )
    if named is None:
        return []
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    chosen = [*named, ("param_to_hook_all_reduce", awaited)]
    if foreign := [name for name, parameter in chosen if id(parameter) not in names]:
        raise OptionError(
            f"all-reduce can be delayed for the module's own parameters only (others: {foreign})"
        )
    return [names[id(parameter)] for _, parameter in chosen]


def collect(module: nn.Module, ignored: Collection[str], delayed: Collection[str] = ()) -> Slots:
    """The slots of a module; a parameter that is shared inside it has one, under its first name."""
    sparse = set(_sparse(module))
    found = Slots([], [], [])
    for name, parameter in module.named_parameters():
        if name in ignored or not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        slot = Slot(
            index=len(found.slots),
            name=name,
            numel=parameter.numel(),
            nbytes=parameter.numel() * parameter.element_size(),
            kind=f"{parameter.dtype} {parameter.device}",
            sparse=id(parameter) in sparse,
            delayed=name in delayed and id(parameter) not in sparse,
        )
        found.slots.append(slot)
        found.parameters.append(parameter)
        if parameter.requires_grad:
            found.trainable.append(slot.index)
    return found


def describe(found: Slots) -> list[tuple[str, str]]:
    """Each slot in words that are equal on two ranks if the slots are."""
    pairs = zip(found.slots, found.parameters, strict=True)
    return [(slot.name, _view(slot, parameter)) for slot, parameter in pairs]


def _view(slot: Slot, parameter: Parameter) -> str:
    trained = "frozen" if not parameter.requires_grad else "sparse" if slot.sparse else "trained"
    return f"shape {list(parameter.shape)}, stride {list(parameter.stride())}, {parameter.dtype}, {trained}"


def _sparse(module: nn.Module) -> Iterator[int]:
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            yield id(layer.weight)
