"""The buckets of one plan, and the waybill that goes with the last of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.ddp.buckets.dense import PROMPT_NUMEL, DenseBucket, Empty
from paceline.ddp.buckets.plan import Plan, Slot
from paceline.ddp.buckets.sparse import SparseBucket
from paceline.ddp.exchange.exchange import Bucket
from paceline.ddp.reducer.step_report import Waybill
from paceline.tensors.dtensor import Trained


class Fleet:
    """A plan, made of tensors.

    Args:
        plan: which slot goes into which bucket.
        slots: every slot.
        parameters: their parameters.
        waybill: where the entries of the waybill stand.
        waybill_rides: whether the waybill travels behind the last bucket's gradients, or beside them.
        as_views: whether gradients are views of the buckets' storage.
        dtype: in which data type gradients travel; each in its parameter's own if None.
        empty: makes the buckets' storage.

    Attributes:
        buckets: one for each of the plan's.
        bucket_of: each planned slot's bucket.
        prompt: a 1 for each slot whose gradient is taken the moment it is ready.
    """

    def __init__(
        self,
        plan: Plan,
        slots: Sequence[Slot],
        parameters: Sequence[Trained],
        waybill: Waybill,
        *,
        waybill_rides: bool,
        as_views: bool,
        dtype: torch.dtype | None = None,
        empty: Empty,
    ) -> None:
        self._empty = empty
        self.plan = plan
        self.waybill = waybill
        self.slots = slots
        self._dtype = dtype
        self._parameters = parameters
        self._beside: Tensor | None = None
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}
        self.prompt = bytearray(len(slots))
        for number, members in enumerate(plan.buckets):
            rides = waybill_rides and number == plan.carrier
            bucket = self.bucket(members, as_views=as_views, tail=waybill.size if rides else 0)
            self.buckets.append(bucket)
            for slot in bucket.slots:
                self.bucket_of[slot.index] = bucket
                self.prompt[slot.index] = slot.numel >= PROMPT_NUMEL and not slot.sparse
        self._rides = waybill_rides

    def bucket(self, members: Sequence[int], *, as_views: bool, tail: int = 0) -> Bucket:
        """A new bucket of some slots."""
        slots = [self.slots[slot] for slot in members]
        parameters = [self._parameters[slot] for slot in members]
        if slots and slots[0].sparse:
            return SparseBucket(slots[0], parameters[0], self._dtype)
        device = (parameters or self._parameters)[0].device
        return DenseBucket(
            slots,
            parameters,
            device=device,
            tail=tail,
            as_views=as_views,
            dtype=self._dtype,
            empty=self._empty,
        )

    @property
    def tail(self) -> Tensor:
        """Where the waybill is written."""
        if self._rides:
            carrier = self.buckets[self.plan.carrier]
            assert isinstance(carrier, DenseBucket)
            return carrier.tail
        if self._beside is None:
            self._beside = torch.empty(self.waybill.size, device=self._parameters[0].device)
        return self._beside

    def sizes(self) -> str:
        """Bytes of gradients a bucket, in torch's words."""
        sizes = [sum(slot.nbytes for slot in bucket.slots) for bucket in self.buckets if bucket.slots]
        return ", ".join(map(str, sizes))
