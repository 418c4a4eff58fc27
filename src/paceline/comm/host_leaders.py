"""Host leaders: the ranks that reduce between hosts what each host's ranks have reduced in shared memory.

Each host has as many leaders as the host with the fewest ranks has ranks, each for its own slice. The leaders
of the same number on all hosts form a process group.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

from paceline.comm.pending import OnSlow, WorkPending
from paceline.errors import CollectiveError
from paceline.torch_private import broadcast_coalesced


class HostLeaders:
    """The leaders of the same number, one per host, of which this rank is one.

    Args:
        process_group: the leaders, in the order of the hosts.
        ranks: the leaders as users know them.
    """

    def __init__(self, process_group: Any, ranks: Sequence[int]) -> None:
        self._process_group = process_group
        self._ranks = ranks
        self._sum = c10d.AllreduceOptions()
        self._sum.reduceOp = distributed.ReduceOp.SUM  # type: ignore[assignment]

    def all_reduce(self, tensor: Tensor) -> "LeadersPending":
        """Begin to add up a tensor over the hosts, in place."""
        return LeadersPending(self._process_group.allreduce([tensor], self._sum), tensor, self._ranks)

    def broadcast(self, tensors: Sequence[Tensor], *, host: int, bytes_at_once: int) -> None:
        """Make tensors equal to those of one host, many in one message."""
        broadcast_coalesced(self._process_group, list(tensors), bytes_at_once, host)


class LeadersPending(WorkPending):
    """A collective of host leaders, whose error names them.

    Args:
        work: torch's.
        tensor: what it fills.
        ranks: the leaders.
    """

    # While it waits for other hosts, a leader also has to look at the other ranks of its own host.
    _first_look = _next_look = timedelta(seconds=0.1)

    def __init__(self, work: Any, tensor: Tensor, ranks: Sequence[int]) -> None:
        super().__init__(work, tensor, lambda: timedelta.max)  # gloo's works have an end themselves
        self._ranks = ranks

    def wait(self, on_slow: OnSlow) -> Tensor:
        """Wait until the tensor holds the result; returns it."""
        try:
            return super().wait(on_slow)
        except RuntimeError as error:
            if self._failed():
                raise CollectiveError(
                    f"the reduction between hosts failed (ranks: {list(self._ranks)}, {error})",
                    f"the reduction between hosts failed: {error}",
                ) from error
            raise  # from on_slow
