"""A rank's counterparts on the other hosts: those with the same number on theirs."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

from paceline.comm.pending import WorkPending
from paceline.errors import CollectiveError


class Across:
    """Carries what a host's ranks have in common to the other hosts, once.

    Args:
        process_group: of the counterparts, in the order of the hosts.
        names: the counterparts as users know them.
    """

    def __init__(self, process_group: Any, names: Sequence[int]) -> None:
        self._process_group = process_group
        self._names = names
        self._sum = c10d.AllreduceOptions()
        self._sum.reduceOp = distributed.ReduceOp.SUM  # type: ignore[assignment]

    def all_reduce(self, tensor: Tensor) -> "AcrossPending":
        """Begin to add up a tensor over the hosts, in place."""
        return AcrossPending(self._process_group.allreduce([tensor], self._sum), tensor, self._names)

    def broadcast(self, tensors: Sequence[Tensor], *, host: int, bytes_at_once: int) -> None:
        """Make tensors equal to those of one host, many in one message."""
        distributed._broadcast_coalesced(  # type: ignore[attr-defined]
            self._process_group, list(tensors), bytes_at_once, host
        )


class AcrossPending(WorkPending):
    """A collective of the counterparts, whose failure says who they are.

    Args:
        work: torch's.
        tensor: what it fills.
        names: the counterparts.
    """

    # There is more to look at than the counterparts: this host's other ranks.
    _first_look = _next_look = timedelta(seconds=0.1)

    def __init__(self, work: Any, tensor: Tensor, names: Sequence[int]) -> None:
        super().__init__(work, tensor)
        self._names = names

    def wait(self, unusual: Callable[[], None]) -> Tensor:
        """Wait until the tensor holds the result; returns it."""
        try:
            return super().wait(unusual)
        except RuntimeError as error:
            if self._failed():
                raise CollectiveError(
                    f"hosts lost each other (ranks: {list(self._names)}, {error})"
                ) from error
            raise  # from unusual


def open_across(ranks: Sequence[int], **options: Any) -> Any:
    """Make a process group of some of the default group's ranks, which all do this at once."""
    return distributed.new_group(ranks, backend="gloo", use_local_synchronization=True, **options)
