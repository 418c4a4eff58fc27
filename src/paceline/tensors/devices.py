"""Which device an index or a name means, the thread's current device and stream, and copies to a device.

Everything here goes through ``torch.get_device_module``, so that the same code serves CUDA, XPU, MTIA and
devices registered from outside torch. For a device without streams (the CPU, MPS) contexts do nothing.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from paceline.errors import DeviceError

DeviceLike = int | str | torch.device

CPU = torch.device("cpu")

# These types always exist, and have neither an index to choose nor streams.
_WITHOUT_INDEX = frozenset({"cpu", "meta"})
# Up to this many bytes a tensor is copied together with others: a copy of its own would mostly be overhead.
_SMALL_BYTES = 1 << 20


def resolve(device: DeviceLike) -> torch.device:
    """The device that an index, a name or a torch.device means; an integer is an index of the accelerator.

    Raises:
        DeviceError: if there is no such device on this machine.
    """
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
    if named.type in _WITHOUT_INDEX:
        return torch.device(named.type)
    return _existing(named.type, named.index, device)


def resolve_all(devices: Iterable[DeviceLike]) -> tuple[torch.device, ...]:
    """As ``resolve``, for a list that must not be empty."""
    resolved = tuple(map(resolve, devices))
    if not resolved:
        raise DeviceError("at least one device is needed (devices: [])")
    return resolved


def all_accelerators() -> tuple[torch.device, ...]:
    """Every device of the accelerator; empty on a machine without one."""
    kind = accelerator_type()
    return () if kind is None else tuple(torch.device(kind, index) for index in range(_count(kind)))


def accelerator_type() -> str | None:
    """The type of this machine's accelerator, such as "cuda"; None without one."""
    # A build of torch for an accelerator names it even on a machine that has none.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def index_or_device(device: torch.device) -> int | torch.device:
    """What torch's DataParallel stores: the index of an accelerator's device, any other device as it is."""
    return device.index if device.type == accelerator_type() else device


def current_device() -> torch.device:
    """The calling thread's current accelerator device, or the CPU on a machine without one."""
    kind = accelerator_type()
    return CPU if kind is None else torch.device(kind, current_index(kind))


def current_index(device_type: str) -> int:
    """The calling thread's current index of that device type."""
    # Types with a single device, such as MPS, lack this function.
    current = getattr(_module(device_type), "current_device", lambda: 0)
    return int(current())


def current_stream(device: torch.device) -> Any:
    """The calling thread's stream on the device, or None where there are no streams."""
    if device.type in _WITHOUT_INDEX:
        return None
    current = getattr(_module(device.type), "current_stream", None)
    return None if current is None else current(device)


@contextlib.contextmanager
def use_device(device: torch.device, stream: Any = None) -> Iterator[None]:
    """Make the device, and the stream if there is one, the calling thread's current ones."""
    with contextlib.ExitStack() as stack:
        if device.type not in _WITHOUT_INDEX:
            module = _module(device.type)
            if (switch := getattr(module, "device", None)) is not None:
                stack.enter_context(switch(device.index))
            if stream is not None:
                stack.enter_context(module.stream(stream))
        yield


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device, differentiably; returns the tensor itself if it is there already.

    A copy from the CPU runs on a side stream, so that it overlaps with the work of the device.
    """
    if tensor.device == device:
        return tensor
    if device.type in _WITHOUT_INDEX:
        return tensor.to(device)  # blocking: the CPU would read before the copy has ended
    if tensor.device.type != "cpu" or (consumer := current_stream(device)) is None:
        return tensor.to(device, non_blocking=True)
    side = _copy_stream(device)
    with use_device(device, side):
        copy = tensor.to(device, non_blocking=True)
    consumer.wait_stream(side)
    # The copy's memory belongs to the side stream: it must not be reused while the consumer reads it.
    copy.record_stream(consumer)
    return copy


def send_together(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Copy each tensor to its device, many small ones by one copy; returns those that are there themselves.

    The copies have versions and strides of their own, but small ones share a storage. This is not
    differentiable.
    """
    sent = [*tensors]
    together: dict[tuple[torch.device, torch.device, torch.dtype], list[int]] = {}
    for at, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        if tensor.device != device and _is_small(tensor):
            together.setdefault((tensor.device, device, tensor.dtype), []).append(at)
        else:
            sent[at] = send(tensor, device)
    for (_, device, _), members in together.items():
        few = [tensors[at] for at in members]
        flat = send(torch.cat([tensor.view(-1) for tensor in few]), device)
        parts = flat.split([tensor.numel() for tensor in few])
        for at, tensor, part in zip(members, few, parts, strict=True):
            sent[at] = part.view(tensor.shape).data  # not a view to autograd, which would tie their versions
    return sent


def _is_small(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is _plain_type(tensor.device.type) and tensor.layout is torch.strided
    return is_plain and tensor.is_contiguous() and tensor.nbytes <= _SMALL_BYTES


@functools.cache
def _plain_type(device_type: str) -> type[torch.Tensor]:
    return type(torch.empty(0, device=device_type))


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return _module(device.type).Stream(device)


def _check_type(device: object) -> None:
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise DeviceError(f"a device must be an index, a name or a torch.device (device: {device!r})")


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
