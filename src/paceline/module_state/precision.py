"""Mixed precision: low-precision parameters for forward and backward, full ones for the optimizer.

Note [Two copies]. A parameter's full-precision values stay in ``_fp_param``. Before forward ``.data`` becomes
a low-precision copy, ``_mp_param``, whose memory is there only until the step has ended. Both names are
torch's, and so are the rules: what is swapped is the tensor's data, so that autograd and optimizers see one
parameter.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import OptionError
from paceline.tensors import tree
from paceline.tensors.dtensor import is_dtensor


@dataclass(frozen=True)
class MixedPrecision:
    """What is computed and sent in which data type; None leaves it as it is.

    Attributes:
        param_dtype: of parameters in forward and backward, and of floating-point inputs.
        reduce_dtype: in which gradients are averaged; ``param_dtype`` if None.
        buffer_dtype: of module buffers, from the moment the module is wrapped.
        cast_forward_inputs: whether floating-point inputs are cast to ``param_dtype``.
        keep_low_precision_grads: leave gradients in the type in which they were averaged, for optimizers that
            take them so.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    keep_low_precision_grads: bool = False


class Precision:
    """Swaps a module's parameters between two precisions.

    Args:
        policy: a ``MixedPrecision``, or one of torch's policies, which have some or all of its attributes.
        module: whose parameters and buffers.
        ignored: names to leave alone.

    Attributes:
        reduce_dtype: in which gradients travel; None for each parameter's own.
    """

    def __init__(self, policy: Any, module: nn.Module, ignored: Collection[str]) -> None:
        self._policy = _read(policy)
        self.reduce_dtype = self._policy.reduce_dtype or self._policy.param_dtype
        self._parameters = [
            parameter
            for name, parameter in module.named_parameters()
            if name not in ignored and parameter.is_floating_point()
        ]
        if any(map(is_dtensor, self._parameters)):
            raise OptionError(
                "mixed precision is for parameters that a rank holds as a whole, not for DTensors"
            )
        self._is_low = False
        self._cast_buffers(module, ignored)
        self._note_full()

    @contextlib.contextmanager
    def lowered(self, inputs: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Put low-precision copies in the parameters' place; gives the inputs in that precision.

        They stay for a backward to come: until the step is synced or lost, or no backward can follow.
        """
        was_low, dtype = self._is_low, self._policy.param_dtype
        if dtype is not None and not was_low:
            self._lower(dtype)
        if dtype is not None and self._policy.cast_forward_inputs:
            inputs, kwargs = tree.map_leaves(lambda leaf: _cast(leaf, dtype), (inputs, kwargs))
        try:
            yield inputs, kwargs
        except BaseException:
            self.restore()
            raise
        if not was_low and not torch.is_grad_enabled():
            self.restore()

    def restore(self) -> None:
        """Put the full-precision values back."""
        if self._is_low:
            for parameter in self._parameters:
                parameter.data = parameter._fp_param  # type: ignore[attr-defined]
                parameter._mp_param.untyped_storage().resize_(0)  # type: ignore[attr-defined]
            self._is_low = False

    @contextlib.contextmanager
    def returning(self) -> Iterator[None]:
        """Hand out gradients in here: to full-precision parameters, or before they are that again."""
        if not self._policy.keep_low_precision_grads:
            self.restore()
        try:
            yield
        finally:
            self.restore()

    def _lower(self, dtype: torch.dtype) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                # Users may have given it other data since: loaded, moved or assigned.
                parameter._fp_param = parameter.data  # type: ignore[attr-defined]
                low = parameter._mp_param  # type: ignore[attr-defined]
                if low.device != parameter.device or low.shape != parameter.shape:
                    low = parameter._mp_param = torch.empty_like(parameter, dtype=dtype)  # type: ignore[attr-defined]
                low.untyped_storage().resize_(low.numel() * low.element_size())
                low.copy_(parameter.data)
                parameter.data = low
        self._is_low = True

    def _note_full(self) -> None:
        for parameter in self._parameters:
            if not hasattr(parameter, "_mp_param"):
                low = torch.empty_like(
                    parameter, dtype=self._policy.param_dtype or parameter.dtype, requires_grad=False
                )
                low.untyped_storage().resize_(0)
                parameter._mp_param = low  # type: ignore[attr-defined]
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]

    def _cast_buffers(self, module: nn.Module, ignored: Collection[str]) -> None:
        for name, buffer in module.named_buffers():
            if name not in ignored and self._policy.buffer_dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.to(self._policy.buffer_dtype)


def _read(policy: Any) -> MixedPrecision:
    """Our own policy, from whatever has its attributes."""
    default = MixedPrecision()
    named = {name: getattr(policy, name, getattr(default, name)) for name in MixedPrecision.__annotations__}
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = named[name]
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise OptionError(f"mixed precision needs floating-point types ({name}: {dtype!r})")
    return MixedPrecision(**named)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
