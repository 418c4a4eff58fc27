"""One replica of a module a device.

A module's tree is walked once, into a blueprint; replicas are stamped from it at each call, with the
module's current values. So nothing that changes between two calls can be missed: what a replica holds is
read from the module when it is stamped, and a changed tree no longer fits its blueprint.
"""

from collections import deque
from collections.abc import Container, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from paceline.data_parallel.functions import broadcast
from paceline.errors import DeviceError, UnsupportedError
from paceline.tensors import devices as dev
from paceline.tensors.devices import DeviceLike

M = TypeVar("M", bound=nn.Module)


class Replicas(list[M]):
    """Replicas in the order of their devices.

    Attributes:
        copies: for each replica, its tensors through which gradients flow back to the module.
    """

    copies: Sequence[Sequence[torch.Tensor]] = ()


def replicate(network: M, devices: Iterable[DeviceLike], detach: bool = False) -> list[M]:  # noqa: FBT001, FBT002 - torch's signature
    """One replica of the module a device; none without devices.

    Gradients of all replicas sum into the module's parameters, unless ``detach``. A replica on the device of
    the module shares its parameters' memory. The first replica shares the module's buffers too, so that
    in-place updates of them reach the module; the others get copies. Modules and parameters shared inside the
    tree stay shared. ``parameters()`` of a replica gives the replica's own tensors.
    """
    resolved = tuple(map(dev.resolve, devices))
    return Blueprint(network).stamp(resolved, detach=detach) if resolved else []


def check_home(module: nn.Module, home: torch.device) -> None:
    """Refuse a module that has a tensor elsewhere, as torch does."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != home:
            raise DeviceError(
                f"module must have its parameters and buffers on device {home} (device_ids[0]) "
                f"but found one of them on device: {tensor.device} (name: '{name}')"
            )


class Blueprint(Generic[M]):
    """How the tree of one module is copied.

    It holds the tables in which nn.Module keeps a module's parameters, buffers and children, and reads them
    at each use: they stay the same objects for a module's life.
    """

    def __init__(self, module: M) -> None:
        self._parts = list(module.modules())
        for part in self._parts:
            if isinstance(part, torch.jit.ScriptModule):
                raise UnsupportedError(f"a scripted module cannot be replicated (type: {part.original_name})")
        self._states = [*map(vars, self._parts)]
        self._parameters = [part._parameters for part in self._parts]
        self._buffers = [part._buffers for part in self._parts]
        self._children = [part._modules for part in self._parts]
        self._keys = [*chain.from_iterable(self._children)]
        self._values = [*chain.from_iterable(map(dict.values, self._children))]
        self._counts = [*map(len, self._children)]
        place = {part: number for number, part in enumerate(self._parts)}
        # A child that is None lies behind the last part.
        self._parents = [
            (number, [len(place) if child is None else place[child] for child in children.values()])
            for number, children in enumerate(self._children)
            if children
        ]
        self._kinds = [*map(type, self._parts)]
        self._copy_themselves = [n for n, kind in enumerate(self._kinds) if _copies_itself(kind)]
        self._watch = [n for n, kind in enumerate(self._kinds) if _watches_assignments(kind)]

    def fits(self, module: nn.Module) -> bool:
        """Whether the module's tree is still the one that was walked."""
        return (
            module is self._parts[0]
            and self._kinds == [*map(type, self._parts)]
            and self._counts == [*map(len, self._children)]
            and self._keys == [*chain.from_iterable(self._children)]
            and all(map(is_, self._values, chain.from_iterable(map(dict.values, self._children))))
        )

    def stamp(
        self, devices: tuple[torch.device, ...], *, detach: bool, home: torch.device | None = None
    ) -> Replicas[M]:
        """One replica a device, with the module's current values.

        Args:
            devices: one a replica.
            detach: whether gradients stop at the replicas.
            home: the device on which all of the module's tensors must be, if any.
        """
        tensors = self._tensors()
        homes = {tensor.device for tensor in tensors}
        if home is not None and not homes <= {home}:
            check_home(self._parts[0], home)
        with_gradient = {id(tensor): tensor for tensor in tensors if tensor.requires_grad}
        trained = {} if detach else with_gradient
        detached = {number: t.detach() for number, t in with_gradient.items()} if detach else {}
        replicas: Replicas[M] = Replicas()
        replicas.copies = _broadcast([*trained.values()], devices)
        for number, device in enumerate(devices):
            copies = dict(zip(trained, replicas.copies[number], strict=True))
            moved = {} if homes <= {device} else _moved(tensors, device, copies)
            buffers = _copied(_present(self._buffers), device) if number > 0 else {}
            replicas.append(self._stamp_one({**detached, **buffers, **moved, **copies}))
        return replicas

    def _tensors(self) -> list[torch.Tensor]:
        """Every parameter and buffer there is now; a shared one may come more than once."""
        return [*_present(self._parameters), *_present(self._buffers)]

    def _stamp_one(self, stand_ins: dict[int, torch.Tensor]) -> M:
        # Whole lists at a time, because this is done at each call, for each part of the tree.
        replicas: list[Any] = [*map(_new, self._kinds), None]
        for number in self._copy_themselves:
            replicas[number] = self._parts[number]._replicate_for_data_parallel()
        children: list[dict[str, Any]] = [{} for _ in self._parts]
        for number, places in self._parents:
            children[number].update(
                zip(self._children[number], map(replicas.__getitem__, places), strict=True)
            )
        parameters = _swapped(self._parameters, stand_ins)
        buffers = _swapped(self._buffers, stand_ins)
        states = [*map(dict.copy, self._states)]
        for number in self._copy_themselves:
            states[number].update(vars(replicas[number]))
        for state, own, buffer, child in zip(states, parameters, buffers, children, strict=True):
            state["_parameters"], state["_buffers"], state["_modules"] = own, buffer, child
            state["_is_replica"] = True
            state["_compiled_call_impl"] = None  # what m.compile() made calls the module, not the replica
        deque(map(_set_state, replicas, states), maxlen=0)
        for number in self._watch:
            _tell(replicas[number], parameters[number])
        return cast("M", replicas[0])


