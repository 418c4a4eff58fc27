"""Optimizers that step in backward: as soon as a step's gradients are averaged, and never on local ones."""

from collections.abc import Sequence
from typing import Any

from torch.nn import Parameter

from paceline.comm.torch_distributed import remove_in_backward_hooks


class InBackward:
    """Steps the optimizers that ``_apply_optimizer_in_backward`` gave to parameters.

    torch steps them when a gradient has arrived. Here that is too early: it is one rank's, or one
    micro-batch's. They step once every rank is known to have finished the step, so no rank updates its
    parameters in a step that another has lost.

    Args:
        parameters: the wrapped module's.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._optimized: list[Parameter] = []

    def look(self) -> None:
        """Take over the optimizers of parameters that have some."""
        self._optimized = [each for each in self._parameters if _optimizers(each)]
        remove_in_backward_hooks(self._optimized)

    def step(self) -> None:
        """Step them, and clear the gradients that they have used up."""
        for parameter in self._optimized:
            if parameter.grad is not None:
                for optimizer in _optimizers(parameter):
                    optimizer.step()
                parameter.grad = None


def _optimizers(parameter: Parameter) -> Sequence[Any]:
    return getattr(parameter, "_in_backward_optimizers", ())
