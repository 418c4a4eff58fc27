"""What passes that were not synced have left in the parameters' gradients."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from paceline.ddp.reducer.weights import Weights
from paceline.errors import OptionError, WeightsError
from paceline.tensors.dtensor import Trained


class Accumulation:
    """The passes since gradients were last averaged.

    Args:
        parameters: every slot's parameter.

    Attributes:
        slots: a 1 for each slot that has a gradient from them.
        weights: what they count.
    """

    def __init__(self, parameters: Sequence[Trained]) -> None:
        self._parameters = parameters
        self.weights = Weights(parameters)
        self.clear()

    def clear(self) -> None:
        """They have been averaged, or their gradients are gone."""
        self.slots = bytearray(len(self._parameters))

    def add(self, slots: Iterable[int]) -> None:
        """A pass that is not synced has left gradients for these slots."""
        for slot in slots:
            self.slots[slot] = True

    def drop(self) -> None:
        """Forget them, with what they count."""
        self.clear()
        self.weights.reset()

    @property
    def weighed(self) -> bool:
        """Whether the running pass counts by a weight."""
        return self.weights.now is not None

    @contextlib.contextmanager
    def weigh(self, weight: float) -> Iterator[None]:
        """Count what passes add inside by a weight."""
        if self.weighed:
            raise OptionError(f"a weight holds already (outer: {self.weights.now}, inner: {weight})")
        if self._is_cleared():
            self.drop()
        if any(self.slots) and not self.weights.carries:
            raise OptionError("gradients were accumulated without a weight; weigh every pass, or none")
        with self.weights.hold(weight):
            yield

    def refuse_mixed(self) -> None:
        """Raise if earlier passes were weighed and this one is not."""
        if self.weights.carries and not self.weighed:
            raise WeightsError("earlier passes were weighed and this one is not; weigh every pass, or none")

    def _is_cleared(self) -> bool:
        """Whether the user has cleared what passes have left."""
        if self.weights.carries:
            return self.weights.were_cleared()
        return not any(map(self._is_left, range(len(self.slots))))

    def _is_left(self, slot: int) -> bool:
        grad = self._parameters[slot].grad
        return bool(self.slots[slot] and grad is not None and grad.any())
