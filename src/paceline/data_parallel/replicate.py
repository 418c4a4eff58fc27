"""Make one replica of a module per device.

The module tree is walked once, by a ``Replicator``. Each call reads the module's current parameters, buffers
and attributes anew, so a change between two calls is always seen; a changed tree needs a new ``Replicator``.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from paceline.errors import DeviceError, UnsupportedError
from paceline.tensors import devices as dev
from paceline.tensors.devices import DeviceLike
from paceline.torch_private import buffers_of, children_of, parameters_of, replicate_itself, replicates_itself

M = TypeVar("M", bound=nn.Module)


class Replicas(list[M]):
    """Replicas in the order of their devices.

    Attributes:
        copies: for each replica, its differentiable copies of the module's parameters and buffers.
    """

    copies: Sequence[Sequence[torch.Tensor]] = ()


def replicate(network: M, devices: Iterable[DeviceLike], detach: bool = False) -> list[M]:  # noqa: FBT001, FBT002 - torch's signature
    """Make one replica of the module per device; returns an empty list without devices.

    Gradients of all replicas sum into the module's parameters, unless ``detach``. A replica on the device of
    the module shares its parameters' memory. The first replica shares the module's buffers too, so that
    in-place updates of them reach the module; the others get copies. Modules and parameters that are shared
    inside the module stay shared. ``parameters()`` of a replica gives the replica's own tensors.
    """
    resolved = tuple(map(dev.resolve, devices))
    return Replicator(network).replicate(resolved, detach=detach) if resolved else []


def check_on_device(module: nn.Module, device: torch.device) -> None:
    """Refuse a module with a parameter or buffer on another device, as torch does."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != device:
            raise DeviceError(
                f"module must have its parameters and buffers on device {device} (device_ids[0]) "
                f"but found one of them on device: {tensor.device} (name: '{name}')"
            )


class Replicator(Generic[M]):
    """Copies the tree of one module.

    It holds the dicts in which nn.Module keeps parameters, buffers and children, and reads them at each call:
    they stay the same objects for a module's life.
    """

    def __init__(self, module: M) -> None:
        self._modules = list(module.modules())
        for each in self._modules:
            if isinstance(each, torch.jit.ScriptModule):
                raise UnsupportedError(f"a scripted module cannot be replicated (type: {each.original_name})")
        self._states = [*map(vars, self._modules)]
        self._parameters = [*map(parameters_of, self._modules)]
        self._buffers = [*map(buffers_of, self._modules)]
        self._children = [*map(children_of, self._modules)]
        self._child_names = [*chain.from_iterable(self._children)]
        self._child_modules = [*chain.from_iterable(map(dict.values, self._children))]
        self._child_counts = [*map(len, self._children)]
        index = {each: number for number, each in enumerate(self._modules)}
        # By module with children, the indices of the children. A child that is None comes after the last.
        self._child_indices = [
            (number, [len(index) if child is None else index[child] for child in children.values()])
            for number, children in enumerate(self._children)
            if children
        ]
        self._types = [*map(type, self._modules)]
        self._copy_themselves = [n for n, kind in enumerate(self._types) if _copies_itself(kind)]
        self._override_setattr = [n for n, kind in enumerate(self._types) if _overrides_setattr(kind)]

    def matches(self, module: nn.Module) -> bool:
        """Whether the module's tree is still the one that was walked."""
        return (
            module is self._modules[0]
            and self._types == [*map(type, self._modules)]
            and self._child_counts == [*map(len, self._children)]
            and self._child_names == [*chain.from_iterable(self._children)]
            and all(map(is_, self._child_modules, chain.from_iterable(map(dict.values, self._children))))
        )

    def replicate(
        self, devices: tuple[torch.device, ...], *, detach: bool, source: torch.device | None = None
    ) -> Replicas[M]:
        """Make one replica per device, with the module's current values.

        Args:
            devices: the devices.
            detach: whether gradients stop at the replicas.
            source: the device on which all of the module's tensors must be; any if None.
        """
        tensors = self._tensors()
        found = {tensor.device for tensor in tensors}
        if source is not None and not found <= {source}:
            check_on_device(self._modules[0], source)
        requiring_grad = {id(tensor): tensor for tensor in tensors if tensor.requires_grad}
        trained = {} if detach else requiring_grad
        detached = {key: tensor.detach() for key, tensor in requiring_grad.items()} if detach else {}
        replicas: Replicas[M] = Replicas()
        replicas.copies = _broadcast([*trained.values()], devices)
        for number, device in enumerate(devices):
            copies = dict(zip(trained, replicas.copies[number], strict=True))
            moved = {} if found <= {device} else _moved(tensors, device, copies)
            buffers = _cloned(_tensors_in(self._buffers), device) if number > 0 else {}
            replicas.append(self._one_replica({**detached, **buffers, **moved, **copies}))
        return replicas

    def _tensors(self) -> list[torch.Tensor]:
        """Every parameter and buffer there is now; a shared one may come more than once."""
        return [*_tensors_in(self._parameters), *_tensors_in(self._buffers)]

    def _one_replica(self, replacements: dict[int, torch.Tensor]) -> M:
        """A copy of the tree; ``replacements`` has tensors in the place of the module's, by id of those."""
        # Whole lists at a time, because every call does this for every module of the tree.
        replicas: list[Any] = [*map(_new, self._types), None]
        for number in self._copy_themselves:
            replicas[number] = replicate_itself(self._modules[number])
        children: list[dict[str, Any]] = [{} for _ in self._modules]
        for number, indices in self._child_indices:
            children[number].update(
                zip(self._children[number], map(replicas.__getitem__, indices), strict=True)
            )
        parameters = _replaced(self._parameters, replacements)
        buffers = _replaced(self._buffers, replacements)
        states = [*map(dict.copy, self._states)]
        for number in self._copy_themselves:
            states[number].update(vars(replicas[number]))
        for state, own, buffer, child in zip(states, parameters, buffers, children, strict=True):
            state["_parameters"], state["_buffers"], state["_modules"] = own, buffer, child
            state["_is_replica"] = True
            state["_compiled_call_impl"] = None  # what m.compile() made calls the module, not the replica
        deque(map(_set_state, replicas, states), maxlen=0)
        for number in self._override_setattr:
            _assign(replicas[number], parameters[number])
        return cast("M", replicas[0])


