"""Apply one module a replica to its own inputs, all at the same time."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import CountError
from paceline.replicas.threads import run_together
from paceline.tensors import devices as dev
from paceline.tensors import tree
from paceline.tensors.devices import DeviceLike


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike | None] | None = None,
) -> list[Any]:
    """Call ``modules[i](*inputs[i], **kwargs_tup[i])`` on ``devices[i]``, a thread each.

    An input that is not a tuple or list is the only argument. Grad mode, inference mode, autocast and the
    default device of the caller hold in every thread. Without a device, that of the first input tensor is
    taken, else the current one. An error is raised again with its type kept, saying in which replica and on
    which device it was caught.
    """
    kwargs_tup = kwargs_tup if kwargs_tup is not None else [{}] * len(modules)
    devices = devices if devices is not None else [None] * len(modules)
    for name, given in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        if len(given) != len(modules):
            raise CountError(
                f"as many {name} as modules are needed ({name}: {len(given)}, modules: {len(modules)})"
            )
    if not modules:
        return []
    placed = [_place(device, given) for device, given in zip(devices, inputs, strict=True)]
    surroundings = Surroundings.of_caller(placed)
    calls = [_call(surroundings, *one) for one in zip(modules, inputs, kwargs_tup, placed, strict=True)]
    return run_together(calls, lambda i: f"in replica {i} on device {_name(placed[i])}")


@dataclass(frozen=True)
class Surroundings:
    """What holds in one thread and must hold in the threads that work for it."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device

    @classmethod
    def of_caller(cls, devices: Sequence[torch.device]) -> "Surroundings":
        """Those of the calling thread, as far as they matter on the devices."""
        kinds = {"cpu", *(device.type for device in devices if device.type != "meta")}
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make them hold in the calling thread."""
        with contextlib.ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            yield

    def _contexts(self) -> Iterator[AbstractContextManager[object]]:
        # Only what differs from a new thread's own: each context costs time in every replica.
        if self.inference:
            yield torch.inference_mode()
        yield torch.set_grad_enabled(self.grad)
        for kind, dtype in self.autocast:
            yield torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
        if self.default_device != dev.CPU:
            yield self.default_device


def _call(
    surroundings: Surroundings, module: nn.Module, given: Any, kwargs: dict[str, Any], device: torch.device
) -> Callable[[], Any]:
    # The caller's stream, so that the replica's work is ordered with what the caller does before and after.
    stream = dev.current_stream(device)
    args = given if isinstance(given, tuple | list) else (given,)

    def call() -> Any:
        with surroundings.entered(), dev.working_on(device, stream):
            return module(*args, **kwargs)

    return call


def _place(device: DeviceLike | None, given: Any) -> torch.device:
    if device is not None:
        return dev.resolve(device)
    for leaf in tree.leaves(given):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return dev.current()


def _name(device: torch.device) -> str:
    """An accelerator's index, as torch writes it, or the device's own name."""
    accelerator = torch.accelerator.current_accelerator()
    return str(device.index) if accelerator is not None and accelerator.type == device.type else str(device)
