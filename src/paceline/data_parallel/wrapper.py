"""DataParallel and data_parallel: one process, one replica of the module per device."""

import enum
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import nn

from paceline.data_parallel import backward, scatter_gather
from paceline.data_parallel.parallel_apply import parallel_apply
from paceline.data_parallel.replicate import Replicas, Replicator, check_on_device
from paceline.data_parallel.scatter_gather import gather, scatter_kwargs
from paceline.errors import StructureError
from paceline.tensors import devices as dev
from paceline.tensors import tree
from paceline.tensors.devices import DeviceLike

M = TypeVar("M", bound=nn.Module)


class _GatherMode(enum.Enum):
    CAT = "cat"
    STACK = "stack"
    MEAN = "mean"
    LIST = "list"


class DataParallel(nn.DataParallel[M], Generic[M]):
    """Splits a batch over devices, runs a replica of the module on each, and gathers the outputs.

    Gradients of all replicas sum into the module. CPU replicas share torch's only random generator, so
    activation checkpointing around dropout recomputes with other masks than forward drew.

    It is an ``nn.DataParallel`` by type only, so that ``isinstance`` checks in other code hold.

    Args:
        module: the module; its parameters and buffers must be on the first device.
        device_ids: devices by index of the current accelerator, by name or as ``torch.device``. A device may
            be given more than once: ``["cpu", "cpu"]`` runs two replicas in two threads. The default is every
            accelerator; without one, the module is called as it is.
        output_device: where the gathered output goes; the first device by default.
        dim: the dimension along which tensors are split and concatenated.
        gather: how the replicas' output tensors become one. ``"cat"`` concatenates them. The others suit a
            module that returns a loss, and keep large outputs off the output device: ``"stack"`` stacks them
            along a new first dimension; ``"mean"`` weights each by its replica's number of rows, so that a
            mean over each replica's rows becomes the mean over the batch; ``"list"`` returns the outputs of
            all replicas, each on its own device.
    """

    def __init__(
        self,
        module: M,
        device_ids: Iterable[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        gather: Literal["cat", "stack", "mean", "list"] = "cat",
    ) -> None:
        nn.Module.__init__(self)
        self._gather_mode = _gather_mode(gather)
        self._replicator: Replicator[M] | None = None
        self.module = module
        self.dim = dim
        devices = _devices(device_ids)
        self.device_ids: list[Any] = [*map(dev.index_or_device, devices)]
        self.src_device_obj = devices[0] if devices else dev.CPU
        output = self.src_device_obj
        if devices and output_device is not None:  # without devices it has no effect, as in torch
            output = dev.CPU if output_device == -1 else dev.resolve(output_device)
        self.output_device: Any = dev.index_or_device(output)
        if len(devices) == 1:
            self.module.to(devices[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Scatter, replicate, apply in parallel, gather."""
        if not self.device_ids:
            return self._combine_single(self.module(*inputs, **kwargs))
        scattered, keywords = self.scatter(inputs, kwargs, self.device_ids)
        if not scattered and not keywords:
            scattered, keywords = ((),), ({},)
        if len(self.device_ids) == 1:
            check_on_device(self.module, self.src_device_obj)
            return self._combine_single(self.module(*scattered[0], **keywords[0]))
        outputs = self._run_replicas(scattered, keywords)
        if self._gather_mode is _GatherMode.CAT:
            return self.gather(outputs, self.output_device)
        rows = [_count_rows(each, self.dim) for each in zip(scattered, keywords, strict=True)]
        return self._combine(outputs, rows)

    def replicate(self, module: M, device_ids: Sequence[DeviceLike]) -> list[M]:
        """One replica per device, with the module's current values."""
        replicator = self._current_replicator() if module is self.module else Replicator(module)
        devices = dev.resolve_all(device_ids)
        return replicator.replicate(devices, detach=not torch.is_grad_enabled(), source=self.src_device_obj)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]
    ) -> Any:
        """The arguments of each replica."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def parallel_apply(self, replicas: Sequence[M], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """The output of each replica."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """The outputs of all replicas, concatenated on the output device."""
        return gather(outputs, output_device, dim=self.dim)

    def __getstate__(self) -> dict[str, Any]:
        # The replicator belongs to this module; a copy of the wrapper makes its own.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_replicator": None}

    def _run_replicas(self, inputs: Sequence[Any], kwargs: Sequence[Any]) -> Sequence[Any]:
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        if not isinstance(replicas, Replicas) or not self._runs_backward_in_threads():
            return self.parallel_apply(replicas, inputs, kwargs)
        arguments = [*map(backward.ReplicaArguments.of, zip(inputs, kwargs, strict=True))]
        outputs = self.parallel_apply(replicas, *zip(*(own.values for own in arguments), strict=True))
        for own in arguments:
            own.count_writes()
        return backward.with_threaded_backward(outputs, replicas.copies, arguments)

    def _current_replicator(self) -> Replicator[M]:
        replicator = self._replicator
        if replicator is None or not replicator.matches(self.module):
            replicator = self._replicator = Replicator(self.module)
        return replicator

    def _runs_backward_in_threads(self) -> bool:
        # On accelerators the engine has one thread per device already, and a node that waits would block it.
        return backward.is_supported() and all(device == dev.CPU for device in self.device_ids)

    def _combine_single(self, output: Any) -> Any:
        """What ``gather`` asks for, from the output of the module itself."""
        return output if self._gather_mode is _GatherMode.CAT else self._combine([output], [1])

    def _combine(self, outputs: Sequence[Any], rows: Sequence[int]) -> Any:
        if self._gather_mode is _GatherMode.LIST:
            return list(outputs)
        device = dev.resolve(self.output_device)
        if self._gather_mode is _GatherMode.STACK:
            return scatter_gather.gather_with(scatter_gather.stack(device), outputs)
        return scatter_gather.gather_with(scatter_gather.weighted_mean(device, rows), outputs)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Iterable[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call the module once on a batch that is split over devices; see DataParallel for the arguments.

    Inputs that are not a tuple are the only argument; None means no argument.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    devices = _devices(device_ids)
    if not devices:
        return module(*inputs, **(module_kwargs or {}))
    # Checked here, because a wrapper of one device would move the module instead.
    check_on_device(module, devices[0])
    return DataParallel(module, devices, output_device, dim)(*inputs, **(module_kwargs or {}))


def _devices(device_ids: Iterable[DeviceLike] | None) -> tuple[torch.device, ...]:
    """The devices to use; if empty, the module is called as it is."""
    if device_ids is None:
        # Without MPS, as in torch.
        return tuple(device for device in dev.all_accelerators() if device.type != "mps")
    given = [*device_ids]
    if given and dev.accelerator_type() is None and all(type(device) is int for device in given):
        # As in torch: a script written for accelerators runs on a machine without one.
        warnings.warn(
            f"no accelerator here: the module is called as it is (device_ids: {given})", stacklevel=3
        )
        return ()
    return dev.resolve_all(given)


def _gather_mode(gather: str) -> _GatherMode:
    try:
        return _GatherMode(gather)
    except ValueError as error:
        allowed = ", ".join(repr(mode.value) for mode in _GatherMode)
        raise StructureError(f"unknown way to gather (gather: {gather!r}, allowed: {allowed})") from error


def _count_rows(arguments: Any, dim: int) -> int:
    """How many rows a replica got: the size of its first tensor."""
    return next((leaf.size(dim) for leaf in tree.leaves(arguments) if isinstance(leaf, torch.Tensor)), 1)
