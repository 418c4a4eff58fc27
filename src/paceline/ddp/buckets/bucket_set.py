"""The buckets of one plan, with the memory in which the step report travels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ddp.buckets.dense import CopyBatch, DenseBucket, Empty, is_large
from paceline.ddp.buckets.plan import BucketPlan, Slot
from paceline.ddp.buckets.sparse import SparseBucket
from paceline.tensors.dtensor import Trained

Bucket = DenseBucket | SparseBucket


@dataclass(frozen=True)
class BucketOptions:
    """How buckets are made.

    Attributes:
        as_views: whether to reuse the storage even if somebody still holds a gradient in it
            (``gradient_as_bucket_view``).
        lazy: whether to release the storage after each step (``lazy_bucket_allocation``); it is always
            allocated when the first gradient of the bucket is copied.
        dtype: the data type in which gradients travel; each in its parameter's own type if None.
    """

    as_views: bool = False
    lazy: bool = False
    dtype: torch.dtype | None = None


class BucketSet:
    """A plan and its buckets.

    Args:
        plan: which slot is in which bucket.
        slots: every slot.
        parameters: their parameters.
        report_numel: the number of elements of a step report.
        report_in_bucket: whether the report travels behind the last bucket's gradients, or in a tensor of
            its own.
        report_on_host: whether that tensor is in host memory, wherever the parameters are.
        options: how the buckets are made.
        empty: makes their storage.

    Attributes:
        report_in_bucket: as given.
        report_on_host: as given.
        buckets: one for each of the plan's.
        bucket_of: each planned slot's bucket.
        is_large: a 1 for each slot whose gradient is copied as soon as it is ready.
    """

    def __init__(
        self,
        plan: BucketPlan,
        slots: Sequence[Slot],
        parameters: Sequence[Trained],
        *,
        report_numel: int,
        report_in_bucket: bool,
        report_on_host: bool = False,
        options: BucketOptions,
        empty: Empty,
    ) -> None:
        self.plan = plan
        self._slots = slots
        self._parameters = parameters
        self._report_numel = report_numel
        self.report_in_bucket = report_in_bucket
        self.report_on_host = report_on_host
        self._options = options
        self._empty = empty
        self._report: Tensor | None = None
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}
        self.is_large = bytearray(len(slots))
        self._batches: dict[tuple[int, ...], list[tuple[Bucket, CopyBatch]]] = {}
        for number, members in enumerate(plan.buckets):
            has_report = report_in_bucket and number == plan.report_bucket
            bucket = self._make(members, as_views=options.as_views, tail=report_numel if has_report else 0)
            self.buckets.append(bucket)
            for slot, parameter in zip(bucket.slots, bucket.parameters, strict=True):
                self.bucket_of[slot.index] = bucket
                self.is_large[slot.index] = is_large(slot, parameter) and not slot.sparse

    def batches(self, slots: Sequence[int], *, again: bool) -> list[tuple[Bucket, CopyBatch]]:
        """The gradients of these slots, in batches that are copied together.

        Args:
            slots: in any order.
            again: whether the same slots come together in every step, so that it is worth while to remember.
        """
        if not again:
            return self._make_batches(slots)
        key = tuple(slots)
        if key not in self._batches:
            self._batches[key] = self._make_batches(slots)
        return self._batches[key]

    def forget_batches(self) -> None:
        """Other slots will come together from now on."""
        self._batches.clear()

    def _make_batches(self, slots: Iterable[int]) -> list[tuple[Bucket, CopyBatch]]:
        members: dict[int, list[int]] = {}
        for slot in slots:
            if slot in self.bucket_of:  # a slot may have a hook from an earlier plan, and no bucket now
                members.setdefault(id(self.bucket_of[slot]), []).append(slot)
        return [
            (bucket, bucket.batch(members[id(bucket)])) for bucket in self.buckets if id(bucket) in members
        ]

    def another(self, number: int) -> Bucket:
        """A second bucket of the same slots, for gradients that came after the first was launched."""
        return self._make(self.plan.buckets[number], as_views=True)

    def for_slots(self, members: Sequence[int]) -> Bucket:
        """A bucket of slots that the plan does not cover."""
        return self._make(members, as_views=self._options.as_views)

    def end_step(self) -> None:
        """Release the buckets' storage, if it is allocated for one step only."""
        if self._options.lazy:
            for bucket in self.buckets:
                bucket.release()

    @property
    def report(self) -> Tensor:
        """Where the step report is written."""
        if self.report_in_bucket:
            bucket = self.buckets[self.plan.report_bucket]
            assert isinstance(bucket, DenseBucket)
            return bucket.tail
        if self._report is None:
            device = torch.device("cpu") if self.report_on_host else self._parameters[0].device
            self._report = torch.empty(self._report_numel, device=device)
        return self._report

    def _make(self, members: Sequence[int], *, as_views: bool, tail: int = 0) -> Bucket:
        slots = [self._slots[slot] for slot in members]
        parameters = [self._parameters[slot] for slot in members]
        if slots and slots[0].sparse:
            return SparseBucket(slots[0], parameters[0], self._options.dtype)
        device = (parameters or self._parameters)[0].device
        return DenseBucket(
            slots,
            parameters,
            device=device,
            tail=tail,
            as_views=as_views,
            dtype=self._options.dtype,
            empty=self._empty,
        )
