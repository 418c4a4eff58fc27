"""Mixed precision: low-precision parameters for forward and backward, full precision everywhere else.

Note [Low-precision copies]. While the module's forward runs, its parameters are replaced by low-precision
copies, made by an operation that autograd records. So the graph keeps the copies that it needs, however often
backward runs over it, and gradients reach the parameters in full precision. While a backward over that graph
runs, the same copies are in place again, for checkpoints that are recomputed. At any other time the module
has its parameters as they are. torch swaps the parameters' data instead, from forward to the end of a
synced backward: whatever is written to them meanwhile is lost.
"""

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.ddp.state.parameters import sparse_parameters
from paceline.errors import OptionError
from paceline.tensors import tree
from paceline.torch_private import parameters_of, renew_flat_weights


@dataclass(frozen=True)
class MixedPrecision:
    """The data types to compute and to communicate in; None keeps what there is.

    Attributes:
        param_dtype: of parameters in forward and backward, and of floating-point inputs.
        reduce_dtype: of gradients while they are averaged; ``param_dtype`` if None.
        buffer_dtype: of module buffers, from the moment the module is wrapped.
        cast_forward_inputs: whether floating-point inputs are cast to ``param_dtype``.
        keep_low_precision_grads: leave averaged gradients in ``param_dtype``, for optimizers that expect it.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    keep_low_precision_grads: bool = False


class Precision:
    """Runs a module in low precision.

    Args:
        policy: a ``MixedPrecision``, or one of torch's policies, which have some or all of its attributes.
        module: whose parameters and buffers.
        ignored: names to leave alone.

    Attributes:
        policy: the data types.
        reduce_dtype: of gradients while they are averaged; None for each parameter's own.
    """

    def __init__(self, policy: Any, module: nn.Module, ignored: Collection[str]) -> None:
        self.policy = _read(policy)
        self.reduce_dtype = self.policy.reduce_dtype or self.policy.param_dtype
        self._module = module
        self._ignored = ignored
        self._cast_buffers()
        self._set_torch_attributes()

    def cast_inputs(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs in the precision that the module computes in."""
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return inputs, kwargs
        return tree.map_leaves(lambda leaf: _cast(leaf, dtype), (inputs, kwargs))  # type: ignore[no-any-return]

    def copies(self) -> "LowPrecisionCopies":
        """New copies of the parameters, with their present values."""
        dtype = self.policy.param_dtype
        if dtype is None:
            return LowPrecisionCopies(self._module, [], {})
        places = self._places()
        sparse = set(sparse_parameters(self._module))
        copies: dict[int, Tensor] = {}
        for _, _, parameter in places:
            if id(parameter) not in copies:
                copies[id(parameter)] = _low_precision_copy(
                    parameter, dtype, is_sparse=id(parameter) in sparse
                )
        return LowPrecisionCopies(self._module, places, copies)

    def cast_grads(self) -> None:
        """Cast gradients to low precision, if the policy says so."""
        if self.policy.keep_low_precision_grads and self.policy.param_dtype is not None:
            for _, _, parameter in self._places():
                if parameter.grad is not None:
                    _set_low_precision_grad(parameter, parameter.grad.to(self.policy.param_dtype))

    def _places(self) -> list[tuple[nn.Module, str, Parameter]]:
        """Layer, name and parameter; a shared parameter is in several layers."""
        found = []
        for prefix, owner in self._module.named_modules():
            for name, parameter in parameters_of(owner).items():
                full = f"{prefix}.{name}" if prefix else name
                if parameter is not None and full not in self._ignored and parameter.is_floating_point():
                    found.append((owner, name, parameter))
        return found

    def _set_torch_attributes(self) -> None:
        """Give parameters the attributes in which torch's tests look up the low and the full data type."""
        for _, _, parameter in self._places():
            low = self.policy.param_dtype or parameter.dtype
            parameter._mp_param = torch.empty(0, dtype=low)  # type: ignore[attr-defined]
            parameter._fp_param = torch.empty(0, dtype=parameter.dtype)  # type: ignore[attr-defined]

    def _cast_buffers(self) -> None:
        dtype = self.policy.buffer_dtype
        for name, buffer in self._module.named_buffers():
            if name not in self._ignored and dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.to(dtype)


class LowPrecisionCopies:
    """The copies of one forward, which take the parameters' place in the module for a while.

    A backward over that forward's graph needs them in place too, where it recomputes a checkpointed part. It
    holds this object, so modules are held weakly: a module may keep its output, and through it the graph.

    Args:
        module: the module.
        places: each layer with a parameter, the parameter's name there, and the parameter.
        copies: by the parameter's id.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[tuple[nn.Module, str, Parameter]],
        copies: Mapping[int, Tensor],
    ) -> None:
        self._recurrent = [weakref.ref(each) for each in module.modules() if isinstance(each, nn.RNNBase)]
        self._places = [(weakref.ref(owner), name, parameter) for owner, name, parameter in places]
        self._copies = copies
        self._installed = False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the copies in the parameters' place."""
        self.install()
        try:
            yield
        finally:
            self.restore()

    def install(self) -> bool:
        """Put the copies in the parameters' place; returns False if they were there already."""
        if self._installed:
            return False
        self._installed = True
        self._set({id(parameter): self._copies[id(parameter)] for _, _, parameter in self._places})
        return True

    def restore(self) -> None:
        """Put the parameters back."""
        self._installed = False
        self._set({id(parameter): parameter for _, _, parameter in self._places})

    def _set(self, tensors: Mapping[int, Any]) -> None:
        for owner, name, parameter in self._places:
            if (layer := owner()) is not None:
                parameters_of(layer)[name] = tensors[id(parameter)]
        for recurrent in self._recurrent:
            if (rnn := recurrent()) is not None:
                renew_flat_weights(rnn)


def _read(policy: Any) -> MixedPrecision:
    """Our own policy, from any object that has some of its attributes."""
    default = MixedPrecision()
    named = {name: getattr(policy, name, getattr(default, name)) for name in MixedPrecision.__annotations__}
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = named[name]
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise OptionError(f"mixed precision needs floating-point data types ({name}: {dtype!r})")
    return MixedPrecision(**named)


class _CastKeepingSparse(torch.autograd.Function):
    """A copy in another data type; unlike ``Tensor.to`` it passes sparse gradients back."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = full.dtype
        return full.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _low_precision_copy(parameter: Parameter, dtype: torch.dtype, *, is_sparse: bool) -> Tensor:
    if is_sparse:
        copy: Tensor = _CastKeepingSparse.apply(parameter, dtype)  # type: ignore[no-untyped-call]
        return copy
    return parameter.to(dtype)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _set_low_precision_grad(parameter: Parameter, grad: Tensor) -> None:
    # torch checks types when a gradient is set, and not when data is.
    full = parameter.data
    parameter.grad = None
    parameter.data = grad
    parameter.grad = grad
    parameter.data = full