# torch 2.13: without nn.Module's own ways, which would look into what is assigned.
_new = object.__new__
_set_state = nn.Module.__dict__["__dict__"].__set__


def _copies_itself(kind: type[nn.Module]) -> bool:
    """Whether the class is copied or made in its own way, as torch's recurrent layers are."""
    own = kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel
    return own or kind.__new__ is not object.__new__


def _watches_assignments(kind: Any) -> bool:
    return kind.__setattr__ is not nn.Module.__setattr__


def _present(tables: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    return [tensor for tensor in chain.from_iterable(map(dict.values, tables)) if tensor is not None]


def _moved(
    tensors: Iterable[torch.Tensor], device: torch.device, known: Container[int]
) -> dict[int, torch.Tensor]:
    """What stands in on the device for the tensors that are elsewhere and not known to have a stand-in."""
    return {id(t): dev.send(t.detach(), device) for t in tensors if t.device != device and id(t) not in known}


def _copied(buffers: Iterable[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """What stands in for the buffers that are on the device, but only one replica may update."""
    return {id(b): b.detach().clone() for b in buffers if b.device == device}


def _broadcast(
    trained: Sequence[torch.Tensor], devices: tuple[torch.device, ...]
) -> list[Sequence[torch.Tensor]]:
    if not trained:
        return [()] * len(devices)
    flat = broadcast(devices, trained)
    return [flat[i : i + len(trained)] for i in range(0, len(flat), len(trained))]


def _swapped(tables: Sequence[dict[str, Any]], stand_ins: dict[int, torch.Tensor]) -> list[dict[str, Any]]:
    # By id, because hashing a tensor is slow; the module keeps the tensors alive meanwhile.
    return [
        {name: stand_ins.get(id(tensor), tensor) for name, tensor in table.items()} if table else {}
        for table in tables
    ]


def _tell(replica: nn.Module, parameters: dict[str, torch.Tensor | None]) -> None:
    """Assign each parameter once, for a class that watches assignments."""
    state = vars(replica)
    state["_parameters"] = {}
    for name, parameter in parameters.items():
        setattr(replica, name, parameter)
        state.pop(name, None)
    state["_parameters"] = parameters
