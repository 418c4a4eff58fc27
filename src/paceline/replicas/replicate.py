"""One replica of a module a device.

A module's tree is walked once, into a blueprint; replicas are stamped from it at each call, with the
module's current values. So nothing that changes between two calls can be missed: what a replica holds is
read from the module when it is stamped, and a changed tree no longer fits its blueprint.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from paceline.errors import DeviceError
from paceline.replicas.functions import broadcast
from paceline.tensors import devices as dev
from paceline.tensors.devices import DeviceLike

M = TypeVar("M", bound=nn.Module)

# Layers whose forward only reads the layer. Without hooks, buffers and children of their own they can serve
# all replicas at once, wherever a replica's parameters are the module's own.
_READ_ONLY = frozenset(
    {
        *(nn.Linear, nn.Bilinear, nn.Identity, nn.Embedding, nn.EmbeddingBag, nn.Flatten, nn.Unflatten),
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm),
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.GLU),
        *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Softplus, nn.Softmax, nn.LogSoftmax),
        *(nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d, nn.ReflectionPad2d),
    }
)

# What makes a layer more than its class says: its own buffers, children and hooks.
_EXTRAS = (
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


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


class Blueprint(Generic[M]):
    """How the tree of one module is copied.

    It holds the tables in which nn.Module keeps a module's parameters, buffers, children and hooks, and reads
    them at each use: they stay the same objects for a module's life.
    """

    def __init__(self, module: M) -> None:
        parts = list(module.modules())
        states = [vars(part) for part in parts]
        self._parts = parts
        self._tensors = [state[name] for state in states for name in ("_parameters", "_buffers")]
        self._children = [state["_modules"] for state in states]
        self._keys = [*chain.from_iterable(self._children)]
        self._values = [*chain.from_iterable(map(dict.values, self._children))]
        place = {part: number for number, part in enumerate(parts)}
        # A child that is None lies behind the last part.
        self._places = [
            [len(parts) if child is None else place[child] for child in children.values()]
            for children in self._children
        ]
        read_only = [*map(_is_read_only, parts)]
        self._extras = [
            state[name] for state, shared in zip(states, read_only, strict=True) if shared for name in _EXTRAS
        ]
        self._copied = [number for number, shared in enumerate(read_only) if not shared]
        self._copied_to_train = [
            n for n, shared in enumerate(read_only) if not shared or states[n]["_parameters"]
        ]

    def fits(self, module: nn.Module) -> bool:
        """Whether the module's tree is still the one that was walked."""
        return (
            module is self._parts[0]
            and self._keys == [*chain.from_iterable(self._children)]
            and all(map(is_, self._values, chain.from_iterable(map(dict.values, self._children))))
            and not any(self._extras)
        )

    def check_home(self, home: torch.device) -> None:
        """Refuse a module that has a tensor elsewhere, as torch does."""
        if {tensor.device for tensor in self._all_tensors()} <= {home}:
            return
        root = self._parts[0]
        for name, tensor in chain(root.named_parameters(), root.named_buffers()):
            if tensor.device != home:
                raise DeviceError(
                    f"module must have its parameters and buffers on device {home} (device_ids[0]) "
                    f"but found one of them on device: {tensor.device} (name: '{name}')"
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
        tensors = self._all_tensors()
        homes = {tensor.device for tensor in tensors}
        if home is not None and not homes <= {home}:
            self.check_home(home)
        trained = [] if detach else [*{id(t): t for t in tensors if t.requires_grad}.values()]
        copies = _broadcast(trained, devices)
        replicas: Replicas[M] = Replicas()
        replicas.copies = copies
        for number, device in enumerate(devices):
            stand_ins = _StandIns(device, trained, copies[number], share_buffers=number == 0)
            in_place = not trained and homes <= {device}
            replicas.append(self._stamp_one(stand_ins, self._copied if in_place else self._copied_to_train))
        return replicas

    def _all_tensors(self) -> list[torch.Tensor]:
        """Every parameter and buffer there is now; a shared one may come more than once."""
        return [t for t in chain.from_iterable(map(dict.values, self._tensors)) if t is not None]

    def _stamp_one(self, stand_ins: "_StandIns", copied: Sequence[int]) -> M:
        replicas: list[Any] = [*self._parts, None]
        for number in copied:
            replicas[number] = _shell(self._parts[number])
        for number in copied:
            children = map(replicas.__getitem__, self._places[number])
            named = dict(zip(self._children[number], children, strict=True))
            _fill(replicas[number], self._parts[number], stand_ins, named)
        return cast("M", replicas[0])


class _StandIns:
    """What one replica holds in the place of each of the module's tensors."""

    def __init__(
        self,
        device: torch.device,
        trained: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
        *,
        share_buffers: bool,
    ) -> None:
        self._device = device
        # By id, because hashing a tensor is slow; the module keeps the tensors alive meanwhile.
        self._known = {id(tensor): copy for tensor, copy in zip(trained, copies, strict=True)}
        self._share_buffers = share_buffers

    def for_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """The copy through which gradients flow, or the parameter's value on the device."""
        known = self._known.get(id(parameter))
        return self._remember(parameter, _detached_on(parameter, self._device)) if known is None else known

    def for_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer itself for the one replica that updates it, a copy for the others."""
        if self._share_buffers or id(buffer) in self._known:
            return self.for_parameter(buffer)
        moved = _detached_on(buffer, self._device)
        return self._remember(buffer, moved.detach().clone() if moved is buffer else moved)

    def _remember(self, tensor: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
        self._known[id(tensor)] = stand_in
        return stand_in


def _detached_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else dev.send(tensor.detach(), device)


def _broadcast(
    trained: Sequence[torch.Tensor], devices: tuple[torch.device, ...]
) -> list[Sequence[torch.Tensor]]:
    if not trained:
        return [()] * len(devices)
    flat = broadcast(devices, trained)
    return [flat[i : i + len(trained)] for i in range(0, len(flat), len(trained))]


def _shell(part: nn.Module) -> nn.Module:
    if type(part)._replicate_for_data_parallel is nn.Module._replicate_for_data_parallel:
        return part.__new__(type(part))
    # A class that copies itself in its own way, such as torch's recurrent layers.
    return cast("nn.Module", part._replicate_for_data_parallel())


def _fill(
    replica: nn.Module, part: nn.Module, stand_ins: _StandIns, children: dict[str, nn.Module | None]
) -> None:
    parameters = {
        name: None if parameter is None else stand_ins.for_parameter(parameter)
        for name, parameter in part._parameters.items()
    }
    state = {
        **vars(part),
        **vars(replica),
        "_parameters": parameters,
        "_buffers": {
            name: None if buffer is None else stand_ins.for_buffer(buffer)
            for name, buffer in part._buffers.items()
        },
        "_modules": children,
        "_is_replica": True,
    }
    # Not by assignment, which nn.Module would look into.
    object.__setattr__(replica, "__dict__", state)
    if type(part).__setattr__ is not nn.Module.__setattr__:
        _tell(replica, parameters)


def _tell(replica: nn.Module, parameters: dict[str, torch.Tensor | None]) -> None:
    """Assign each parameter once, for a class that watches assignments (torch's recurrent layers do)."""
    state = vars(replica)
    state["_parameters"] = {}
    for name, parameter in parameters.items():
        setattr(replica, name, parameter)
        state.pop(name, None)
    state["_parameters"] = parameters


def _is_read_only(part: nn.Module) -> bool:
    state = vars(part)
    return type(part) in _READ_ONLY and "forward" not in state and not any(state[name] for name in _EXTRAS)
