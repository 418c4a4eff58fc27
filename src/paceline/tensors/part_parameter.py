"""Gradients of which a rank has its own part only.

Note [Unseen gradients]. After backward, a rank has the average of its own part of each parameter. What else
is in the memory of a gradient has no meaning. If it were ``.grad``, norms and clipping would be wrong without
anybody noticing; if ``.grad`` were None, they would do nothing. So ``.grad`` is a tensor that has no memory,
and raises an error if anything is done to it. Setting it to None drops the parts too.

Note [Parts of an earlier backward]. If nobody has dropped the gradients before the next backward, that one
adds to them. Its bucket needs the memory, so the parts are copied, and added to the new ones in the end.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from paceline.errors import ShardError

# What is asked of a gradient that does not look at its values.
HARMLESS = frozenset(
    {
        "__get__",
        "__set__",
        "dim",
        "size",
        "numel",
        "is_floating_point",
        "is_complex",
        "requires_grad_",
        "detach_",
    }
)


class UnseenGradient(Tensor):
    """Stands for an average of which this rank has a part: see Note [Unseen gradients]."""

    # Weak: a gradient's parameter holds it, where the garbage collector cannot see it.
    owner: "weakref.ref[PartParameter]"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise, unless the values do not matter."""
        name = getattr(function, "__name__", str(function))
        if name in HARMLESS:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if name == "zero_" and hasattr(args[0], "owner"):  # as zero_grad(set_to_none=False) of a module does
            args[0].owner().zero_parts()
            return args[0]
        raise ShardError(
            f"this rank has only its part of the averaged gradient, so {name}() would be wrong: clip by the "
            "clip_grad_norm_ of the optimizer that has the parts, and step no other optimizer. The parts are "
            "the .grad of what is in that optimizer's param_groups"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnseenGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


class PartParameter:
    """A parameter whose average goes to parts of it, with the attributes of a parameter that a bucket uses.

    Args:
        parameter: the parameter.

    Attributes:
        parts: this rank's parts: where in memory each begins, and the tensor whose ``.grad`` it becomes. That
            is the parameter itself, if this rank has all of it.
    """

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.parts: list[tuple[int, Tensor]] = []
        self._earlier: list[Tensor | None] | None = None
        self._shown: Tensor | None = None  # what the last average left as ``.grad``
        nothing: Any = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        self._unseen = nothing.expand(parameter.shape).as_subclass(UnseenGradient)
        self._unseen.owner = weakref.ref(self)

    def detach(self) -> Tensor:
        """The parameter, detached."""
        return self.parameter.detach()

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's data type."""
        return self.parameter.dtype

    @property
    def device(self) -> torch.device:
        """The parameter's device."""
        return self.parameter.device

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter requires a gradient."""
        return self.parameter.requires_grad

    def register_post_accumulate_grad_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have the parameter call the hook."""
        handle: RemovableHandle = self.parameter.register_post_accumulate_grad_hook(hook)
        return handle

    @property
    def grad(self) -> Tensor | None:
        """This rank's own gradient, before it is averaged."""
        return self.parameter.grad

    @grad.setter
    def grad(self, average: Tensor | None) -> None:
        if average is None:
            self.parameter.grad = None
            for _, part in self.parts:
                part.grad = None
            return
        if average is self._unseen:  # as it was before
            self.parameter.grad = average
            return
        self._set([part_of(average, start, part) for start, part in self.parts])
        for (_, part), before in zip(self.parts, self._earlier or (), strict=False):
            if before is not None and part.grad is not None:
                part.grad.add_(before)

    def add_to_grad(self, average: Tensor) -> None:
        """Add what a second reduction brought."""
        for start, part in self.parts:
            if part.grad is not None:
                part.grad.add_(part_of(average, start, part))

    def follow(self) -> bool:
        """Drop the gradients of the parts if the parameter's was dropped; whether it is no other tensor."""
        grad = self.parameter.grad
        if grad is None:
            for _, part in self.parts:
                part.grad = None
        return grad is None or grad is self._shown

    def zero_parts(self) -> None:
        """Set the gradients of the parts to zero."""
        for _, part in self.parts:
            if part.grad is not None:
                part.grad.zero_()

    def begin(self) -> None:
        """A backward begins: keep the parts of an earlier one, unless they were dropped."""
        if self._shown is not None and self.parameter.grad is self._shown:
            self._earlier = [None if part.grad is None else part.grad.clone() for _, part in self.parts]
            self.parameter.grad = None
        self._shown = None
        for _, part in self.parts:
            if part is not self.parameter:
                part.grad = None

    def settle(self) -> None:
        """A step has ended: a gradient that it did not bring is the earlier one."""
        if self._earlier is not None and self.parameter.grad is None:
            self._set(self._earlier)
        self._earlier = None

    def drop(self) -> None:
        """Forget all gradients."""
        self._earlier = None
        self.grad = None

    def _set(self, grads: Sequence[Tensor | None]) -> None:
        for (_, part), grad in zip(self.parts, grads, strict=True):
            part.grad = grad
        if not any(part is self.parameter for _, part in self.parts):
            self.parameter.grad = self._unseen
        self._shown = self.parameter.grad


def part_of(whole: Tensor, start: int, like: Tensor) -> Tensor:
    """A part of a tensor that covers its memory without gaps: from an element on, laid out like another."""
    return whole.as_strided(like.shape, like.stride(), int(whole.storage_offset()) + start)
