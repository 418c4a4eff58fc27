"""The plain average: one all-reduce per bucket."""

from paceline.comm.group import Group
from paceline.comm.pending import OnSlow, Pending
from paceline.ddp.buckets.bucket_set import Bucket
from paceline.ddp.exchange.exchange import Exchange


class Average(Exchange):
    """Sums with one all-reduce per bucket.

    Gradients are divided before the reduction, as torch does, so that low precision does not overflow.
    """

    carries_report = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.sum_per_result = 1.0

    def for_group(self, group: Group) -> "Average":
        """The same exchange among other ranks."""
        return Average(group)

    def factor(self, ranks: int) -> float:
        """Divide by the number of ranks."""
        return 1 / ranks

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:  # noqa: ARG002  # all are alike
        """Launch the all-reduce of the bucket's storage."""
        return self._group.all_reduce(bucket.storage)

    def wait(self, bucket: Bucket, number: int, pending: Pending, on_slow: OnSlow) -> None:  # noqa: ARG002
        """Wait until the storage holds the sum."""
        pending.wait(on_slow)


class LowPrecisionAverage(Exchange):
    """Sums, and divides the result, as torch does for gradients that travel in low precision.

    Divided before the reduction, the smallest gradients would become zeros.
    """

    carries_report = True

    def for_group(self, group: Group) -> "LowPrecisionAverage":
        """The same exchange among other ranks."""
        return LowPrecisionAverage(group)

    def begin(self, weight: float | None, ranks: int) -> None:  # noqa: ARG002
        """Note the divisor of this step."""
        self.sum_per_result = float(ranks)

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:  # noqa: ARG002
        """Launch the all-reduce of the bucket's storage."""
        return self._group.all_reduce(bucket.storage)

    def wait(self, bucket: Bucket, number: int, pending: Pending, on_slow: OnSlow) -> None:  # noqa: ARG002
        """Wait for the sum, and divide it."""
        pending.wait(on_slow)
        bucket.gradients.div_(self.sum_per_result)
