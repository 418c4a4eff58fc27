"""Tensors of which each rank holds a part: what data parallelism does with their local parts.

Note [Gradients in their parameters' placements]. Tensor parallelism leaves gradients in whatever placements
came out of backward: partial sums for a replicated parameter (a norm under sequence parallelism), a whole
gradient for a sharded one (an embedding). Of two data-parallel ranks one may not have used the parameter and
so not know the other's placements, and a whole gradient does not fit where a shard goes. So a gradient is
brought into its parameter's placements when it arrives, which is in the same order on all ranks that share
the parameter; from then on its local part is averaged like any other tensor. torch's way to combine the two
kinds of parallelism does the same in the backward of ``from_local``.

torch keeps these types beside its collectives. They are imported when first asked for: that takes most of
a second, and whoever has opened a process group has paid for it already.

Private parts of torch that are used here, tried with torch 2.13: ``_local_tensor``, ``_spec`` and the
constructor of DTensor; AsyncCollectiveTensor.
"""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@functools.cache
def _types() -> tuple[type, type]:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    return DTensor, AsyncCollectiveTensor


def is_dtensor(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether each rank holds a part of this tensor."""
    return isinstance(tensor, _types()[0])


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, of the same memory; any other tensor itself."""
    return _landed(tensor._local_tensor) if is_dtensor(tensor) else tensor


def describe_parts(tensor: Tensor) -> str:
    """How a DTensor lies over the ranks, in words that are equal on ranks which hold the same part of it."""
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

    This rank is among them. Any other tensor has none.
    """
    found: set[int] = set()
    if is_dtensor(tensor) and (here := tensor.device_mesh.get_coordinate()) is not None:
        for dimension, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                line = [slice(None) if each == dimension else at for each, at in enumerate(here)]
                found.update(tensor.device_mesh.mesh[tuple(line)].tolist())
    return found


class LocalParameter:
    """This rank's part of a DTensor parameter, with what a reducer needs of a parameter.

    Shape and gradient are those of the local part; whatever is set as gradient becomes the local part of
    the parameter's. So buckets and the reducer work as they do on any parameter.

    Args:
        parameter: the DTensor parameter.
    """

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self._hooked_at = 0

    def detach(self) -> Tensor:
        """The local part's values."""
        return local_of(self.parameter).detach()

    @property
    def shape(self) -> torch.Size:
        """The local part's shape."""
        return local_of(self.parameter).shape

    @property
    def dtype(self) -> torch.dtype:
        """As the parameter's."""
        return self.parameter.dtype

    @property
    def device(self) -> torch.device:
        """As the parameter's."""
        return self.parameter.device

    @property
    def requires_grad(self) -> bool:
        """As the parameter's."""
        return self.parameter.requires_grad

    @property
    def grad(self) -> Tensor | None:
        """The local part of the gradient."""
        grad = self._placed()
        if grad is None:
            return None
        local = local_of(grad)
        # create_graph: whoever differentiates again needs it unchanged, and the part does not say so.
        return local.clone() if grad.requires_grad else local

    @grad.setter
    def grad(self, local: Tensor | None) -> None:
        whole: Any = self.parameter
        if local is not None:
            # A spec of its own, because torch may change a spec in place.
            local = _types()[0](local, copy.copy(whole._spec), requires_grad=False)
        whole.grad = local

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Have ``hook`` called with this object when the parameter's gradient was added to."""

        def arrived(_: Tensor) -> None:
            self._placed()
            hook(self)

        self._hooked_at = self.parameter._cdata
        handle: RemovableHandle = self.parameter.register_post_accumulate_grad_hook(arrived)
        return handle

    @property
    def _post_accumulate_grad_hooks(self) -> Any:
        return self.parameter._post_accumulate_grad_hooks

    def keep_hooks(self) -> None:
        """Have hooks called again after the module was converted to another data type or device.

        For a DTensor torch then swaps what is behind the parameter, where autograd looks for hooks; users'
        hooks are lost by it as well.
        """
        if self._hooked_at and self.parameter._cdata != self._hooked_at:
            self._hooked_at = self.parameter._cdata
            self.parameter._post_accumulate_grad_hooks = self.parameter._post_accumulate_grad_hooks

    def _placed(self) -> Tensor | None:
        """The gradient, brought into the parameter's placements: see the Note on top."""
        whole: Any = self.parameter
        grad: Any = whole.grad
        if grad is not None and grad.placements != whole.placements:
            grad = whole.grad = grad.redistribute(placements=whole.placements)
        return grad  # type: ignore[no-any-return]


# What has a gradient that can be averaged.
Trained = Parameter | LocalParameter


def local_parameter(parameter: Parameter) -> Trained:
    """What a reducer works on: the local part of a DTensor parameter, or the parameter itself."""
    if not is_dtensor(parameter):
        return parameter
    whole: Any = parameter
    return LocalParameter(whole)


def whole_parameter(trained: Trained) -> Parameter:
    """The module's parameter behind what a reducer works on."""
    return trained.parameter if isinstance(trained, LocalParameter) else trained


def grad_version(trained: Trained) -> int:
    """How often a gradient was written to in place, which does not show on the local part of a DTensor."""
    grad = whole_parameter(trained).grad
    return 0 if grad is None else grad._version


def sync_grad_hook(grad: Any, *, device_handle: Any = None, compute_stream: Any = None) -> Any:
    """Wait for a gradient that a collective is still making; any other is returned as it is.

    Args:
        grad: the gradient.
        device_handle: the device's module, such as torch.cuda, if there is a stream.
        compute_stream: the stream that is to wait; by default the current one.
    """
    if not isinstance(grad, _types()[1]):
        return grad
    on_stream = contextlib.nullcontext() if compute_stream is None else device_handle.stream(compute_stream)
    with on_stream:
        return _landed(grad)


def _flatten_tensor(tensor: Tensor) -> tuple[Tensor, Any]:
    """The local tensor of a DTensor, set to require a gradient, and its spec; any other itself and None."""
    if not is_dtensor(tensor):
        return tensor, None
    return tensor._local_tensor.requires_grad_(), tensor._spec


def _unflatten_tensor(
    tensor: Tensor, spec: Any, *, device_handle: Any = None, compute_stream: Any = None
) -> "DTensor":
    """The DTensor of a local tensor, to which gradients flow back; those of a collective are waited for."""
    kind: Any = _types()[0]
    whole: DTensor = kind.from_local(
        tensor, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
    if tensor.requires_grad:
        wait = functools.partial(sync_grad_hook, device_handle=device_handle, compute_stream=compute_stream)
        tensor.register_hook(wait)
    return whole


def _landed(tensor: Any) -> Tensor:
    return tensor.wait() if isinstance(tensor, _types()[1]) else tensor  # type: ignore[no-any-return, attr-defined]
