"""DataParallel and data_parallel: one process, a replica of the module a device."""

import enum
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import nn

from paceline.data_parallel import backward, joins
from paceline.data_parallel.parallel_apply import parallel_apply
from paceline.data_parallel.replicate import Blueprint, Replicas, check_home
from paceline.data_parallel.scatter_gather import gather, gather_with, scatter_kwargs
from paceline.errors import StructureError
from paceline.tensors import devices as dev
from paceline.tensors import tree
from paceline.tensors.devices import DeviceLike

M = TypeVar("M", bound=nn.Module)


class _Gather(enum.Enum):
    CAT = "cat"
    STACK = "stack"
    MEAN = "mean"
    LIST = "list"


class DataParallel(nn.DataParallel[M], Generic[M]):
    """Splits a batch over devices, runs a replica of the module on each, and joins the outputs.

    Gradients of all replicas sum into the module. CPU replicas share torch's one random generator, so that
    activation checkpointing around dropout recomputes other masks than forward drew.

    It is an ``nn.DataParallel`` by type only, so that ``isinstance`` checks in other code hold.

    Args:
        module: the module; its parameters and buffers must be on the first device.
        device_ids: devices by index of the current accelerator, by name or as ``torch.device``; one may come
            several times (``["cpu", "cpu"]`` runs two replicas in two threads). All accelerators by default;
            on a machine without one the module is then called as it is.
        output_device: where the joined output goes; the first device by default.
        dim: the dimension along which tensors are split and joined.
        gather: how the replicas' output tensors become one. ``"cat"`` concatenates them. The others suit a
            module that returns a loss, and keep large outputs off the output device: ``"stack"`` puts them
            side by side along a new first dimension; ``"mean"`` weighs each by its replica's number of rows,
            so that a mean over each replica's rows becomes the mean over the batch; ``"list"`` joins
            nothing and returns one output a replica, each on its own device.
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
        self._policy = _policy(gather)
        self._blueprint: Blueprint[M] | None = None
        self.module = module
        self.dim = dim
        devices = _devices(device_ids)
        self.device_ids: list[Any] = [*map(dev.as_torch_names, devices)]
        self.src_device_obj = devices[0] if devices else dev.CPU
        output = self.src_device_obj
        if devices and output_device is not None:  # without devices, as torch, nothing is made of it
            output = dev.CPU if output_device == -1 else dev.resolve(output_device)
        self.output_device: Any = dev.as_torch_names(output)
        if len(devices) == 1:
            self.module.to(devices[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Scatter, replicate, apply in parallel, gather."""
        if not self.device_ids:
            return self._alone(self.module(*inputs, **kwargs))
        pieces, keywords = self.scatter(inputs, kwargs, self.device_ids)
        if not pieces and not keywords:
            pieces, keywords = ((),), ({},)
        if len(self.device_ids) == 1:
            check_home(self.module, self.src_device_obj)
            return self._alone(self.module(*pieces[0], **keywords[0]))
        outputs = self._outputs(pieces, keywords)
        if self._policy is _Gather.CAT:
            return self.gather(outputs, self.output_device)
        return self._joined(outputs, [_rows(given, self.dim) for given in zip(pieces, keywords, strict=True)])

    def replicate(self, module: M, device_ids: Sequence[DeviceLike]) -> list[M]:
        """One replica a device, with the module's current values."""
        blueprint = self._current_blueprint() if module is self.module else Blueprint(module)
        devices = dev.resolve_all(device_ids)
        return blueprint.stamp(devices, detach=not torch.is_grad_enabled(), home=self.src_device_obj)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]
    ) -> Any:
        """The arguments of each replica."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def parallel_apply(self, replicas: Sequence[M], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """The output of each replica."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """All replicas' outputs as one."""
        return gather(outputs, output_device, dim=self.dim)

    def __getstate__(self) -> dict[str, Any]:
        # The blueprint knows this very module; a copy draws its own.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_blueprint": None}

    def _outputs(self, pieces: Sequence[Any], keywords: Sequence[Any]) -> Sequence[Any]:
        replicas = self.replicate(self.module, self.device_ids[: len(pieces)])
        if not isinstance(replicas, Replicas) or not self._runs_backward_in_threads():
            return self.parallel_apply(replicas, pieces, keywords)
        arguments = [*map(backward.Arguments.of, zip(pieces, keywords, strict=True))]
        outputs = self.parallel_apply(replicas, *zip(*(own.given for own in arguments), strict=True))
        for own in arguments:
            own.tell_of_writes()
        return backward.together(outputs, replicas.copies, arguments)

    def _current_blueprint(self) -> Blueprint[M]:
        blueprint = self._blueprint
        if blueprint is None or not blueprint.fits(self.module):
            blueprint = self._blueprint = Blueprint(self.module)
        return blueprint

    def _runs_backward_in_threads(self) -> bool:
        # On accelerators the engine has a thread a device already, and to wait inside one would stop it.
        return backward.is_possible() and all(device == dev.CPU for device in self.device_ids)

    def _alone(self, output: Any) -> Any:
        """The output of the module itself, as the policy wants it."""
        return output if self._policy is _Gather.CAT else self._joined([output], [1])

    def _joined(self, outputs: Sequence[Any], rows: Sequence[int]) -> Any:
        if self._policy is _Gather.LIST:
            return list(outputs)
        device = dev.resolve(self.output_device)
        join = joins.stack(device) if self._policy is _Gather.STACK else joins.mean(device, rows)
        return gather_with(outputs, join)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Iterable[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call the module once on a batch split over devices; see DataParallel for the arguments.

    Inputs that are not a tuple are the only argument, and None means no argument.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    devices = _devices(device_ids)
    if not devices:
        return module(*inputs, **(module_kwargs or {}))
    # Checked here, because a wrapper of one device would move the module instead.
    check_home(module, devices[0])
    return DataParallel(module, devices, output_device, dim)(*inputs, **(module_kwargs or {}))


def _devices(device_ids: Iterable[DeviceLike] | None) -> tuple[torch.device, ...]:
    """The devices to use; none means that the module is called as it is."""
    if device_ids is None:
        # As torch, which leaves MPS out.
        return tuple(device for device in dev.all_accelerators() if device.type != "mps")
    given = [*device_ids]
    if given and dev.accelerator_type() is None and all(type(device) is int for device in given):
        # As torch: a script written for accelerators runs on a machine without.
        warnings.warn(
            f"no accelerator here: the module is called as it is (device_ids: {given})", stacklevel=3
        )
        return ()
    return dev.resolve_all(given)


def _policy(gather: str) -> _Gather:
    try:
        return _Gather(gather)
    except ValueError as error:
        allowed = ", ".join(repr(policy.value) for policy in _Gather)
        raise StructureError(f"unknown way to gather (gather: {gather!r}, allowed: {allowed})") from error


def _rows(given: Any, dim: int) -> int:
    """How many rows a replica got: the size of its first tensor."""
    return next((leaf.size(dim) for leaf in tree.leaves(given) if isinstance(leaf, torch.Tensor)), 1)
