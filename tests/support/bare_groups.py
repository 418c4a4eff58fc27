"""Process groups that are written in Python and have nothing but three collectives: no name, no store."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, distributed_c10d

_c10d: Any = distributed_c10d


class FullWork(_c10d.Work):
    """Wants a timeout, as C++ passes it, and has a future; never says that it is completed."""

    def __init__(self, work: Any, result: Any) -> None:
        super().__init__()
        self._work = work
        self._result = result

    def wait(self, timeout: timedelta) -> bool:
        assert timeout == timedelta(0)  # what C++ passes for none
        return bool(self._work.wait())

    def get_future(self) -> Any:
        return self._work.get_future()


class PlainWork(_c10d.Work):
    """Can only be waited for."""

    def __init__(self, work: Any, _: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> bool:
        return bool(self._work.wait())


def future_work(work: Any, result: Any) -> Any:
    """torch's own work around a future; it cannot be waited for with a timeout."""
    del result
    return torch._C._distributed_c10d._create_work_from_future(work.get_future())


WORKS: dict[str, Any] = {
    "torch's": lambda work, _: work,
    "of a future": future_work,
    "with a future": FullWork,
    "plain": PlainWork,
}


class BareGroup(ProcessGroup):
    """Sends by a hidden gloo, of which it shows nothing.

    Args:
        folder: where its ranks meet.
        rank: this rank.
        size: the number of ranks.
        work: what its collectives return, see ``WORKS``.
        seconds: gloo's timeout.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, work: str = "torch's", seconds: float = 10
    ) -> None:
        super().__init__(rank, size)
        store = distributed.FileStore(str(folder / "bare"), size)
        self._hidden = _c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
        self._work = WORKS[work]
        self.calls: list[str] = []

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        self.calls.append("allreduce")
        return self._work(self._hidden.allreduce(tensors, options), tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        self.calls.append("broadcast")
        return self._work(self._hidden.broadcast(tensors, options), tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Any:
        self.calls.append("allgather")
        return self._work(self._hidden.allgather(outputs, inputs, options), outputs)
