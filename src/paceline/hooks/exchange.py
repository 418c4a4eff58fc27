"""From a full bucket to its average: what every way of doing it has in common, and the plain one."""

from typing import Protocol

from paceline.buckets.dense import DenseBucket
from paceline.buckets.sparse import SparseBucket
from paceline.comm.group import Group
from paceline.comm.pending import Pending

Bucket = DenseBucket | SparseBucket


class Exchange(Protocol):
    """How buckets are averaged over the ranks.

    Attributes:
        factor: what gradients are multiplied by before they leave, when each rank counts the same.
        gain: the sum over the ranks, divided by what comes back for it.
        carries_waybill: whether what stands behind the gradients is added up over the ranks, exactly.
    """

    factor: float
    gain: float
    carries_waybill: bool

    def on(self, group: Group) -> "Exchange":
        """The same among other ranks."""

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:
        """Begin to reduce a full bucket."""

    def land(self, bucket: Bucket, number: int, pending: Pending, unusual: "Unusual") -> None:
        """Wait for a launched bucket; afterwards it holds the result."""


class Unusual(Protocol):
    """Called when a wait takes long."""

    def __call__(self) -> None: ...  # noqa: D102


class Average:
    """Adds up with one all-reduce a bucket.

    Gradients are divided before they leave, as torch does, lest low precision overflows.

    Args:
        group: whom to average with.
    """

    carries_waybill = True
    gain = 1.0

    def __init__(self, group: Group) -> None:
        self._group = group
        self.factor = 1 / group.size

    def on(self, group: Group) -> "Average":
        """The same among other ranks."""
        return Average(group)

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:  # noqa: ARG002  # all are alike
        """Begin to add up."""
        return self._group.all_reduce(bucket.storage)

    def land(self, bucket: Bucket, number: int, pending: Pending, unusual: Unusual) -> None:  # noqa: ARG002
        """Wait until the storage holds the sum."""
        pending.wait(unusual)
