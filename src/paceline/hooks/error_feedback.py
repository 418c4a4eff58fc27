"""What hooks keep for each parameter from step to step, above all the residuals that compression leaves out.

Note [Error feedback]. A rank sends its gradient plus the residual of earlier steps; what does not fit into
the message is the new residual. Summed over steps, nothing is lost but the residual at the end. That holds
only if a residual is replaced when its message was really applied: a step that is lost, or a parameter that
no rank used and whose average is thrown away, leaves the residual as it was.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.torch_private import foreach_add_, foreach_div_, foreach_mul_

# A rank with an eighth of the mean weight still passes on its whole residual of the average.
_MAX_RATIO = 8


class ParameterTensors:
    """A tensor per parameter, which outlives plan and group; parameters that are gone are forgotten."""

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()
        self._new = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self) -> None:
        """A step begins: forget what was put in a step that did not end well."""
        self._new = WeakTensorKeyDictionary()

    def put(self, parameter: Parameter, tensor: Tensor) -> None:
        """Keep a tensor, once the step has ended well."""
        self._new[parameter] = tensor

    def get(self, parameter: Parameter) -> Tensor | None:
        """What was put last: in this step, in which a bucket may be reduced twice, or in earlier ones."""
        new = self.new(parameter)
        return self._kept.get(parameter) if new is None else new

    def new(self, parameter: Parameter) -> Tensor | None:
        """What was put in this step."""
        new: Tensor | None = self._new.get(parameter)
        return new

    def scale_new(self, factor: float) -> None:
        """Multiply what was put in this step."""
        if len(self._new):
            foreach_mul_([*self._new.values()], factor)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int]) -> None:
        """The step has ended well: keep what was put for parameters that some rank used."""
        if not len(self._new):
            return
        for parameter, count in zip(parameters, used, strict=True):
            if count and (new := self._new.get(parameter)) is not None:
                self._kept[parameter] = new
        self._new = WeakTensorKeyDictionary()


class Residuals:
    """Residuals of this rank's own gradients; ``weigh`` multiplies them as it does gradients."""

    def __init__(self) -> None:
        self.kept = ParameterTensors()
        self._weight = 1.0

    def meet(self, ranks: int) -> None:
        """The number of ranks from now on."""

    def begin(self, weight: float | None) -> None:
        """A step begins."""
        self.kept.begin()
        self._weight = 1.0 if weight is None else weight

    def finish(
        self,
        parameters: Sequence[Parameter],
        used: Sequence[int],
        total: float | None,  # noqa: ARG002  # others need it
    ) -> None:
        """A step has ended well; ``total`` is the sum of the ranks' weights."""
        self.kept.finish(parameters, used)

    def add_to(self, values: Sequence[Tensor], parameters: Sequence[Parameter]) -> None:
        """Add residuals to gradients, each flat and in the type of the calculation."""
        found = [
            (value, self._find(parameter, value)) for value, parameter in zip(values, parameters, strict=True)
        ]
        pairs = [(value, residual) for value, residual in found if residual is not None]
        if pairs and self._weight:
            foreach_add_(
                [value for value, _ in pairs], [residual for _, residual in pairs], alpha=self._weight
            )

    def hand_over(self, values: Sequence[Tensor], parameters: Sequence[Parameter]) -> None:
        """Add residuals to gradients that are sent whole; a second reduction of this step does not again."""
        self.add_to(values, parameters)
        for value, parameter in zip(values, parameters, strict=True):
            self.kept.put(parameter, value.new_empty(0))  # fits no gradient

    def keep(self, residuals: Sequence[Tensor], parameters: Sequence[Parameter]) -> None:
        """Keep what was not sent this time."""
        if not self._weight:  # this rank sent nothing: there is nothing new
            return
        residuals = self._for_a_weight_of_one(residuals)
        # Cheap test first: if a sum is finite, so are its elements. Only otherwise look at the elements.
        if not torch.stack([residual.sum() for residual in residuals]).isfinite().all():
            residuals = [*map(self._finite, residuals, parameters)]
        for residual, parameter in zip(residuals, parameters, strict=True):
            self.kept.put(parameter, residual)

    def _for_a_weight_of_one(self, residuals: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._weight != 1:
            foreach_div_([*residuals], self._weight)
        return residuals

    def _find(self, parameter: Parameter, like: Tensor) -> Tensor | None:
        found = self.kept.get(parameter)
        if found is None or (found.shape, found.dtype, found.device) != (like.shape, like.dtype, like.device):
            return None  # there is none, or the module was converted
        return found

    def _finite(self, residual: Tensor, parameter: Parameter) -> Tensor:
        """A residual without values that are not finite: one bad gradient must not spoil all that follow."""
        before = self._find(parameter, residual)
        return torch.where(residual.isfinite(), residual, 0.0 if before is None else before)


class AverageResiduals(Residuals):
    """Residuals of the average, of which each rank keeps a part: what compressing the average left out.

    The sum of all weights is known only when a step has ended. Until then the last total stands for it, less
    if this rank's own weight has shrunk, and at most a multiple of that weight: so that a step of few samples
    does not get the residuals of many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranks = 1
        self._own = 1.0
        self._total = math.inf

    def meet(self, ranks: int) -> None:
        """The number of ranks from now on."""
        self._ranks = ranks

    def begin(self, weight: float | None) -> None:
        """A step begins."""
        before, self._own = self._own, 1.0 if weight is None else weight
        shrunk = self._total * min(1.0, self._own / before) if before else self._total
        super().begin(min(shrunk, _MAX_RATIO * self._ranks * self._own) if self._own else 0.0)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """A step has ended well: now the total weight of its residuals is known."""
        self._total = self._ranks if total is None else total
        if self._total:
            self.kept.scale_new(1 / self._total)
        super().finish(parameters, used, total)

    def keep(self, residuals: Sequence[Tensor], parameters: Sequence[Parameter]) -> None:
        """Keep what was not sent this time, in addition to what a first reduction of this step left out."""
        before = [self.kept.new(parameter) for parameter in parameters]
        sums = [new if old is None else old + new for new, old in zip(residuals, before, strict=True)]
        super().keep(sums, parameters)

    def _find(self, parameter: Parameter, like: Tensor) -> Tensor | None:
        # What a first reduction of this step has sent is not sent again; its own residual has no total yet.
        return None if self.kept.new(parameter) is not None else super()._find(parameter, like)

    def _for_a_weight_of_one(self, residuals: Sequence[Tensor]) -> Sequence[Tensor]:
        return residuals  # not before the total is known
