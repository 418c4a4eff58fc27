"""What the ranks of one host do together for an outer loop: one talks to other hosts, and tells the rest."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import StepError
from paceline.watch.rank_page import Activity

BYTES_AT_ONCE = 64 << 20


class HostRanks:
    """The ranks of this host, which are those of the wrapper's group.

    Args:
        wrapper: the wrapper.

    Attributes:
        speaker: the rank that talks to the other hosts.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper
        self.speaker = 0

    def tell(self, own: Sequence[float], *, failure: Exception | None) -> list[float]:
        """What the speaker says, on every rank; the others say zeros.

        Args:
            own: what this rank says.
            failure: what keeps the speaker from saying it. It is raised, and the other ranks raise, too.
        """
        group = self._wrapper._group
        told = torch.tensor([*own, float(failure is not None)], dtype=torch.float64)
        if group.size > 1:
            with self.waiting():
                told = group.all_reduce_on_host(told).wait(_ignore)
        if failure is not None:
            raise failure
        *said, has_failed = map(float, told.tolist())
        if has_failed:
            raise StepError(
                f"the exchange with other hosts has failed on rank {self.speaker} of this host: see its error"
            )
        return said

    def spread(self, value: Tensor) -> None:
        """Give the speaker's value to every rank."""
        group = self._wrapper._group.host or self._wrapper._group
        if group.size > 1:
            with self.waiting():
                group.broadcast([value], source=self.speaker, bytes_at_once=BYTES_AT_ONCE)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Have the watch say that ranks wait for each other in an outer step."""
        reducer, group = self._wrapper._reducer, self._wrapper._group
        reducer.turns.finish_telling(group)
        reducer.turns.finish_launched()
        with group.watch.waiting(Activity.OUTER, reducer.step_number, then=Activity.OUTSIDE):
            yield


def _ignore() -> None:
    """The watch tells who is late."""
