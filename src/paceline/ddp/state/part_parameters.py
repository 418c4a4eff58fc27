"""A module's parameters, of whose averages each rank gets parts."""

from collections.abc import Iterable

from paceline.ddp.state.parameters import ReducedParameters
from paceline.tensors.part_parameter import PartParameter


class PartParameters(ReducedParameters):
    """A module's parameters, of whose averages this rank gets parts; each list is by slot.

    Args:
        whole: the same parameters, before.
    """

    def __init__(self, whole: ReducedParameters) -> None:
        self.slots = whole.slots
        self.whole = whole.whole
        self.trainable = whole.trainable
        self._parts = []
        self.cut: list[PartParameter] = [PartParameter(each) for each in whole.whole]
        self.local = [*self.cut]

    def begin_backward(self) -> None:
        """A backward begins."""
        for each in self.cut:
            each.begin()

    def end_step(self) -> None:
        """A step has ended well."""
        for each in self.cut:
            each.settle()

    def clear_grads(self, slots: Iterable[int] | None = None) -> None:
        """Forget gradients, of all parameters or of some."""
        for slot in range(len(self.cut)) if slots is None else slots:
            self.cut[slot].drop()
