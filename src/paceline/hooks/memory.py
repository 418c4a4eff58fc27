"""What compression has lost of each parameter's gradient, to be added to the next one.

Note [Error feedback]. What a rank sends is its gradient plus what is remembered, and what does not fit into
the message is remembered instead. Summed over steps, nothing is lost but what is remembered at the end. That
holds only if a rank forgets what it remembered when the message has really been applied: a step that is
lost, or a parameter that no rank used and whose average is thrown away, leaves the memory as it was.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary


class Memory:
    """Losses by parameter, so that they outlive plan and group; a parameter that is gone is forgotten.

    Losses are those of the gradient itself: under a weight they are multiplied by it like the gradient.
    """

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()
        self._new = WeakTensorKeyDictionary()
        self._weight = 1.0

    def begin(self, weight: float | None) -> None:
        """A step begins: what was noted in a step that did not end well is void."""
        self._new = WeakTensorKeyDictionary()
        self._weight = 1.0 if weight is None else weight

    def add_to(self, values: Sequence[Tensor], parameters: Sequence[Parameter]) -> None:
        """Add what is remembered to gradients, each flat and in the type that is calculated in."""
        into: list[Tensor] = []
        lost: list[Tensor] = []
        for value, parameter in zip(values, parameters, strict=True):
            loss = self._recall(parameter, value)
            if loss is not None:
                into.append(value)
                lost.append(loss)
        if into and self._weight:
            torch._foreach_add_(into, lost, alpha=self._weight)

    def note(self, losses: Sequence[Tensor], parameters: Sequence[Parameter]) -> None:
        """Take down what was not sent this time."""
        if not self._weight:  # this rank sent nothing: there is nothing new
            return
        if self._weight != 1:
            torch._foreach_div_([*losses], self._weight)
        if not torch.stack(torch._foreach_norm([*losses], math.inf)).isfinite().all():
            losses = [*map(self._sound, losses, parameters)]
        for loss, parameter in zip(losses, parameters, strict=True):
            self._new[parameter] = loss

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int]) -> None:
        """The step has ended well."""
        if not len(self._new):
            return
        for parameter, count in zip(parameters, used, strict=True):
            if count and parameter in self._new:
                self._kept[parameter] = self._new[parameter]
        self._new = WeakTensorKeyDictionary()

    def _recall(self, parameter: Parameter, like: Tensor) -> Tensor | None:
        # What is new first: a bucket may be reduced twice in a step.
        loss: Tensor | None = self._new.get(parameter)
        if loss is None:
            loss = self._kept.get(parameter)
        fits = loss is not None and (loss.shape, loss.dtype, loss.device) == (
            like.shape,
            like.dtype,
            like.device,
        )
        return loss if fits else None  # the module may have been converted

    def _sound(self, loss: Tensor, parameter: Parameter) -> Tensor:
        """A loss without what is not finite: one bad gradient must not spoil all that come."""
        before = self._recall(parameter, loss)
        return torch.where(loss.isfinite(), loss, 0.0 if before is None else before)
