"""The average of which each rank gets its part only."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import NothingPending, OnSlow, Pending
from paceline.comm.shm.in_place import Slice
from paceline.comm.shm.reduce_parts import TensorParts
from paceline.ddp.buckets.bucket_set import Bucket
from paceline.ddp.buckets.cut import Cut
from paceline.ddp.buckets.dense import DenseBucket
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.exchange.hook_run import HookRun
from paceline.errors import ShardError
from paceline.hooks.hook import Reduction


class PartAverage(Exchange):
    """Averages as another exchange does, but leaves each rank with the average of its own part.

    Args:
        group: the ranks.
        plain: the exchange that gives every rank the whole average.
        cut: which rank has which part of each slot.
    """

    name = "the average of parts"

    def __init__(self, group: Group, plain: Exchange, cut: Cut) -> None:
        super().__init__(group)
        self._plain = plain
        self._cut = cut
        self.carries_report = group.shared is not None or group.size == 1
        self.sum_per_result = plain.sum_per_result
        self._parts: WeakKeyDictionary[DenseBucket, TensorParts] = WeakKeyDictionary()

    def for_group(self, group: Group) -> "PartAverage":  # noqa: ARG002  # the parts are those of the old one
        """Raise: the parts of the optimizer state belong to the ranks of this group."""
        raise ShardError(
            "the wrapper cannot move to another process group, because its optimizer's state is split over "
            "the ranks of this one: save the state, and make wrapper and optimizer anew"
        )

    def factor(self, ranks: int) -> float:
        """As the plain exchange."""
        return self._plain.factor(ranks)

    def begin(self, weight: float | None, ranks: int) -> None:
        """As the plain exchange."""
        self._plain.begin(weight, ranks)
        self.sum_per_result = self._plain.sum_per_result

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:  # noqa: ARG002  # all are alike
        """Begin to add up the bucket's storage."""
        assert isinstance(bucket, DenseBucket)
        if bucket not in self._parts:
            self._parts[bucket] = self._cut_bucket(bucket)
        parts = self._parts[bucket]
        if self._group.shared is not None:
            return self._group.shared.reduce_parts(bucket.storage, parts)
        if self._group.size == 1:
            return NothingPending(bucket.storage)
        return HookRun(self._add_parts(bucket.storage, parts), self.name)

    def wait(self, bucket: Bucket, number: int, pending: Pending, on_slow: OnSlow) -> None:
        """Wait until this rank's part of the bucket holds the average."""
        self._plain.wait(bucket, number, pending, on_slow)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """As the plain exchange."""
        self._plain.finish(parameters, used, total)

    def _cut_bucket(self, bucket: DenseBucket) -> TensorParts:
        width = 2 if bucket.gradients.is_complex() else 1
        runs: dict[int, list[Slice]] = {}
        offset = 0
        for slot in bucket.slots:
            for owner, start, end in self._cut[slot.index]:
                own = runs.setdefault(owner, [])
                first = offset + width * start
                if own and own[-1][1] == first:
                    first = own.pop()[0]
                own.append((first, offset + width * end))
            offset += width * slot.numel
        return TensorParts(offset, [runs.get(rank, []) for rank in range(max(runs, default=-1) + 1)])

    def _add_parts(self, storage: Tensor, parts: TensorParts) -> Reduction:
        """Send each rank its elements over the process group, and add up what came."""
        group = self._group
        lengths = [sum(end - start for start, end in runs) for runs in parts.runs]
        rows = storage.new_zeros(group.size, max(lengths, default=0))
        for row, runs in zip(rows, parts.runs, strict=False):
            at = 0
            for start, end in runs:
                row[at : at + end - start] = storage[start:end]
                at += end - start
        received = yield group.all_to_all(rows)
        total = torch.sum(received, dim=0)
        at = 0
        for start, end in parts.runs[group.rank] if group.rank < len(parts.runs) else ():
            storage[start:end] = total[at : at + end - start]
            at += end - start
        return storage
