"""Gradients of backward passes that were not synced, which wait in ``.grad`` for the next synced one."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from paceline.ddp.reducer.weights import Weights
from paceline.errors import OptionError, UnsupportedError, WeightsError
from paceline.tensors.dtensor import Trained


class Accumulation:
    """The passes since gradients were last averaged.

    Args:
        parameters: every slot's parameter.

    Attributes:
        slots: a 1 for each slot that has a gradient from these passes.
        weights: the weights of these passes, under ``weigh``.
        no_weights: why contributions may not be weighted, if so.
    """

    def __init__(self, parameters: Sequence[Trained]) -> None:
        self._parameters = parameters
        self.weights = Weights(parameters)
        self.no_weights: str | None = None
        self.clear()

    def clear(self) -> None:
        """The gradients have been averaged, or are gone."""
        self.slots = bytearray(len(self._parameters))

    def is_left(self) -> bool:
        """Whether there are gradients of passes that were not synced, which the user has not cleared."""
        return any(self.slots) and not self._is_cleared()

    def add(self, slots: Iterable[int]) -> None:
        """A pass that was not synced has left gradients for these slots."""
        for slot in slots:
            self.slots[slot] = True

    def drop(self) -> None:
        """Forget the passes, with their weights."""
        self.clear()
        self.weights.reset()

    @property
    def is_weighted(self) -> bool:
        """Whether the running pass counts by a weight."""
        return self.weights.now is not None

    @contextlib.contextmanager
    def weigh(self, weight: float) -> Iterator[None]:
        """Count what backward passes add inside by a weight."""
        if self.no_weights is not None:
            raise UnsupportedError(self.no_weights)
        if self.is_weighted:
            raise OptionError(f"a weight is in force already (outer: {self.weights.now}, inner: {weight})")
        if self._is_cleared():
            self.drop()
        if any(self.slots) and not self.weights.has_earlier:
            raise OptionError("gradients were accumulated without a weight; weigh every pass, or none")
        with self.weights.hold(weight):
            yield

    @contextlib.contextmanager
    def adding_nothing(self, *, weighted: bool = False) -> Iterator[None]:
        """Average inside what earlier passes have left, with their weights if they had any.

        Args:
            weighted: whether this rank's earlier shards had weights.
        """
        if not (weighted or self.weights.has_earlier):
            yield
            return
        with self.weights.hold(0):
            self.weights.begin()
            yield

    def refuse_mixed(self) -> None:
        """Raise if earlier passes had a weight and this one has none."""
        if self.weights.has_earlier and not self.is_weighted:
            raise WeightsError("earlier passes were weighed and this one is not; weigh every pass, or none")

    def _is_cleared(self) -> bool:
        """Whether the user has cleared the gradients of earlier passes."""
        if self.weights.has_earlier:
            return self.weights.were_cleared()
        return not any(map(self._is_left, range(len(self.slots))))

    def _is_left(self, slot: int) -> bool:
        grad = self._parameters[slot].grad
        return bool(self.slots[slot] and grad is not None and grad.any())
