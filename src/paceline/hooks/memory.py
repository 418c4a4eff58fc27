"""What hooks remember of each parameter from step to step, above all what compression has lost.

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

# A rank with an eighth of the mean weight still passes on all that it remembers of everyone's average.
_TRUST = 8


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
        note = self.new(parameter)
        return self._kept.get(parameter) if note is None else note

    def new(self, parameter: Parameter) -> Tensor | None:
        """What was put in this step."""
        note: Tensor | None = self._new.get(parameter)
        return note

    def scale_new(self, factor: float) -> None:
        """Multiply what was put in this step."""
        if len(self._new):
            torch._foreach_mul_([*self._new.values()], factor)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int]) -> None:
        """The step has ended well, for the parameters that some rank used."""
        if not len(self._new):
            return
        for parameter, count in zip(parameters, used, strict=True):
            if count and (note := self._new.get(parameter)) is not None:
                self._kept[parameter] = note
        self._new = WeakTensorKeyDictionary()


class Memory:
    """Losses, as parts of the gradient itself: under a weight they are multiplied by it like the gradient."""

    def __init__(self) -> None:
        self.losses = Notes()
        self._weight = 1.0

    def meet(self, ranks: int) -> None:
        """There are so many ranks from now on."""

    def begin(self, weight: float | None) -> None:
        """A step begins."""
        self.losses.begin()
        self._weight = 1.0 if weight is None else weight

    def finish(
        self,
        parameters: Sequence[Parameter],
        used: Sequence[int],
        total: float | None,  # noqa: ARG002  # others need it
    ) -> None:
        """A step has ended well, in which the ranks' weights added up to a total."""
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
        losses = self._for_a_weight_of_one(losses)
        # A sum is finite if all its parts are, but for a few that only look bad; elements are looked at then.
        if not torch.stack([loss.sum() for loss in losses]).isfinite().all():
            losses = [*map(self._sound, losses, parameters)]
        for loss, parameter in zip(losses, parameters, strict=True):
            self.losses.put(parameter, loss)

    def _for_a_weight_of_one(self, losses: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._weight != 1:
            torch._foreach_div_([*losses], self._weight)
        return losses

    def _recall(self, parameter: Parameter, like: Tensor) -> Tensor | None:
        loss = self.losses.get(parameter)
        if loss is None or (loss.shape, loss.dtype, loss.device) != (like.shape, like.dtype, like.device):
            return None  # there is none, or the module was converted
        return loss

    def _sound(self, loss: Tensor, parameter: Parameter) -> Tensor:
        """A loss without what is not finite: one bad gradient must not spoil all that come."""
        before = self._recall(parameter, loss)
        return torch.where(loss.isfinite(), loss, 0.0 if before is None else before)


class SharedMemory(Memory):
    """Losses of everyone's average, which one rank remembers: parts of a gradient that all ranks have made.

    How much all weights come to is known only when a step has ended. Until then the last total stands for it,
    less where this rank's own weight is less than it was, and no more than a multiple of that: lest a step of
    few samples gets the losses of many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranks = 1
        self._own = 1.0
        self._total = math.inf

    def meet(self, ranks: int) -> None:
        """There are so many ranks from now on."""
        self._ranks = ranks

    def begin(self, weight: float | None) -> None:
        """A step begins."""
        before, self._own = self._own, 1.0 if weight is None else weight
        shrunk = self._total * min(1.0, self._own / before) if before else self._total
        super().begin(min(shrunk, _TRUST * self._ranks * self._own) if self._own else 0.0)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """A step has ended well: what it lost is now known by weight."""
        self._total = self._ranks if total is None else total
        if self._total:
            self.losses.scale_new(1 / self._total)
        super().finish(parameters, used, total)

    def note(self, losses: Sequence[Tensor], parameters: Sequence[Parameter]) -> None:
        """Take down what was not sent this time, in addition to what a first reduction of this step lost."""
        before = [self.losses.new(parameter) for parameter in parameters]
        sums = [loss if old is None else old + loss for loss, old in zip(losses, before, strict=True)]
        super().note(sums, parameters)

    def _recall(self, parameter: Parameter, like: Tensor) -> Tensor | None:
        # What a first reduction of this step has sent is not sent again, and its own loss has no total yet.
        return None if self.losses.new(parameter) is not None else super()._recall(parameter, like)

    def _for_a_weight_of_one(self, losses: Sequence[Tensor]) -> Sequence[Tensor]:
        return losses  # not before the total is known
