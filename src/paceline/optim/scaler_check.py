"""Has torch's GradScaler see on every rank what it finds on any of them.

A GradScaler looks for infinities in the gradients that this rank has, and decides by itself whether to step.
With parts, only the rank that has an infinite one would skip the step. So each rank has one more parameter,
without elements, as the last one: the scaler passes its gradient to the function that looks, which then asks
the other ranks.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ShardError
from paceline.tensors.part_parameter import HARMLESS
from paceline.torch_private import unscale_and_check

# No parameter that a scaler works on has it, so it is looked at by itself, and last.
_DTYPE = torch.complex128


class _Asking(Tensor):
    """A gradient without elements."""

    ask: Callable[[float], Tensor]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Ask the other ranks, and refuse what needs all gradients."""
        name = getattr(function, "__name__", str(function))
        if name in HARMLESS:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if function is not unscale_and_check:
            raise ShardError(
                f"param_groups has this rank's parts of the gradients, so {name}() of all of them would be "
                "wrong: clip by the optimizer's clip_grad_norm_. For what treats each element by itself, "
                "leave out the last parameter, which has no elements"
            )
        (asking,), found, _ = args
        found.copy_(asking.ask(found.item()).max())
        return None


class ScalerCheck:
    """The parameter that asks.

    Args:
        ask: gives the numbers of all ranks.

    Attributes:
        parameter: to be the last one of the last parameter group.
    """

    def __init__(self, ask: Callable[[float], Tensor]) -> None:
        self.parameter = torch.empty(0, dtype=_DTYPE)
        grad: Any = torch.empty(0, dtype=_DTYPE).as_subclass(_Asking)
        grad.ask = ask
        self._grad = grad
        self.parameter.grad = grad

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """While entered, the parameter has no gradient, so no optimizer steps it."""
        self.parameter.grad = None
        try:
            yield
        finally:
            self.parameter.grad = self._grad
