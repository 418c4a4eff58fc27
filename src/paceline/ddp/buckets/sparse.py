"""A bucket of one slot whose gradient is sparse: only the rows that were touched travel."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.ddp.buckets.plan import Slot
from paceline.tensors.dtensor import Trained


class SparseBucket:
    """Owns one sparse gradient on its way; the methods are those of a dense bucket.

    Args:
        slot: the one slot.
        parameter: its parameter.
        dtype: in which data type the gradient travels; the parameter's own if None.
    """

    def __init__(self, slot: Slot, parameter: Trained, dtype: torch.dtype | None = None) -> None:
        self.slots = (slot,)
        self.parameters = (parameter,)
        self._dtype = dtype
        self._kept: Tensor | None = None
        self._is_open = False
        self._travelling: Tensor | None = None

    @property
    def storage(self) -> Tensor:
        """What travels."""
        assert self._travelling is not None
        return self._travelling

    @property
    def gradients(self) -> Tensor:
        """The gradient."""
        return self.storage

    @property
    def views(self) -> list[Tensor]:
        """The gradient, in a list of its own."""
        return [self.storage]

    def begin(self) -> None:
        """A step begins: there is nothing to prepare."""

    def take(self, slot: int, factor: float) -> None:
        """Nothing: a sparse gradient is taken when the bucket is filled."""

    def take_small(self, slots: Iterable[int]) -> None:
        """Nothing, as well."""

    def fill(self, factor: float, used: bytearray, *, complete: bool) -> None:  # noqa: ARG002
        """Bring the gradient in; none counts as no rows."""
        (parameter,) = self.parameters
        slot = self.slots[0].index
        self._kept, parameter.grad = parameter.grad, None
        used[slot] = used[slot] and self._kept is not None
        self._is_open = not used[slot]
        if self._kept is None:
            self.zero()
        else:
            self._travelling = _rows(self._kept).to(self._dtype) * factor

    def zero(self) -> None:
        """Count as no rows."""
        like = self.parameters[0]
        nowhere = torch.empty((1, 0), dtype=torch.int64, device=like.device)
        values = torch.empty((0, *like.shape[1:]), dtype=self._dtype or like.dtype, device=like.device)
        self._travelling = torch.sparse_coo_tensor(nowhere, values, like.shape)

    def receive(self, result: Tensor) -> None:
        """Take over a gradient that was reduced outside the bucket."""
        self._travelling = result

    def scale(self, factor: float) -> None:
        """Multiply what came back."""
        self._travelling = self.storage * factor

    def hand_out(self) -> None:
        """Give the parameter its averaged gradient, if this rank used it."""
        if not self._is_open:
            self._give()

    def settle(self, used: Sequence[int]) -> None:
        """Decide on a slot that this rank did not use, now that it is known whether others did."""
        if self._is_open:
            if used[self.slots[0].index]:
                self._give()
            else:
                self.parameters[0].grad = self._kept
        self.reset()

    def add(self, more: "SparseBucket") -> None:
        """Add to the gradient handed out what a second reduction brought."""
        (parameter,) = self.parameters
        if parameter.grad is not None:
            parameter.grad = parameter.grad + more.storage

    def _give(self) -> None:
        (parameter,) = self.parameters
        parameter.grad = self.storage.to(parameter.dtype)

    def reset(self) -> None:
        """Forget the step."""
        self._kept = self._travelling = None
        self._is_open = False


def _rows(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.sparse_coo else grad.to_sparse(1)
