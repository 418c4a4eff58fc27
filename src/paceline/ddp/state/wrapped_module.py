"""The module that is wrapped: its parameters, the devices that they are on, and where inputs have to go."""

import gc
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.ddp.state.parameters import Slots, collect_slots
from paceline.errors import OptionError, WrapError
from paceline.tensors import devices as dev
from paceline.tensors import tree
from paceline.tensors.dtensor import local_of
from paceline.tensors.shared_parameter import are_in_use


@dataclass(frozen=True)
class WrappedModule:
    """A module, and what the wrapper knows about it.

    Attributes:
        module: the module.
        ignored: names of parameters and buffers to leave alone.
        params: its parameters.
        device: of the first parameter.
        is_multi_device: whether parameters are on several devices.
        device_ids: the index of the device that inputs are moved to, in a list as torch has it; None if they
            stay where they are.
        output_device: the index of the device that outputs are on, if the user named a device.
    """

    module: nn.Module
    ignored: Collection[str]
    params: Slots
    device: torch.device
    is_multi_device: bool
    device_ids: list[int] | None = None
    output_device: int | None = None

    def refreshed(self, delayed: Collection[str]) -> "WrappedModule":
        """The same module with its parameters as they are now; some of them are reduced last."""
        return replace(self, params=collect_slots(self.module, self.ignored, delayed))

    def move_inputs(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a forward, on the module's device if the user named it."""
        return move_tensors((inputs, kwargs), self.device) if self.device_ids else (inputs, kwargs)

    def open_transports(self, group: Group, *, may_share_memory: bool) -> None:
        """Open shared memory, or what the ranks of accelerators need; all ranks call this at once."""
        if self.device.type != "cpu":
            group.open_host_group(self.device, share_memory=may_share_memory)
        elif may_share_memory:
            group.share_memory(nbytes=sum(slot.nbytes for slot in self.params.slots))

    def broadcast(self, group: Group, *, buffers: bool, source: int, bytes_at_once: int) -> None:
        """Make parameters, and module buffers if asked, equal to those of one rank."""
        named = [*self.module.named_parameters(), *(self.module.named_buffers() if buffers else ())]
        tensors = [local_of(tensor).detach() for name, tensor in named if name not in self.ignored]
        group.broadcast(tensors, source=source, bytes_at_once=bytes_at_once)
        group.release_staging()  # no step needs as much shared memory as the whole model did


def wrap_module(
    module: nn.Module,
    delayed: Collection[str],
    *,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> WrappedModule:
    """Look at a module; raises if it cannot be trained, or if it is not where the user says."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    params = collect_slots(module, ignored, delayed)
    if not params.trainable:
        raise WrapError(
            "DistributedDataParallel is not needed for a module without a parameter that requires a gradient "
            f"(module: {type(module).__name__}, ignored: {sorted(ignored)})"
        )
    _check_devices(module, params)
    if are_in_use(params.parameters):
        gc.collect()  # a wrapper that nobody uses any more may still be there
        if are_in_use(params.parameters):
            raise WrapError(
                "a HostOptimizer of another wrapper has the module's parameters in memory that ranks share"
            )
    devices = {parameter.device for parameter in params.parameters}
    wrapped = WrappedModule(
        module, ignored, params, params.parameters[0].device, is_multi_device=len(devices) > 1
    )
    return _with_devices(wrapped, device_ids, output_device)


def move_tensors(values: Any, device: torch.device) -> Any:
    """Nested values with every tensor on one device."""
    return tree.map_leaves(lambda leaf: dev.send(leaf, device) if isinstance(leaf, Tensor) else leaf, values)


def attribute_of(module: nn.Module, name: str) -> Any:
    """A module's attribute; an error inside a property is not taken for a missing attribute."""
    static = getattr(type(module), name, None)
    if isinstance(static, property) and static.fget is not None:
        return static.fget(module)
    return getattr(module, name)


def _check_devices(module: nn.Module, params: Slots) -> None:
    types = sorted({parameter.device.type for parameter in params.parameters})
    if len(types) > 1:
        raise OptionError(f"a module must be on one type of device (found: {types})")
    if types == ["meta"]:
        name = params.slots[0].name
        raise WrapError(f"a parameter on the meta device has no values to train (parameter: {name!r})")
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and types == ["cpu"]:
            raise OptionError(
                f"SyncBatchNorm layers only work with GPU modules (layer: {name!r}, device: cpu)"
            )


def _with_devices(wrapped: WrappedModule, device_ids: Any, output_device: Any) -> WrappedModule:
    if device_ids and len(device_ids) > 1:
        raise OptionError(f"device_ids may name one device at most (device_ids: {device_ids})")
    if device_ids and wrapped.device.type != "cpu" and not wrapped.is_multi_device:
        output = device_ids[0] if output_device is None else output_device
        return replace(
            wrapped,
            device_ids=[dev.resolve(device_ids[0]).index],
            output_device=dev.resolve(output).index,
        )
    if device_ids or output_device:
        devices = sorted({str(parameter.device) for parameter in wrapped.params.parameters})
        raise OptionError(
            "device_ids and output_device are for a module on one accelerator "
            f"(device_ids: {device_ids}, output_device: {output_device}, module: {devices})"
        )
    return wrapped
