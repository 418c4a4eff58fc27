"""A module's parameters: which of them are averaged, and that all ranks have the same."""

import itertools
import warnings
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
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
from paceline.torch_private import children_of, parameters_of

_FORWARDS_BETWEEN_LOOKS = 16


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

    def begin_backward(self) -> None:
        """A backward begins."""

    def end_step(self) -> None:
        """A step has ended well."""

    def clear_grads(self, slots: Iterable[int] | None = None) -> None:
        """Set ``.grad`` to None, of all parameters or of some."""
        for slot in range(len(self.local)) if slots is None else slots:
            self.local[slot].grad = None


class UnknownParameters:
    """Tells of parameters that were added or replaced after the module was wrapped: nobody averages them.

    To look at every parameter costs half a microsecond each. So it looks before every 16th forward, and after
    steps that brought other gradients than the step before.

    Args:
        module: the wrapped module.
        known: its parameters that are averaged.
        ignored: names of those that never are.
    """

    def __init__(self, module: nn.Module, known: Iterable[Parameter], ignored: Collection[str]) -> None:
        self._module = module
        self._known = {id(parameter): parameter for parameter in known}
        self._ignored = ignored
        self._told: set[str] = set()
        self._forwards = itertools.count()
        # Scripted modules keep their parameters elsewhere, and cannot get new ones.
        self._is_scripted = any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())
        self._remember()

    def warn(self, *, is_step_new: bool) -> None:
        """Warn of those that are new, by name and once; called before each forward.

        Args:
            is_step_new: whether the last step brought other gradients than the one before.
        """
        is_due = next(self._forwards) % _FORWARDS_BETWEEN_LOOKS == 0
        if not (is_due or is_step_new) or self._is_as_before():
            return
        self._remember()
        new = [
            name
            for name, parameter in self._module.named_parameters()
            if type(parameter) is not Tensor  # functional_call puts tensors there, for one call
            and parameter.requires_grad
            and id(parameter) not in self._known
            and name not in {*self._ignored, *self._told}
        ]
        if new:
            self._told.update(new)
            warnings.warn(
                "parameters were added to the module, or replaced, after it was wrapped. Their gradients are "
                "not averaged across ranks, so the replicas drift apart. Wrap the module after such a change "
                f"(parameters: {new})",
                stacklevel=5,
            )

    def _remember(self) -> None:
        # These dicts stay the same objects for a module's life.
        modules = [] if self._is_scripted else [*self._module.modules()]
        self._dicts = [*map(parameters_of, modules), *map(children_of, modules)]
        self._values = self._values_now()

    def _values_now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._dicts))]

    def _is_as_before(self) -> bool:
        values = self._values_now()
        return len(values) == len(self._values) and all(map(is_, values, self._values))


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


def check_dtensor_parts(params: Slots, group: Group) -> None:
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
