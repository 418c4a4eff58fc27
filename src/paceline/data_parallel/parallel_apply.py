"""Apply each module to its own inputs, all at the same time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.data_parallel.threads import run_in_threads
from paceline.errors import CountError
from paceline.tensors import devices as dev
from paceline.tensors import tree
from paceline.tensors.devices import DeviceLike


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike | None] | None = None,
) -> list[Any]:
    """Call ``modules[i](*inputs[i], **kwargs_tup[i])`` on ``devices[i]``, in one thread per module.

    An input that is not a tuple or list is the only argument. The caller's grad mode, inference mode,
    autocast and default device hold in every thread. Where no device is given, that of the first input tensor
    is used, or the current one. An error is raised again with its type kept; its message says in which
    replica and on which device it was caught.
    """
    kwargs_tup = kwargs_tup if kwargs_tup is not None else [{}] * len(modules)
    devices = devices if devices is not None else [None] * len(modules)
    for name, given in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        if len(given) != len(modules):
            raise CountError(
                f"{name} must have one entry per module ({name}: {len(given)}, modules: {len(modules)})"
            )
    if not modules:
        return []
    resolved = [_device(device, given) for device, given in zip(devices, inputs, strict=True)]
    calls = [*map(_call, modules, inputs, kwargs_tup, resolved)]
    return run_in_threads(calls, lambda i: f"in replica {i} on device {dev.index_or_device(resolved[i])}")


def _call(module: nn.Module, given: Any, kwargs: dict[str, Any], device: torch.device) -> Callable[[], Any]:
    # The caller's stream, so that the replica's work is ordered with what the caller does before and after.
    stream = dev.current_stream(device)
    args = given if isinstance(given, tuple | list) else (given,)

    def call() -> Any:
        with dev.use_device(device, stream):
            return module(*args, **kwargs)

    return call


def _device(device: DeviceLike | None, given: Any) -> torch.device:
    if device is not None:
        return dev.resolve(device)
    for leaf in tree.leaves(given):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return dev.current_device()
