"""A bucket of dense gradients: one flat storage, and a view of it for each slot.

Note [Copied gradients leave their parameters]. When a gradient is copied into its bucket, ``.grad`` becomes
None until the average is there. So a gradient that arrives in the meantime starts from nothing and can be
told apart, and autograd never writes into storage that a reduction reads.

Note [Small and large gradients]. Gradients are copied soon after they are ready, while they are still in the
cache. A large one is copied at once, and scaled by the same call. Small ones are copied many at a time,
because there the calls cost more than the copying; they are scaled when the bucket is launched. On an
accelerator every gradient counts as small: each call is a kernel to launch, and a bucket is copied by one.

Note [Gradients are lent]. The averages that become ``.grad`` are views of the storage. If somebody keeps one
beyond its step, the bucket leaves that storage alone and takes new storage; with ``as_views`` it does not
check. A gradient that somebody holds when it is copied stays its parameter's gradient: the average is
written to it.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.ddp.buckets.lending import Lent, held
from paceline.ddp.buckets.plan import Slot
from paceline.tensors.dtensor import Trained
from paceline.tensors.part_parameter import PartParameter
from paceline.torch_private import foreach_copy_, foreach_mul_

# Elements from which a gradient is large; 128 KiB of float32.
LARGE_NUMEL = 32768


class Empty(Protocol):
    """Makes a flat tensor."""

    def __call__(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor: ...  # noqa: D102


def is_large(slot: Slot, parameter: Trained) -> bool:
    """Whether a gradient is copied by itself: see Note [Small and large gradients]."""
    return slot.numel >= LARGE_NUMEL and parameter.device.type == "cpu"


class CopyBatch:
    """Gradients of one bucket that are copied together.

    Args:
        small: the positions of small ones, in order.
        large: the positions of large ones, in order.

    Attributes:
        pick: takes the small ones out of a list that has an entry for each position.
    """

    def __init__(self, small: Sequence[int], large: Sequence[int]) -> None:
        self.small = small
        self.large = large
        self.pick: Callable[[Any], Any]
        if not small:
            self.pick = itemgetter(slice(0, 0))
        elif small[-1] - small[0] == len(small) - 1:
            self.pick = itemgetter(slice(small[0], small[-1] + 1))
        else:
            self.pick = itemgetter(*small)


class DenseBucket:
    """Owns one flat storage and the gradients that are in it.

    Args:
        slots: the bucket's slots.
        parameters: their parameters, in the same order.
        device: the device of an empty bucket's storage.
        tail: the number of elements to keep free behind the gradients.
        as_views: whether to reuse the storage even if somebody still holds a gradient in it.
        dtype: the data type in which gradients travel; the parameters' own if None. Gradients of another
            type cannot be lent: they are copied out.
        empty: makes the storage.

    Attributes:
        apart: sums of other shards of this rank, as long as the storage, that must not be added to it.
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
        # By position: small slots first, then large ones.
        large = [is_large(slot, parameter) for slot, parameter in zip(slots, parameters, strict=True)]
        order = sorted(range(len(slots)), key=large.__getitem__)
        self._position = {slots[at].index: position for position, at in enumerate(order)}
        self._members = [parameters[at] for at in order]
        self._small = len(large) - sum(large)
        self._views: list[Tensor] = []
        self._runs: list[Tensor] = []
        self._lent = Lent(self._views)
        self._parts: list[DenseBucket] = []
        self.begin()

    @property
    def storage(self) -> Tensor:
        """What is reduced: the gradients and the tail."""
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

    def part(self, members: Sequence[int]) -> "DenseBucket":
        """A bucket for some of the slots, by their position in ``slots``, in ordinary memory."""
        part = DenseBucket(
            [self.slots[member] for member in members],
            [self.parameters[member] for member in members],
            device=self._device,
            as_views=True,
            dtype=self._dtype,
            empty=_ordinary_memory,
        )
        self._parts.append(part)
        return part

    def reset(self) -> None:
        """Forget the step; the storage stays."""
        self._is_writable = False
        # Positions of views that were their parameters' gradients when the step first wrote to the storage.
        self._accumulated_in: set[int] = set()
        self._copied = bytearray(len(self._members))
        # Gradients that somebody holds: the averages are written to them.
        self._kept: dict[int, Tensor] = {}
        # For slots that this rank did not use: their ``.grad`` before the step; a copy if it was a view.
        self._unused: dict[int, Tensor | None] = {}
        self._unused_views: set[int] = set()
        self.apart: list[Tensor] = []

    def keep_apart(self, gradients: Sequence[Tensor | None]) -> None:
        """Have one more sum of shards reduced, beside that in the storage.

        Args:
            gradients: the sum, in the order of the slots.
        """
        flat = torch.zeros_like(self.storage)
        typed = flat[: flat.numel() - self._tail]
        if self.gradients.is_complex():
            typed = torch.view_as_complex(typed.view(-1, 2))
        offset = 0
        for slot, view, gradient in zip(self.slots, self.views, gradients, strict=True):
            if gradient is not None:
                typed.as_strided(view.shape, view.stride(), offset).copy_(gradient)
            offset += slot.numel
        self.apart.append(flat)

    def release(self) -> None:
        """Leave the storage to whoever holds a gradient in it; the next step takes new storage."""
        self._flat = None
        self._typed = torch.empty(0)
        self._views, self._runs = [], []
        self._lent = Lent(self._views)
        for part in self._parts:
            part.release()

    def begin(self) -> None:
        """A step begins, perhaps after the module was converted to another data type or device."""
        self.reset()
        if self.parameters and self._flat is not None:
            like = self.parameters[0]
            if (self._typed.dtype, self._typed.device) != (self._dtype_for(like), like.device):
                self.release()

    def batch(self, slots: Iterable[int]) -> CopyBatch:
        """Some slots whose gradients are copied together; it may be used in every step."""
        return self._batch(map(self._position.__getitem__, slots))

    def _batch(self, positions: Iterable[int]) -> CopyBatch:
        ordered = sorted(positions)
        small = [at for at in ordered if at < self._small]
        return CopyBatch(small, ordered[len(small) :])

    def copy_in(self, batch: CopyBatch, factor: float) -> None:
        """Copy the gradients of some slots into their views, and take them off their parameters.

        Large ones are multiplied by ``factor``; for small ones ``fill`` does that.
        """
        if 1 in batch.pick(self._copied):
            batch = self._batch(at for at in (*batch.small, *batch.large) if not self._copied[at])
        if not self._is_writable or self._accumulated_in:
            self._make_writable((*batch.small, *batch.large))
        if batch.small:
            grads: list[Any] = [member.grad for member in batch.pick(self._members)]
            try:
                foreach_copy_(batch.pick(self._views), grads)
            except (TypeError, RuntimeError):  # one is missing, or sparse: ``fill`` takes them one by one
                grads.clear()
            else:
                self._take_off(batch, grads)
        for position in batch.large:
            if not self._copied[position] and self._members[position].grad is not None:
                self._copy_one(position, factor)

    def fill(self, factor: float, used: Sequence[int] | None) -> list[int]:
        """Bring in the gradients that are still missing; a slot that has none counts as zeros.

        Args:
            factor: what gradients are multiplied by.
            used: for each slot of the module, whether this rank used it; None if it is known to have used
                every slot of the bucket.

        Returns:
            Slots that were said to be used and have no gradient: autograd ran their hooks without one.
        """
        self._make_writable(range(len(self._members)))
        if used is None and 0 in self._copied:
            self.copy_in(self._batch(range(len(self._members))), factor)
        missing = []
        if used is not None or 0 in self._copied:
            for slot, position in self._position.items():
                by = 1.0 if position < self._small else factor
                is_used = used is None or bool(used[slot])
                has_gradient = self._fill_one(position, by, used=is_used)
                if is_used and not has_gradient:
                    missing.append(slot)
        if factor != 1 and self._runs:
            foreach_mul_(self._runs, factor)
        return missing

    def zero(self) -> None:
        """Contribute zeros, in new storage: parameters may hold parts of the old one."""
        self.release()
        self.storage.zero_()

    def receive(self, result: Tensor) -> None:
        """Hold gradients that were reduced outside the storage, in any precision."""
        own = self.gradients
        if result.data_ptr() == own.data_ptr() and result.dtype == own.dtype and result.is_contiguous():
            return
        shares_memory = result.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        own.copy_((result.clone() if shares_memory else result).reshape(-1))

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients."""
        self.gradients.mul_(factor)

    def set_grads(self) -> None:
        """Make the average the ``.grad`` of every parameter that this rank used."""
        if self._unused or self._kept or self._dtype is not None:
            self._set_grads([at for at in range(len(self._members)) if at not in self._unused])
            return
        for parameter, view in zip(self._members, self._views, strict=True):
            parameter.grad = view

    def set_unused_grads(self, used: Sequence[int]) -> None:
        """Decide on the slots that this rank did not use; ``used`` counts the ranks that did."""
        if self._unused:
            slots = {position: slot for slot, position in self._position.items()}
            used_elsewhere = [position for position in self._unused if used[slots[position]]]
            for position in self._unused.keys() - used_elsewhere:
                self._restore_grad(position)
            self._set_grads(used_elsewhere)
        self.reset()

    def add_to_grads(self, more: "DenseBucket") -> None:
        """Add to ``.grad`` what a second reduction of the same slots brought."""
        for parameter, view in zip(self.parameters, more.views, strict=True):
            if isinstance(parameter, PartParameter):
                parameter.add_to_grad(view)
            elif parameter.grad is not None:
                parameter.grad.add_(view)

    def _take_off(self, batch: CopyBatch, grads: list[Tensor]) -> None:
        """Take copied gradients, which are in this list too, off their parameters."""
        for member in batch.pick(self._members):
            member.grad = None
        for position in batch.small:
            self._copied[position] = True
        self._keep_held(batch.small, grads)

    def _fill_one(self, position: int, factor: float, *, used: bool) -> bool:
        """Bring in one gradient, or zeros; returns whether this rank has something to contribute."""
        grad, view = self._members[position].grad, self._views[position]
        if grad is None and not self._copied[position]:
            view.zero_()
            used = False
        if not used:
            # If no rank uses the slot, this becomes its gradient again.
            self._unused[position] = grad
            if grad is view:
                self._unused[position] = grad.clone()
                self._unused_views.add(position)
        if grad is not None:
            del grad  # or it would count as held
            self._copy_one(position, factor)
        return used

    def _copy_one(self, position: int, factor: float) -> None:
        parameter, view = self._members[position], self._views[position]
        grads: list[Any] = [parameter.grad]
        parameter.grad = None
        was_copied, self._copied[position] = self._copied[position], True
        if not was_copied:
            self._keep_held((position,), grads)
        (grad,) = grads
        dense = grad if grad.layout is torch.strided else grad.to_dense()
        if was_copied:  # more arrived before the bucket was launched
            view.add_(dense, alpha=factor)
        elif factor != 1:
            torch.mul(dense, factor, out=view)
        elif dense is not view:
            view.copy_(dense)

    def _keep_held(self, positions: Sequence[int], grads: list[Tensor]) -> None:
        """Of copied gradients, which are in no variable but this list, keep those that somebody holds."""
        if self._dtype is not None:
            found: Iterable[int] = range(len(grads))
        else:
            found = () if self._as_views else held(grads)
        for at in found:
            position, grad = positions[at], grads[at]
            if grad is not self._views[position] and _can_be_grad(grad, self._members[position]):
                self._kept[position] = grad

    def _set_grads(self, positions: Iterable[int]) -> None:
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
            foreach_copy_(into, views)

    def _restore_grad(self, position: int) -> None:
        before = self._unused[position]
        if before is not None and position in self._unused_views:
            before = self._views[position].copy_(before)
        self._members[position].grad = before

    def _ensure_storage(self) -> None:
        if self._flat is None:
            self._renew()

    def _make_writable(self, positions: Iterable[int]) -> None:
        """See to it that the views at these positions may be written to: see Note [Gradients are lent]."""
        if self._flat is None:
            self._renew()
        elif self._is_writable:
            # A hook may have put another gradient there since, and kept the view.
            if self._accumulated_in and not all(
                position not in self._accumulated_in or self._copied[position] or self._is_grad(position)
                for position in positions
            ):
                self._leave_storage()
        elif self._dtype is None:
            lent = self._lent.as_gradients(self._members, anyone_may_hold=self._as_views)
            if lent is None:
                self._renew()
            else:
                self._accumulated_in = lent
        self._is_writable = True

    def _is_grad(self, position: int) -> bool:
        return self._members[position].grad is self._views[position] and self._lent.is_whole(position)

    def _leave_storage(self) -> None:
        """Go on in new storage, in the middle of a step."""
        flat, views = self.storage, self._views
        self._renew().copy_(flat)
        for position in self._accumulated_in:
            if self._copied[position]:
                self._kept[position] = views[position]
        self._accumulated_in = set()

    def _renew(self) -> Tensor:
        """Take new storage, and leave the old one to whoever holds a part of it."""
        like = self.parameters[0] if self.parameters else torch.empty(0, device=self._device)
        dtype = self._dtype_for(like)
        width = 2 if dtype.is_complex else 1
        numel = width * sum(slot.numel for slot in self.slots)
        flat = self._flat = self._empty(numel + self._tail, dtype=dtype.to_real(), device=like.device)
        self._typed = flat[:numel]
        if dtype.is_complex:
            self._typed = torch.view_as_complex(self._typed.view(-1, 2))
        self._cut()
        self._lent = Lent(self._views)
        return flat

    def _dtype_for(self, like: Tensor | Trained) -> torch.dtype:
        return like.dtype if self._dtype is None or like.dtype.is_complex else self._dtype

    def _cut(self) -> None:
        """Cut the storage into views, in the order of the slots, and into runs of small gradients."""
        views = {}
        self._runs = []
        offset = run = 0
        for slot, parameter in zip(self.slots, self.parameters, strict=True):
            # The parameter's own strides if they cover memory without gaps, else contiguous ones.
            strides = torch.empty_like(parameter.detach(), device="meta").stride()
            view = self._typed.as_strided(parameter.shape, strides, offset)
            # To its holder a lent gradient is a tensor of its own: it has a version, and can be detached.
            views[slot.index] = view if self._as_views else view.data
            if self._position[slot.index] >= self._small:
                self._end_run(run, offset)
                run = offset + slot.numel
            offset += slot.numel
        self._end_run(run, offset)
        self._views = [views[slot] for slot in self._position]

    def _end_run(self, start: int, end: int) -> None:
        if end > start:
            self._runs.append(self._typed[start:end])


def _ordinary_memory(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _can_be_grad(grad: Tensor, parameter: Trained) -> bool:
    """Whether the average may be written to this tensor, and be the parameter's gradient."""
    return (
        grad.layout is torch.strided
        and grad.dtype == parameter.dtype
        and not grad.requires_grad  # create_graph: whoever differentiates again needs it unchanged
    )
