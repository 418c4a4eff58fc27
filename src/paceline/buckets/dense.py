"""A bucket of dense gradients: one flat storage, and a view of it for each slot.

Note [Gradients are taken]. A gradient whose bucket is about to leave is taken off its parameter: ``.grad`` is
None until the averaged one is handed out. So a gradient that arrives in the meantime starts from nothing and
can be told apart, and autograd never writes into storage that a reduction reads.

Note [Small and prompt]. Gradients are copied soon after they are ready, while they are still in the cache: a
large one promptly, scaled by the same call; small ones many at a time, because there the calls cost more than
the copying, and scaled when the bucket leaves.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.buckets.plan import Slot
from paceline.tensors.dtensor import Trained

# Elements from which a gradient is large; 128 KiB of float32.
PROMPT_NUMEL = 32768


class Empty(Protocol):
    """Makes a flat tensor."""

    def __call__(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor: ...  # noqa: D102


class DenseBucket:
    """Owns one flat storage and the gradients that are in it.

    Args:
        slots: the bucket's slots.
        parameters: their parameters, in the same order.
        device: where the storage of an empty bucket is to be.
        tail: how many elements to keep free behind the gradients.
        as_views: whether parameters get views of the storage for gradients, or keep tensors of their own.
        dtype: in which data type gradients travel; the parameters' own if None.
        empty: makes the storage.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        parameters: Sequence[Trained],
        *,
        device: torch.device,
        tail: int = 0,
        as_views: bool,
        dtype: torch.dtype | None = None,
        empty: Empty,
    ) -> None:
        self._empty = empty
        self.slots = slots
        self.parameters = parameters
        self._device = device
        self._as_views = as_views and dtype is None
        self._dtype = dtype
        self._tail = tail
        self._flat: Tensor | None = None
        self._typed: Tensor
        # By position: small slots first, then prompt ones.
        order = sorted(range(len(slots)), key=lambda place: slots[place].numel >= PROMPT_NUMEL)
        self._position = {slots[place].index: position for position, place in enumerate(order)}
        self._members = [parameters[place] for place in order]
        self._small = sum(slot.numel < PROMPT_NUMEL for slot in slots)
        self._views: list[Tensor] = []
        self._runs: list[Tensor] = []
        self.begin()

    @property
    def storage(self) -> Tensor:
        """All that travels: the gradients and the tail."""
        if self._flat is None:
            self._flat = self._allocate()
        return self._flat

    @property
    def tail(self) -> Tensor:
        """The elements behind the gradients."""
        return self.storage[self.storage.numel() - self._tail :]

    @property
    def gradients(self) -> Tensor:
        """The gradients alone, in the parameters' own data type."""
        self._ensure_storage()
        return self._typed

    @property
    def views(self) -> list[Tensor]:
        """Each slot's view, in the order of the slots."""
        self._ensure_storage()
        return [self._views[self._position[slot.index]] for slot in self.slots]

    def reset(self) -> None:
        """Forget the step; the storage stays."""
        # What a parameter's gradient was, where it is still needed.
        self._kept: list[Tensor | None] = [None] * len(self._members)
        self._taken = bytearray(len(self._members))
        self._was_view = bytearray(len(self._members))
        # Positions of slots that this rank did not use.
        self._open: set[int] = set()

    def begin(self) -> None:
        """A step begins, perhaps after the module was converted to another data type or device."""
        self.reset()
        if self.parameters and self._flat is not None:
            like = self.parameters[0]
            if (self._typed.dtype, self._typed.device) != (self._travels_as(like), like.device):
                self._flat = None

    def take(self, slot: int, factor: float) -> None:
        """Copy one large gradient into its view, scaled, and take it off its parameter."""
        self._ensure_storage()
        self._take(self._position[slot], factor)

    def take_small(self, slots: Iterable[int]) -> None:
        """Copy small gradients into their views, and take them off their parameters."""
        self._ensure_storage()
        positions = [self._position[slot] for slot in slots]
        self._take_at_once([place for place in positions if place < self._small and not self._taken[place]])

    def fill(self, factor: float, used: bytearray, *, complete: bool) -> None:
        """Bring in whatever gradients are not in yet; a slot that has none counts as zeros.

        Args:
            factor: what gradients are multiplied by.
            used: for each slot of the module whether this rank used it; corrected where autograd says so but
                brought nothing.
            complete: whether this rank is known to have used every slot of the bucket.
        """
        self._ensure_storage()
        if complete:
            self._take_at_once([place for place in range(self._small) if not self._taken[place]])
        if not complete or 0 in self._taken:
            for slot, position in self._position.items():
                self._fill_one(slot, position, 1.0 if position < self._small else factor, used)
        if factor != 1 and self._runs:
            torch._foreach_mul_(self._runs, factor)

    def zero(self) -> None:
        """Count as zeros altogether, in new storage: parameters may hold parts of the old."""
        self._flat = None
        self.storage.zero_()

    def receive(self, result: Tensor) -> None:
        """Take over gradients that were reduced outside the storage."""
        if result.data_ptr() != self.gradients.data_ptr():
            self.gradients.copy_(result.view(-1))

    def scale(self, factor: float) -> None:
        """Multiply what came back."""
        self.gradients.mul_(factor)

    def hand_out(self) -> None:
        """Give every parameter that this rank used its averaged gradient."""
        everywhere = range(len(self._members))
        self._give(
            [position for position in everywhere if position not in self._open] if self._open else everywhere
        )

    def settle(self, used: Sequence[int]) -> None:
        """Decide on the slots that this rank did not use, now that it is known whether others did."""
        if self._open:
            slots = {position: slot for slot, position in self._position.items()}
            used_elsewhere = [position for position in self._open if used[slots[position]]]
            for position in self._open.difference(used_elsewhere):
                self._give_back(position)
            self._give(used_elsewhere)
        self.reset()

    def add(self, more: "DenseBucket") -> None:
        """Add to the gradients handed out what a second reduction of the same slots brought."""
        for parameter, view in zip(self.parameters, more.views, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(view)

    def _take_at_once(self, positions: list[int]) -> None:
        """Take gradients by one call; if there is one that this does not suit, leave them all."""
        members = [self._members[position] for position in positions]
        grads = [parameter.grad for parameter in members]
        there = [grad for grad in grads if grad is not None]
        if len(there) < len(grads) or not there or there[0].requires_grad:
            return
        try:
            torch._foreach_copy_([self._views[position] for position in positions], there)
        except RuntimeError:  # a sparse one
            return
        for parameter, position, grad in zip(members, positions, there, strict=True):
            parameter.grad = None
            self._taken[position] = True
            if not self._as_views:
                self._kept[position] = grad

    def _fill_one(self, slot: int, position: int, factor: float, used: bytearray) -> None:
        grad = self._members[position].grad
        if grad is None and not self._taken[position]:
            self._views[position].zero_()
            used[slot] = False
        if not used[slot]:
            self._open.add(position)
            # If no rank uses the slot, what was there comes back as it was.
            self._was_view[position] = grad is self._views[position]
            self._kept[position] = grad.clone() if grad is self._views[position] else grad
        if grad is not None:
            self._take(position, factor)

    def _take(self, position: int, factor: float) -> None:
        parameter, view = self._members[position], self._views[position]
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        dense = grad if grad.layout is torch.strided else grad.to_dense()
        if self._taken[position]:  # more arrived before the bucket left
            view.add_(dense, alpha=factor)
            return
        self._taken[position] = True
        if not self._as_views and position not in self._open:
            self._keep(position, grad)
        if factor != 1:
            torch.mul(dense, factor, out=view)
        elif dense is not view:
            view.copy_(dense)

    def _keep(self, position: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            grad = torch.empty_like(self._views[position])
        elif grad.requires_grad:
            # create_graph: whoever differentiates again needs this one unchanged.
            grad = torch.empty_like(grad, requires_grad=False)
        self._kept[position] = grad

    def _give(self, positions: Iterable[int]) -> None:
        if self._as_views:
            for position in positions:
                self._members[position].grad = self._views[position]
            return
        into: list[Tensor] = []
        views: list[Tensor] = []
        for position in positions:
            view, own, parameter = self._views[position], self._kept[position], self._members[position]
            if own is None or (self._dtype is not None and own.dtype != parameter.dtype):
                own = torch.empty_like(view, dtype=parameter.dtype)
            views.append(view)
            into.append(own)
            parameter.grad = own
        if into:
            torch._foreach_copy_(into, views)

    def _give_back(self, position: int) -> None:
        kept = self._kept[position]
        if kept is not None and self._was_view[position]:
            kept = self._views[position].copy_(kept)
        self._members[position].grad = kept

    def _ensure_storage(self) -> None:
        if self._flat is None:
            self._flat = self._allocate()

    def _allocate(self) -> Tensor:
        like = self.parameters[0] if self.parameters else torch.empty(0, device=self._device)
        dtype = self._travels_as(like)
        width = 2 if dtype.is_complex else 1
        numel = width * sum(slot.numel for slot in self.slots)
        flat = self._empty(numel + self._tail, dtype=dtype.to_real(), device=like.device)
        gradients = flat[:numel]
        self._typed = torch.view_as_complex(gradients.view(-1, 2)) if dtype.is_complex else gradients
        self._cut()
        return flat

    def _travels_as(self, like: Tensor | Trained) -> torch.dtype:
        return like.dtype if self._dtype is None or like.dtype.is_complex else self._dtype

    def _cut(self) -> None:
        """Cut the storage into views, in the order of the slots, and into runs of small neighbours."""
        views = {}
        self._runs = []
        offset = run = 0
        for slot, parameter in zip(self.slots, self.parameters, strict=True):
            # The parameter's own strides if they cover memory without gaps, else contiguous ones.
            strides = torch.empty_like(parameter.detach(), device="meta").stride()
            views[slot.index] = self._typed.as_strided(parameter.shape, strides, offset)
            if slot.numel >= PROMPT_NUMEL:
                self._end_run(run, offset)
                run = offset + slot.numel
            offset += slot.numel
        self._end_run(run, offset)
        self._views = [views[slot] for slot in self._position]

    def _end_run(self, start: int, end: int) -> None:
        if end > start:
            self._runs.append(self._typed[start:end])
