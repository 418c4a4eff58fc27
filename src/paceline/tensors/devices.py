"""Devices by any name, and the thread's current device and stream.

Everything here goes through ``torch.get_device_module``, so that one code path serves CUDA, XPU, MTIA and
devices hosted outside torch; a device without streams (the CPU, MPS) gets a context that does nothing.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from paceline.errors import DeviceError

DeviceLike = int | str | torch.device

CPU = torch.device("cpu")

# Devices that are always there, have no index to choose and no streams.
_PLAIN = frozenset({"cpu", "meta"})


def resolve(device: DeviceLike) -> torch.device:
    """The one device meant, checked to exist; an integer is an index of the current accelerator."""
    if device == "cpu" or device == CPU:  # first, because every scatter of a CPU tensor asks for it
        return CPU
    _check_type(device)
    if isinstance(device, int):
        if (kind := accelerator_type()) is None:
            raise DeviceError(f"no accelerator here for a device index (device: {device}); name it: 'cpu'")
        return _existing(kind, device, device)
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"unknown device (device: {device!r}, here: {_here()})") from error
    if named.type in _PLAIN:
        return torch.device(named.type)
    return _existing(named.type, named.index, device)


def resolve_all(devices: Iterable[DeviceLike]) -> tuple[torch.device, ...]:
    """Every device of a list that must not be empty."""
    resolved = tuple(map(resolve, devices))
    if not resolved:
        raise DeviceError("at least one device is needed (devices: [])")
    return resolved


def all_accelerators() -> tuple[torch.device, ...]:
    """Each device of the current accelerator; none on a machine without one."""
    kind = accelerator_type()
    return () if kind is None else tuple(torch.device(kind, index) for index in range(_count(kind)))


def accelerator_type() -> str | None:
    """The kind of accelerator that this machine has, if any."""
    # A build for an accelerator names it even where there is none to be had.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def as_torch_names(device: torch.device) -> int | torch.device:
    """An accelerator's device by its index, as torch's DataParallel does; any other as it is."""
    return device.index if device.type == accelerator_type() else device


def current() -> torch.device:
    """The calling thread's current accelerator device, or the CPU on a machine without one."""
    kind = accelerator_type()
    return CPU if kind is None else torch.device(kind, current_index(kind))


def current_index(device_type: str) -> int:
    """The calling thread's current index of that device type."""
    # Types without a choice of index, such as MPS, have no such function.
    current = getattr(_module(device_type), "current_device", lambda: 0)
    return int(current())


def current_stream(device: torch.device) -> Any:
    """The calling thread's stream on the device, or None where there are no streams."""
    if device.type in _PLAIN:
        return None
    current = getattr(_module(device.type), "current_stream", None)
    return None if current is None else current(device)


@contextlib.contextmanager
def working_on(device: torch.device, stream: Any = None) -> Iterator[None]:
    """Make the device, and the stream if there is one, the calling thread's current ones."""
    with contextlib.ExitStack() as stack:
        if device.type not in _PLAIN:
            module = _module(device.type)
            if (switch := getattr(module, "device", None)) is not None:
                stack.enter_context(switch(device.index))
            if stream is not None:
                stack.enter_context(module.stream(stream))
        yield


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, differentiably; itself if it is there already.

    A copy from the CPU runs on a side stream, so that it overlaps what the device is doing.
    """
    if tensor.device == device:
        return tensor
    if device.type in _PLAIN:
        return tensor.to(device)  # waits: the CPU would not, before it reads
    if tensor.device.type != "cpu" or (consumer := current_stream(device)) is None:
        return tensor.to(device, non_blocking=True)
    side = _copy_stream(device)
    with working_on(device, side):
        copy = tensor.to(device, non_blocking=True)
    consumer.wait_stream(side)
    # The copy's memory belongs to the side stream: it must not be reused while the consumer reads it.
    copy.record_stream(consumer)
    return copy


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return _module(device.type).Stream(device)


def _check_type(device: object) -> None:
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise DeviceError(f"a device is an index, a name or a torch.device (device: {device!r})")


def _module(device_type: str) -> Any:
    return torch.get_device_module(device_type)


def _existing(device_type: str, index: int | None, given: DeviceLike) -> torch.device:
    count = _count(device_type)
    if index is None and count:
        index = current_index(device_type)
    if index is None or not 0 <= index < count:
        shown = f"{device_type}:{given}" if isinstance(given, int) else given
        raise DeviceError(f"unknown device (device: '{shown}', here: {_here()})")
    return torch.device(device_type, index)


def _count(device_type: str) -> int:
    try:
        module = _module(device_type)
    except RuntimeError:  # torch knows the name, but nothing is registered behind it
        return 0
    return int(module.device_count()) if module.is_available() else 0


def _here() -> str:
    return ", ".join(map(str, (CPU, *all_accelerators())))
