"""What every way from a full bucket to its average has in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import OnSlow, Pending
from paceline.ddp.buckets.bucket_set import Bucket


class Exchange(ABC):
    """How buckets are averaged across ranks.

    Args:
        group: the ranks.

    Attributes:
        sum_per_result: times what ``wait`` leaves in a bucket of unscaled gradients, it is the sum over the
            ranks: 1 if that is the sum, the number of ranks if it is the average.
        carries_report: whether the elements behind a bucket's gradients are summed over the ranks, exactly.
        one_at_a_time: whether a bucket may be launched only when the one before it is reduced.
        supports_join: whether it works under join, where some ranks have no inputs left.
        name: its name in errors, logs and recordings.
    """

    name = "the average"
    carries_report = False
    one_at_a_time = False
    supports_join = True

    def __init__(self, group: Group) -> None:
        self._group = group
        self.sum_per_result = float(group.size)

    @property
    def description(self) -> str:
        """What recordings and ``paceline report`` say of it."""
        return self.name

    @property
    def signature(self) -> str:
        """What ranks compare of a hook; empty if there is none."""
        return ""

    @abstractmethod
    def for_group(self, group: Group) -> "Exchange":
        """The same exchange among other ranks."""

    @abstractmethod
    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:
        """Begin to reduce a bucket."""

    @abstractmethod
    def wait(self, bucket: Bucket, number: int, pending: Pending, on_slow: OnSlow) -> None:
        """Wait for a launched bucket; afterwards it holds the result."""

    def settle(self) -> bool:
        """Choose how the next steps average; whether buckets have to be laid out anew, on all ranks."""
        return False

    def factor(self, ranks: int) -> float:  # noqa: ARG002
        """What gradients are multiplied by before the reduction, if that many ranks count the same."""
        return 1.0

    def begin(self, weight: float | None, ranks: int) -> None:  # noqa: B027  # most need not know
        """Get ready for a step.

        Args:
            weight: the sum of this rank's weights since the last average, under ``weigh``.
            ranks: the number of ranks that the sum is divided by.
        """

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:  # noqa: B027  # as begin
        """A step has ended well on every rank.

        Args:
            parameters: all of them.
            used: for each parameter the number of ranks that used it.
            total: the sum of the ranks' weights, if there were any.
        """
