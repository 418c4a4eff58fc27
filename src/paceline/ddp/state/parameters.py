"""A module's parameters: which of them are averaged, and that all ranks have the same."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.ddp.buckets.plan import Slot
from paceline.errors import OptionError, WrapError
from paceline.tensors.dtensor import (
    LocalParameter,
    Trained,
    describe_parts,
    local_of,
    local_parameter,
    ranks_with_other_parts,
)


class Slots(NamedTuple):
    """Every parameter that may get a gradient, in the module's order.

    Attributes:
        slots: what never changes of each: its index, name and size. Plans and buckets refer to parameters by
            that index.
        parameters: the parameters themselves.
        trainable: the indices of those that require a gradient now.
    """

    slots: list[Slot]
    parameters: list[Parameter]
    trainable: list[int]


class ReducedParameters:
    """The parameters as a reducer works on them; each list is by slot.

    Args:
        found: the wrapped module's.

    Attributes:
        slots: what never changes of each.
        whole: the module's parameters.
        local: what is reduced: the parameter itself, or this rank's part of a DTensor.
        trainable: slots that required a gradient when the module was wrapped.
    """

    def __init__(self, found: Slots) -> None:
        self.slots = found.slots
        self.whole = found.parameters
        self.local: list[Trained] = [local_parameter(each) for each in found.parameters]
        self.trainable = sorted(found.trainable)
        self._parts = [each for each in self.local if isinstance(each, LocalParameter)]

    def keep_hooks(self) -> None:
        """Have hooks called again where a conversion of the module has lost them."""
        for part in self._parts:
            part.keep_hooks()

    def clear_grads(self, slots: Iterable[int] | None = None) -> None:
        """Set ``.grad`` to None, of all parameters or of some."""
        for slot in range(len(self.local)) if slots is None else slots:
            self.local[slot].grad = None


def delayed_names(
    module: nn.Module, named: Iterable[tuple[str, Parameter]] | None, awaited: Any
) -> list[str]:
    """Names of the parameters that are reduced last, and of the one whose gradient they wait for."""
    if (named is None) != (awaited is None):
        raise OptionError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce go together: which parameters wait, "
            "and for which"
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


def collect_slots(module: nn.Module, ignored: Collection[str], delayed: Collection[str] = ()) -> Slots:
    """The slots of a module; a parameter that is shared inside it has one, under its first name."""
    sparse = set(sparse_parameters(module))
    found = Slots([], [], [])
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        if isinstance(parameter, nn.UninitializedParameter):
            raise WrapError(
                f"a lazy module must be called once before it is wrapped (uninitialised: {name!r})"
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        numel = local_of(parameter).numel()
        slot = Slot(
            index=len(found.slots),
            name=name,
            numel=numel,
            nbytes=numel * parameter.element_size(),
            kind=f"{parameter.dtype} {parameter.device}",
            sparse=id(parameter) in sparse,
            delayed=name in delayed and id(parameter) not in sparse,
        )
        found.slots.append(slot)
        found.parameters.append(parameter)
        if parameter.requires_grad:
            found.trainable.append(slot.index)
    return found


def check_shards(params: Slots, group: Group) -> None:
    """Raise if ranks that would average hold different parts of a DTensor parameter."""
    for slot, parameter in zip(params.slots, params.parameters, strict=True):
        others = ranks_with_other_parts(parameter)
        if others and len(shared := others.intersection(group.global_ranks)) > 1:
            parts = describe_parts(parameter)
            raise WrapError(
                "ranks that average must hold the same part of each parameter; pass the process group, or "
                f"the dimension of the mesh, for data parallelism (parameter: {slot.name!r}{parts}, "
                f"ranks with other parts of it: {sorted(shared)})"
            )


def describe_slots(params: Slots) -> list[tuple[str, str]]:
    """Each parameter's name and a text that is equal on two ranks if the parameters are alike."""
    pairs = zip(params.slots, params.parameters, strict=True)
    return [(slot.name, _description(slot, parameter)) for slot, parameter in pairs]


def _description(slot: Slot, parameter: Parameter) -> str:
    trained = "frozen" if not parameter.requires_grad else "sparse" if slot.sparse else "trained"
    local = local_of(parameter)
    return (
        f"shape {list(local.shape)}, stride {list(local.stride())}, {parameter.dtype}, {trained}"
        f"{describe_parts(parameter)}"
    )


def sparse_parameters(module: nn.Module) -> Iterator[int]:
    """The ids of parameters whose gradients are expected to be sparse."""
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            yield id(layer.weight)
