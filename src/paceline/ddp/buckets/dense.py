"""A bucket of dense gradients: one flat storage, and a view of it for each slot.

Note [Gradients are taken]. A gradient whose bucket is about to leave is taken off its parameter: ``.grad`` is
None until the averaged one is handed out. So a gradient that arrives in the meantime starts from nothing and
can be told apart, and autograd never writes into storage that a reduction reads.

Note [Small and prompt]. Gradients are copied soon after they are ready, while they are still in the cache: a
large one promptly, scaled by the same call; small ones many at a time, because there the calls cost more than
the copying, and scaled when the bucket leaves.

Note [Gradients are lent]. What is handed out are views of the storage. Where somebody keeps one beyond its
step, the bucket leaves that storage alone and takes new; if views were asked for, it does not ask. A gradient
that somebody holds when it is taken stays its parameter's gradient: the average is copied there.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.ddp.buckets.lending import Lent, held
from paceline.ddp.buckets.plan import Slot
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
        as_views: whether gradients that were handed out may change in the next step, whoever holds them.
        dtype: in which data type gradients travel; the parameters' own if None. Gradients of another type
            cannot be lent, and are copied out.
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
        self._as_views = as_views
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
        self._lent = Lent(self._views)
        self.begin()

    @property
    def storage(self) -> Tensor:
        """All that travels: the gradients and the tail."""
        return self._flat if self._flat is not None else self._renew()

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

    def part(self, places: Sequence[int]) -> "DenseBucket":
        """A bucket for the gradients of some of the slots, in ordinary memory."""
        return DenseBucket(
            [self.slots[place] for place in places],
            [self.parameters[place] for place in places],
            device=self._device,
            as_views=True,
            dtype=self._dtype,
            empty=_ordinary,
        )

    def reset(self) -> None:
        """Forget the step; the storage stays."""
        self._claimed = False
        # Positions of views that were their parameters' gradients when the storage was claimed.
        self._added_to: set[int] = set()
        self._taken = bytearray(len(self._members))
        # Gradients that the averages are copied to.
        self._kept: dict[int, Tensor] = {}
        # What was there for slots that this rank did not use; of a view its values.
        self._open: dict[int, Tensor | None] = {}
        self._open_views: set[int] = set()

    def begin(self) -> None:
        """A step begins, perhaps after the module was converted to another data type or device."""
        self.reset()
        if self.parameters and self._flat is not None:
            like = self.parameters[0]
            if (self._typed.dtype, self._typed.device) != (self._travels_as(like), like.device):
                self._flat = None

    def take(self, slot: int, factor: float) -> None:
        """Copy one large gradient into its view, scaled, and take it off its parameter."""
        position = self._position[slot]
        self._claim((position,))
        self._take(position, factor)

    def take_small(self, slots: Iterable[int]) -> None:
        """Copy small gradients into their views, and take them off their parameters."""
        small, taken = self._small, self._taken
        positions = map(self._position.__getitem__, slots)
        self._take_at_once([place for place in positions if place < small and not taken[place]])

    def fill(self, factor: float, used: bytearray, *, complete: bool) -> None:
        """Bring in whatever gradients are not in yet; a slot that has none counts as zeros.

        Args:
            factor: what gradients are multiplied by.
            used: for each slot of the module whether this rank used it; corrected where autograd says so but
                brought nothing.
            complete: whether this rank is known to have used every slot of the bucket.
        """
        self._claim(range(len(self._members)))
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
        if self._open or self._kept or self._dtype is not None:
            self._give([position for position in range(len(self._members)) if position not in self._open])
            return
        for parameter, view in zip(self._members, self._views, strict=True):
            parameter.grad = view

    def settle(self, used: Sequence[int]) -> None:
        """Decide on the slots that this rank did not use, now that it is known whether others did."""
        if self._open:
            slots = {position: slot for slot, position in self._position.items()}
            used_elsewhere = [position for position in self._open if used[slots[position]]]
            for position in self._open.keys() - used_elsewhere:
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
        if not positions:
            return
        self._claim(positions)
        members = [self._members[position] for position in positions]
        grads: list[Any] = [parameter.grad for parameter in members]
        try:
            torch._foreach_copy_([self._views[position] for position in positions], grads)
        except (TypeError, RuntimeError):  # one is missing, or sparse
            return
        for parameter in members:
            parameter.grad = None
        for position in positions:
            self._taken[position] = True
        self._keep(positions, grads)

    def _fill_one(self, slot: int, position: int, factor: float, used: bytearray) -> None:
        grad, view = self._members[position].grad, self._views[position]
        if grad is None and not self._taken[position]:
            view.zero_()
            used[slot] = False
        if not used[slot]:
            # If no rank uses the slot, what was there comes back as it was.
            self._open[position] = grad
            if grad is view:
                self._open[position] = grad.clone()
                self._open_views.add(position)
        if grad is not None:
            del grad  # or it would count as held
            self._take(position, factor)

    def _take(self, position: int, factor: float) -> None:
        parameter, view = self._members[position], self._views[position]
        grads: list[Any] = [parameter.grad]
        parameter.grad = None
        was_taken, self._taken[position] = self._taken[position], True
        if not was_taken:
            self._keep((position,), grads)
        (grad,) = grads
        dense = grad if grad.layout is torch.strided else grad.to_dense()
        if was_taken:  # more arrived before the bucket left
            view.add_(dense, alpha=factor)
        elif factor != 1:
            torch.mul(dense, factor, out=view)
        elif dense is not view:
            view.copy_(dense)

    def _keep(self, positions: Sequence[int], grads: list[Tensor]) -> None:
        """Of gradients that were taken, in no variable but this list, keep those that somebody holds."""
        if self._dtype is not None:
            places: Iterable[int] = range(len(grads))
        else:
            places = () if self._as_views else held(grads)
        for place in places:
            position, grad = positions[place], grads[place]
            if grad is not self._views[position] and _can_be_given(grad, self._members[position]):
                self._kept[position] = grad

    def _give(self, positions: Iterable[int]) -> None:
        into: list[Tensor] = []
        views: list[Tensor] = []
        for position in positions:
            parameter, view, own = self._members[position], self._views[position], self._kept.get(position)
            if own is None and self._dtype is not None:
                own = torch.empty_like(view, dtype=parameter.dtype)
            if own is not None:
                into.append(own)
                views.append(view)
            parameter.grad = view if own is None else own
        if into:
            torch._foreach_copy_(into, views)

    def _give_back(self, position: int) -> None:
        older = self._open[position]
        if older is not None and position in self._open_views:
            older = self._views[position].copy_(older)
        self._members[position].grad = older

    def _ensure_storage(self) -> None:
        if self._flat is None:
            self._renew()

    def _claim(self, positions: Iterable[int]) -> None:
        """See to it that the views at these positions may be written to: see Note [Gradients are lent]."""
        if self._flat is None:
            self._renew()
        elif self._claimed:
            # A hook may have put another gradient there since, and kept the view.
            if self._added_to and not all(
                position not in self._added_to or self._taken[position] or self._is_added_to(position)
                for position in positions
            ):
                self._leave_storage()
        elif self._dtype is None:
            lent = self._lent.as_gradients(self._members, anyone_may_hold=self._as_views)
            if lent is None:
                self._renew()
            else:
                self._added_to = lent
        self._claimed = True

    def _is_added_to(self, position: int) -> bool:
        return self._members[position].grad is self._views[position] and self._lent.is_whole(position)

    def _leave_storage(self) -> None:
        """Go on in new storage, in the middle of a step."""
        flat, views = self.storage, self._views
        self._renew().copy_(flat)
        for position in self._added_to:
            if self._taken[position]:
                self._kept[position] = views[position]
        self._added_to = set()

    def _renew(self) -> Tensor:
        """Take new storage, and leave the old to whoever holds a part of it."""
        like = self.parameters[0] if self.parameters else torch.empty(0, device=self._device)
        dtype = self._travels_as(like)
        width = 2 if dtype.is_complex else 1
        numel = width * sum(slot.numel for slot in self.slots)
        flat = self._flat = self._empty(numel + self._tail, dtype=dtype.to_real(), device=like.device)
        self._typed = flat[:numel]
        if dtype.is_complex:
            self._typed = torch.view_as_complex(self._typed.view(-1, 2))
        self._cut()
        self._lent = Lent(self._views)
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
            view = self._typed.as_strided(parameter.shape, strides, offset)
            # To its holder a lent gradient is a tensor of its own: it has a version, and can be detached.
            views[slot.index] = view if self._as_views else view.data
            if slot.numel >= PROMPT_NUMEL:
                self._end_run(run, offset)
                run = offset + slot.numel
            offset += slot.numel
        self._end_run(run, offset)
        self._views = [views[slot] for slot in self._position]

    def _end_run(self, start: int, end: int) -> None:
        if end > start:
            self._runs.append(self._typed[start:end])


def _ordinary(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _can_be_given(grad: Tensor, parameter: Trained) -> bool:
    """Whether the average may be written to this tensor, and be the parameter's gradient."""
    return (
        grad.layout is torch.strided
        and grad.dtype == parameter.dtype
        and not grad.requires_grad  # create_graph: whoever differentiates again needs it unchanged
    )
