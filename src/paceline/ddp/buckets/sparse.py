"""A bucket of one slot whose gradient is sparse: only the rows that were touched travel."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.ddp.buckets.dense import CopyBatch
from paceline.ddp.buckets.plan import Slot
from paceline.tensors.dtensor import Trained


class SparseBucket:
    """Owns one sparse gradient while it is reduced; its methods are those of a dense bucket.

    Args:
        slot: the one slot.
        parameter: its parameter.
        dtype: the data type in which the gradient travels; the parameter's own if None.
    """

    def __init__(self, slot: Slot, parameter: Trained, dtype: torch.dtype | None = None) -> None:
        self.slots = (slot,)
        self.parameters = (parameter,)
        self._dtype = dtype
        self.reset()

    def reset(self) -> None:
        """Forget the step."""
        self._before: Tensor | None = None
        self._is_unused = False
        self._rows: Tensor | None = None

    @property
    def storage(self) -> Tensor:
        """What travels: a sparse tensor of the touched rows."""
        assert self._rows is not None
        return self._rows

    @property
    def gradients(self) -> Tensor:
        """The gradient."""
        return self.storage

    @property
    def views(self) -> list[Tensor]:
        """The one gradient, in a list."""
        return [self.storage]

    def release(self) -> None:
        """The step has ended, and with it the rows are gone."""

    def begin(self) -> None:
        """A step begins; there is nothing to prepare."""

    def batch(self, slots: Iterable[int]) -> CopyBatch:  # noqa: ARG002  # as a dense bucket's
        """Nothing: how many rows there are is known when the bucket is filled."""
        return CopyBatch((), ())

    def copy_in(self, batch: CopyBatch, factor: float) -> None:
        """Nothing to do early."""

    def fill(self, factor: float, used: Sequence[int] | None) -> list[int]:
        """Bring the gradient in; none counts as no rows. Returns the slot if ``used`` is wrong about it."""
        (parameter,) = self.parameters
        slot = self.slots[0].index
        self._before, parameter.grad = parameter.grad, None
        is_used = used is None or bool(used[slot])
        missing = [slot] if is_used and self._before is None else []
        self._is_unused = not is_used or bool(missing)
        if self._before is None:
            self.zero()
        else:
            self._rows = _rows(self._before).to(self._dtype) * factor
        return missing

    def zero(self) -> None:
        """Contribute no rows."""
        like = self.parameters[0]
        nowhere = torch.empty((1, 0), dtype=torch.int64, device=like.device)
        values = torch.empty((0, *like.shape[1:]), dtype=self._dtype or like.dtype, device=like.device)
        # Said explicitly, or torch warns that it does not check.
        self._rows = torch.sparse_coo_tensor(nowhere, values, like.shape, check_invariants=False)

    def receive(self, result: Tensor) -> None:
        """Hold a gradient that was reduced outside the bucket, in any precision."""
        self._rows = result.to(self._dtype or self.parameters[0].dtype)

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradient."""
        self._rows = self.storage * factor

    def set_grads(self) -> None:
        """Make the average the parameter's ``.grad``, if this rank used the parameter."""
        if not self._is_unused:
            self._set_grad()

    def set_unused_grads(self, used: Sequence[int]) -> None:
        """Decide on a slot that this rank did not use; ``used`` counts the ranks that did."""
        if self._is_unused:
            if used[self.slots[0].index]:
                self._set_grad()
            else:
                self.parameters[0].grad = self._before
        self.reset()

    def add_to_grads(self, more: "SparseBucket") -> None:
        """Add to ``.grad`` what a second reduction of the same slot brought."""
        (parameter,) = self.parameters
        if parameter.grad is not None:
            parameter.grad = parameter.grad + more.storage

    def _set_grad(self) -> None:
        (parameter,) = self.parameters
        parameter.grad = self.storage.to(parameter.dtype)


def _rows(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.sparse_coo else grad.to_sparse(1)