# torch 2.13: these bypass nn.Module.__new__ and __setattr__, which would inspect what is assigned.
_new = object.__new__
_set_state = nn.Module.__dict__["__dict__"].__set__


def _copies_itself(kind: type[nn.Module]) -> bool:
    """Whether the class is copied or made in its own way, as torch's recurrent layers are."""
    return replicates_itself(kind) or kind.__new__ is not object.__new__


def _overrides_setattr(kind: Any) -> bool:
    return kind.__setattr__ is not nn.Module.__setattr__


def _assign(replica: nn.Module, parameters: dict[str, torch.Tensor | None]) -> None:
    """Assign each parameter once, for a class whose ``__setattr__`` wants to see that."""
    state = vars(replica)
    state["_parameters"] = {}
    for name, parameter in parameters.items():
        setattr(replica, name, parameter)
        state.pop(name, None)
    state["_parameters"] = parameters


def _tensors_in(dicts: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    return [tensor for tensor in chain.from_iterable(map(dict.values, dicts)) if tensor is not None]


def _moved(
    tensors: Iterable[torch.Tensor], device: torch.device, known: dict[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Detached copies of the tensors on other devices that are not among the known ones, by id."""
    away = {id(t): t for t in tensors if t.device != device and id(t) not in known}
    return dict(zip(away, _copies([*away.values()], device), strict=True))


def _copies(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Detached copies; those of tensors on this device share their memory."""
    return dev.send_together([tensor.detach() for tensor in tensors], [device] * len(tensors))


def _cloned(buffers: Iterable[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """Clones of the buffers on this device, which only one replica may update, by id."""
    return {id(b): b.detach().clone() for b in buffers if b.device == device}


def _replaced(dicts: Sequence[dict[str, Any]], replacements: dict[int, torch.Tensor]) -> list[dict[str, Any]]:
    # By id, because hashing a tensor is slow; the module keeps the tensors alive meanwhile.
    return [
        {name: replacements.get(id(tensor), tensor) for name, tensor in each.items()} if each else {}
        for each in dicts
    ]


def _broadcast(
    tensors: Sequence[torch.Tensor], devices: tuple[torch.device, ...]
) -> list[Sequence[torch.Tensor]]:
    """For each device, differentiable copies of all tensors."""
    if not tensors:
        return [()] * len(devices)
    flat = BroadcastToReplicas.apply(devices, *tensors)  # type: ignore[no-untyped-call]
    return [flat[i : i + len(tensors)] for i in range(0, len(flat), len(tensors))]


class BroadcastToReplicas(torch.autograd.Function):
    """Copies every tensor to every device; on its own device a tensor's copy shares its memory.

    In backward the copies' gradients are summed in the order of the devices, so the sum has the same bits in
    each run. A tensor of which no copy was used gets zeros, as with torch's DataParallel.
    """

    @staticmethod
    def forward(
        ctx: Any, devices: tuple[torch.device, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The copies of all tensors for the first device, then for the second, and so on."""
        ctx.set_materialize_grads(False)
        ctx.tensors = tensors  # for the shapes of gradients that never came
        return tuple(copy for device in devices for copy in _copies(tensors, device))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The sums, each on its tensor's device."""
        count = len(ctx.tensors)
        moved = [_moved_back(gradients[i : i + count], ctx.tensors) for i in range(0, len(gradients), count)]
        return (None, *map(_sum, zip(*moved, strict=True), ctx.tensors))


def _moved_back(
    gradients: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """One replica's gradients, on the devices of the tensors that they belong to."""
    if torch.is_grad_enabled():  # somebody will differentiate again
        return [
            None if gradient is None else dev.send(gradient, tensor.device)
            for gradient, tensor in zip(gradients, tensors, strict=True)
        ]
    present = [at for at, gradient in enumerate(gradients) if gradient is not None]
    moved = [*gradients]
    sent = dev.send_together([gradients[at] for at in present], [tensors[at].device for at in present])  # type: ignore[misc]
    for at, gradient in zip(present, sent, strict=True):
        moved[at] = gradient
    return moved


def _sum(gradients: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else _add(total, gradient)
    return torch.zeros_like(like) if total is None else total


def _add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # torch adds a sparse tensor to a dense one, but not a dense one to a sparse one.
    return other + one if one.is_sparse else one + other
