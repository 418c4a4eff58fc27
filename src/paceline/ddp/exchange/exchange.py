"""From a full bucket to its average: what every way of doing it has in common, and the plain ones."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.ddp.buckets.dense import DenseBucket
from paceline.ddp.buckets.sparse import SparseBucket

Bucket = DenseBucket | SparseBucket


class Unusual(Protocol):
    """Called when a wait takes long."""

    def __call__(self) -> None: ...  # noqa: D102


class Exchange(ABC):
    """How buckets are averaged over the ranks.

    Args:
        group: whom to average with.

    Attributes:
        gain: the sum over the ranks, divided by what comes back for it when nothing was multiplied.
        carries_waybill: whether what stands behind the gradients is added up over the ranks, exactly.
        serial: whether a bucket may leave only when the one before it has come back.
        joins: whether it works under join, where some ranks have no inputs left.
        name: what it is called in errors.
    """

    name = "the average"
    carries_waybill = False
    serial = False
    joins = True

    def __init__(self, group: Group) -> None:
        self._group = group
        self.gain = float(group.size)

    @abstractmethod
    def on(self, group: Group) -> "Exchange":
        """The same among other ranks."""

    @abstractmethod
    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:
        """Begin to reduce a full bucket."""

    @abstractmethod
    def land(self, bucket: Bucket, number: int, pending: Pending, unusual: Unusual) -> None:
        """Wait for a launched bucket; afterwards it holds the result."""

    def factor(self, ranks: int) -> float:  # noqa: ARG002
        """What gradients are multiplied by before they leave, when so many ranks count the same."""
        return 1.0

    def begin(self, weight: float | None, ranks: int) -> None:  # noqa: B027  # most need not know
        """A step begins.

        Args:
            weight: what this rank's gradients are multiplied by, if it is to count.
            ranks: among how many ranks the sum is shared out.
        """

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:  # noqa: B027  # as begin
        """A step has ended well on every rank; ``used`` says by how many ranks each parameter was used.

        ``total`` is the sum of the ranks' weights, if there were any.
        """


class Average(Exchange):
    """Adds up with one all-reduce a bucket.

    Gradients are divided before they leave, as torch does, lest low precision overflows.
    """

    carries_waybill = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.gain = 1.0

    def on(self, group: Group) -> "Average":
        """The same among other ranks."""
        return Average(group)

    def factor(self, ranks: int) -> float:
        """Divide by the number of ranks."""
        return 1 / ranks

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:  # noqa: ARG002  # all are alike
        """Begin to add up."""
        return self._group.all_reduce(bucket.storage)

    def land(self, bucket: Bucket, number: int, pending: Pending, unusual: Unusual) -> None:  # noqa: ARG002
        """Wait until the storage holds the sum."""
        pending.wait(unusual)


class LowPrecisionAverage(Exchange):
    """Adds up, and divides what comes back, as torch does for gradients that are sent in low precision.

    Divided before they leave, the smallest ones would become zeros.
    """

    carries_waybill = True

    def on(self, group: Group) -> "LowPrecisionAverage":
        """The same among other ranks."""
        return LowPrecisionAverage(group)

    def begin(self, weight: float | None, ranks: int) -> None:  # noqa: ARG002
        """A step begins: note by what to divide."""
        self.gain = float(ranks)

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:  # noqa: ARG002
        """Begin to add up."""
        return self._group.all_reduce(bucket.storage)

    def land(self, bucket: Bucket, number: int, pending: Pending, unusual: Unusual) -> None:  # noqa: ARG002
        """Wait for the sum, and divide it."""
        pending.wait(unusual)
        bucket.gradients.div_(self.gain)
