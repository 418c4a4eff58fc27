"""What hooks remember of each parameter from step to step, above all what compression has lost.

Note [Error feedback]. What a rank sends is its gradient plus what is remembered, and what does not fit into
the message is remembered instead. Summed over steps, nothing is lost but what is remembered at the end. That
holds only if a rank forgets what it remembered when the message has really been applied: a step that is
lost, or a parameter that no rank used and whose average is thrown away, leaves the memory as it was.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary


class Notes:
    """A tensor for each parameter, to outlive plan and group; parameters that are gone are forgotten."""

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()
        self._new = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self) -> None:
        """A step begins: what was put in a step that did not end well is void."""
        self._new = WeakTensorKeyDictionary()

    def put(self, parameter: Parameter, note: Tensor) -> None:
        """Take down something that counts once the step has ended well."""
        self._new[parameter] = note

    def get(self, parameter: Parameter) -> Tensor | None:
        """What was put last: in this step, in which a bucket may be reduced twice, or in earlier ones."""
        note: Tensor | None = self._new.get(parameter)
        return self._kept.get(parameter) if note is None else note

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int]) -> None:
        """The step has ended well, for the parameters that some rank used."""
        if not len(self._new):
            return
        for parameter, count in zip(parameters, used, strict=True):
            if count and (note := self._new.get(parameter)) is not None:
                self._kept[parameter] = note
        self._new = WeakTensorKeyDictionary()


class Memory:
    """Losses, as parts of the gradient itself: under a weight they are multiplied by it like the gradient.

    Attributes:
        weighed: whether this step's gradients are multiplied by weights.
    """

    def __init__(self) -> None:
        self.losses = Notes()
        self.weighed = False
        self._weight = 1.0

    def begin(self, weight: float | None) -> None:
        """A step begins."""
        self.losses.begin()
        self.weighed = weight is not None
        self._weight = 1.0 if weight is None else weight

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int]) -> None:
        """A step has ended well."""
        self.losses.finish(parameters, used)

    def add_to(self, values: Sequence[Tensor], parameters: Sequence[Parameter]) -> None:
        """Add what is remembered to gradients, each flat and in the type that is calculated in."""
        found = [
            (value, self._recall(parameter, value))
            for value, parameter in zip(values, parameters, strict=True)
        ]
        pairs = [(value, loss) for value, loss in found if loss is not None]
        if pairs and self._weight:
            torch._foreach_add_(
                [value for value, _ in pairs], [loss for _, loss in pairs], alpha=self._weight
            )

    def note(self, losses: Sequence[Tensor], parameters: Sequence[Parameter]) -> None:
        """Take down what was not sent this time."""
        if not self._weight:  # this rank sent nothing: there is nothing new
            return
        if self._weight != 1:
            torch._foreach_div_([*losses], self._weight)
        # A sum is finite if all its parts are, but for a few that only look bad; elements are looked at then.
        if not torch.stack([loss.sum() for loss in losses]).isfinite().all():
            losses = [*map(self._sound, losses, parameters)]
        for loss, parameter in zip(losses, parameters, strict=True):
            self.losses.put(parameter, loss)

    def _recall(self, parameter: Parameter, like: Tensor) -> Tensor | None:
        loss = self.losses.get(parameter)
        if loss is None or (loss.shape, loss.dtype, loss.device) != (like.shape, like.dtype, like.device):
            return None  # there is none, or the module was converted
        return loss

    def _sound(self, loss: Tensor, parameter: Parameter) -> Tensor:
        """A loss without what is not finite: one bad gradient must not spoil all that come."""
        before = self._recall(parameter, loss)
        return torch.where(loss.isfinite(), loss, 0.0 if before is None else before)
