"""A process group in Python whose all-reduce fails: the error says where, and another group heals it."""

import re
from pathlib import Path
from typing import Any

import pytest
from bare_groups import BareGroup
from torch import Tensor
from torch.distributed import distributed_c10d
from wrappers import Net, refusal, train

from paceline import DistributedDataParallel
from paceline.testing import run_ranks

_c10d: Any = distributed_c10d


class LostWork(_c10d.Work):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def wait(self) -> None:
        raise self._error


class FailingGroup(BareGroup):
    """Fails in the given way, or not at all."""

    failure: Any = "fine"

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        if self.failure == "fine":
            return super().allreduce(tensors, options)
        if self.failure is ValueError:
            raise ValueError("down")
        return None if self.failure is None else LostWork(self.failure("lost"))


FAILURES: dict[str, tuple[Any, str]] = {
    "no work": (None, "returned None, and not a torch Work"),
    "a lost connection": (ConnectionError, "bucket 0 .* of step 1 was not reduced on rank"),
    "a runtime error": (RuntimeError, "bucket 0 .* of step 1 was not reduced on rank"),
    "the call": (ValueError, "down"),
}


def failing(rank: int, folder: Path, failure: Any) -> str:
    group = FailingGroup(folder, rank, 2)
    ddp = DistributedDataParallel(Net(), process_group=group)
    train(ddp, rank, 0)
    group.failure = failure
    said = refusal(lambda: train(ddp, rank, 1))
    assert said is not None
    (folder / "again").mkdir(exist_ok=True)
    ddp._update_process_group(BareGroup(folder / "again", rank, 2))
    train(ddp, rank, 2)
    return said[1]


@pytest.mark.parametrize("how", FAILURES)
def test_the_error_says_where_and_another_group_heals(tmp_path: Path, how: str) -> None:
    failure, text = FAILURES[how]
    for said in run_ranks(failing, 2, args=(tmp_path, failure), backend=None):
        assert re.search(text, said)
