"""DTensors under data parallelism: each rank averages the gradient of its local tensor.

Note [Gradients in their parameters' placements]. Tensor parallelism leaves gradients in whatever placements
came out of backward: partial sums for a replicated parameter (a norm under sequence parallelism), a full
gradient for a sharded one (an embedding). Of two data-parallel ranks one may not have used the parameter, so
it does not know the other's placements; and a full gradient does not fit where a shard goes. So each gradient
is redistributed to its parameter's placements when it arrives, which is in the same order on all ranks that
hold the parameter. From then on its local tensor is averaged like any other tensor. torch's own way to
combine the two kinds of parallelism does the same in the backward of ``from_local``.

torch keeps DTensor beside its collectives, and importing it takes most of a second. Here it is never imported
first: while nobody has, no tensor is one.
"""

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from paceline.tensors.part_parameter import PartParameter
from paceline.torch_private import (
    AsyncCollectiveTensor,
    cdata_of,
    grad_hooks_of,
    local_tensor_of,
    renew_grad_hooks,
    spec_of,
    version_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@functools.cache
def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def is_dtensor(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether the tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    # A module that is being imported has no such class yet.
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, with the same memory; any other tensor itself."""
    return _waited(local_tensor_of(tensor)) if is_dtensor(tensor) else tensor


def describe_parts(tensor: Tensor) -> str:
    """A DTensor's mesh and placements as text, equal on ranks that hold the same part of it."""
    if not is_dtensor(tensor):
        return ""
    mesh, placements = tensor.device_mesh, tensor.placements
    here = zip(mesh.get_coordinate() or (), placements, strict=False)
    part = [0 if placement.is_replicate() else at for at, placement in here]
    return (
        f", part {part} of {list(tensor.shape)} on a mesh of {list(mesh.shape)}, "
        f"placements {list(placements)}"
    )


def ranks_with_other_parts(tensor: Tensor) -> set[int]:
    """The global ranks along those dimensions of a DTensor's mesh over which it is not replicated.

    This rank is among them. The set is empty for any other tensor.
    """
    found: set[int] = set()
    if is_dtensor(tensor) and (here := tensor.device_mesh.get_coordinate()) is not None:
        for dimension, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                line = [slice(None) if each == dimension else at for each, at in enumerate(here)]
                found.update(tensor.device_mesh.mesh[tuple(line)].tolist())
    return found


class LocalParameter:
    """The local tensor of a DTensor parameter, with the attributes of a parameter that a reducer uses.

    Shape and gradient are those of the local tensor; what is set as gradient becomes the local tensor of the
    parameter's gradient. So buckets and the reducer work as they do on any parameter.

    Args:
        parameter: the DTensor parameter.
    """

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self._hooked_at = 0

    def detach(self) -> Tensor:
        """The local tensor, detached."""
        return local_of(self.parameter).detach()

    @property
    def shape(self) -> torch.Size:
        """The shape of the local tensor."""
        return local_of(self.parameter).shape

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the parameter."""
        return self.parameter.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameter."""
        return self.parameter.device

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter requires a gradient."""
        return self.parameter.requires_grad

    @property
    def grad(self) -> Tensor | None:
        """The local tensor of the gradient."""
        grad = self._redistributed()
        if grad is None:
            return None
        local = local_of(grad)
        # Under create_graph a second backward needs it unchanged, which the local tensor does not show.
        return local.clone() if grad.requires_grad else local

    @grad.setter
    def grad(self, local: Tensor | None) -> None:
        whole: Any = self.parameter
        if local is not None:
            # A copy of the spec, because torch may change a spec in place.
            local = _dtensor()(local, copy.copy(spec_of(whole)), requires_grad=False)
        whole.grad = local

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call ``hook`` with this object after a gradient was accumulated."""

        def on_accumulated(_: Tensor) -> None:
            self._redistributed()
            hook(self)

        self._hooked_at = cdata_of(self.parameter)
        handle: RemovableHandle = self.parameter.register_post_accumulate_grad_hook(on_accumulated)
        return handle

    @property
    def _post_accumulate_grad_hooks(self) -> Any:
        return grad_hooks_of(self.parameter)

    def keep_hooks(self) -> None:
        """Keep hooks working after the module was converted to another data type or device.

        For a DTensor torch then swaps the C++ tensor behind the parameter, where autograd looks for hooks.
        Users' hooks are lost by this as well.
        """
        if self._hooked_at and cdata_of(self.parameter) != self._hooked_at:
            self._hooked_at = cdata_of(self.parameter)
            renew_grad_hooks(self.parameter)

    def _redistributed(self) -> Tensor | None:
        """The gradient in the parameter's placements; see the Note at the top."""
        whole: Any = self.parameter
        grad: Any = whole.grad
        if grad is not None and grad.placements != whole.placements:
            grad = whole.grad = grad.redistribute(placements=whole.placements)
        return grad  # type: ignore[no-any-return]


# A parameter as the reducer sees it: the parameter itself, the local tensor of a DTensor parameter, or a
# parameter whose average goes to parts of it.
Trained = Parameter | LocalParameter | PartParameter


def local_parameter(parameter: Parameter) -> Trained:
    """The parameter as the reducer sees it."""
    if not is_dtensor(parameter):
        return parameter
    whole: Any = parameter
    return LocalParameter(whole)


def whole_parameter(trained: Trained) -> Parameter:
    """The module's parameter, as its users see it."""
    return trained if isinstance(trained, Parameter) else trained.parameter


def grad_version(trained: Trained) -> int:
    """The version of a gradient, which the local tensor of a DTensor does not share."""
    grad = whole_parameter(trained).grad
    return 0 if grad is None else version_of(grad)


def sync_grad_hook(grad: Any, *, device_handle: Any = None, compute_stream: Any = None) -> Any:
    """Wait for a gradient that a collective has not finished yet; any other gradient is returned as it is.

    Args:
        grad: the gradient.
        device_handle: the device's module, such as torch.cuda, if there is a stream.
        compute_stream: the stream that waits; the current one by default.
    """
    if not isinstance(grad, AsyncCollectiveTensor):
        return grad
    on_stream = contextlib.nullcontext() if compute_stream is None else device_handle.stream(compute_stream)
    with on_stream:
        return _waited(grad)


def _flatten_tensor(tensor: Tensor) -> tuple[Tensor, Any]:
    """The local tensor of a DTensor, set to require a gradient, and its spec; else the tensor and None."""
    if not is_dtensor(tensor):
        return tensor, None
    return local_tensor_of(tensor).requires_grad_(), spec_of(tensor)


def _unflatten_tensor(
    tensor: Tensor, spec: Any, *, device_handle: Any = None, compute_stream: Any = None
) -> "DTensor":
    """The DTensor of a local tensor; gradients flow back, and those of a collective are waited for."""
    whole: DTensor = _dtensor().from_local(
        tensor, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
    if tensor.requires_grad:
        wait = functools.partial(sync_grad_hook, device_handle=device_handle, compute_stream=compute_stream)
        tensor.register_hook(wait)
    return whole


def _waited(tensor: Any) -> Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor  # type: ignore[no-any-return]
