"""Which parameter goes into which bucket, and in which order buckets are launched. Pure: no tensors here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One parameter, as the bucket plan knows it: what never changes, without the tensor.

    Attributes:
        index: its position among all slots.
        name: its name in the module.
        numel: the number of elements.
        nbytes: the number of bytes of its gradient.
        kind: the data type and device; only slots of one kind share a bucket.
        sparse: whether its gradient is expected to be sparse; such a slot has a bucket of its own.
        delayed: whether it is reduced last, together with all other delayed slots.
    """

    index: int
    name: str
    numel: int
    nbytes: int
    kind: str
    sparse: bool = False
    delayed: bool = False


@dataclass(frozen=True)
class BucketCaps:
    """The number of bytes that a bucket may hold before the next one is opened.

    Attributes:
        sizes: the cap of the first bucket of a kind, of its second, and so on; the last one applies to all
            that follow.
    """

    sizes: tuple[int, ...]

    def __getitem__(self, number: int) -> int:
        return self.sizes[min(number, len(self.sizes) - 1)]


@dataclass(frozen=True)
class BucketPlan:
    """Which slots are in which bucket, with the buckets in launch order.

    The last bucket is dense, and is launched when backward has ended: the step report travels behind its
    gradients. If every slot is sparse, this bucket has no slot at all.

    Attributes:
        buckets: the slots of each bucket, by index.
    """

    buckets: tuple[tuple[int, ...], ...]

    @property
    def last_with_slots(self) -> int:
        """The last bucket that has a slot."""
        return max(number for number, members in enumerate(self.buckets) if members)

    @property
    def report_bucket(self) -> int:
        """The bucket that is launched last, with the step report."""
        return len(self.buckets) - 1


def make_plan(slots: Sequence[Slot], order: Iterable[int], caps: BucketCaps) -> BucketPlan:
    """Buckets in the order in which they become full if gradients come in the given order."""
    order = list(order)
    return BucketPlan(tuple(_dense_last([*_fill(slots, order, caps), *_delayed(slots, order)], slots)))


def plan_in_reverse(slots: Sequence[Slot], trainable: Sequence[int], caps: BucketCaps) -> BucketPlan:
    """Buckets for gradients that come in the reverse order of the parameters, as in most modules."""
    filled = _fill(slots, trainable, caps)[::-1]
    return BucketPlan(tuple(_dense_last([*filled, *_delayed(slots, trainable)], slots)))


def _delayed(slots: Sequence[Slot], order: Iterable[int]) -> list[tuple[int, ...]]:
    """One bucket per kind for the slots that are reduced last."""
    buckets: dict[str, list[int]] = {}
    for index in order:
        if slots[index].delayed:
            buckets.setdefault(slots[index].kind, []).append(index)
    return [*map(tuple, buckets.values())]


def _fill(slots: Sequence[Slot], order: Iterable[int], caps: BucketCaps) -> list[tuple[int, ...]]:
    """Fill buckets with the slots that are not delayed; a bucket is closed once it has reached its cap."""
    open_: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    closed_of_kind: dict[str, int] = {}
    closed: list[tuple[int, ...]] = []
    for index in order:
        slot = slots[index]
        if slot.delayed:
            continue
        if slot.sparse:
            closed.append((index,))
            continue
        open_.setdefault(slot.kind, []).append(index)
        filled[slot.kind] = filled.get(slot.kind, 0) + slot.nbytes
        number = closed_of_kind.get(slot.kind, 0)
        if filled[slot.kind] >= caps[number]:
            closed.append(tuple(open_.pop(slot.kind)))
            filled[slot.kind] = 0
            closed_of_kind[slot.kind] = number + 1
    return [*closed, *map(tuple, open_.values())]


def _dense_last(buckets: list[tuple[int, ...]], slots: Sequence[Slot]) -> list[tuple[int, ...]]:
    dense = [bucket for bucket in buckets if not slots[bucket[0]].sparse]
    if not dense:
        return [*buckets, ()]
    if buckets[-1] is dense[-1]:
        return buckets
    return [bucket for bucket in buckets if bucket is not dense[-1]] + [dense[-1]]
