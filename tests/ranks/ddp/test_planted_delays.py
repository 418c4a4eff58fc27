"""Delays that are planted on one rank: the live line and the report name the rank and the part of its step.

Ranks wait for each other in every step, so a delay makes parts of other ranks' steps longer too.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel
from paceline.testing import RankPool
from paceline.tools.report.analysis import analyse_recording
from paceline.tools.run.progress import SlowestRank, read_progress

# More than the fewest steps that make a straggler, because a busy machine disturbs some.
STEPS, SECONDS = 14, 0.05
DATA = "data loading and other"


class Net(nn.Module):
    """Calls a function in forward, and another one in backward."""

    def __init__(
        self, *, buffers: bool, in_forward: Callable[[], None], in_backward: Callable[[], None]
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)
        self.norm = nn.BatchNorm1d(64) if buffers else nn.Identity()
        self._in_forward, self._in_backward = in_forward, in_backward

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        self._in_forward()
        hidden.register_hook(lambda _: self._in_backward())
        return self.last(hidden)


@dataclass(frozen=True)
class Plant:
    """Where to sleep."""

    part: str
    rank: int = -1
    buffers: bool = False
    transport: str = "auto"


def train(rank: int, folder: Path, plant: Plant) -> int:
    """Train with one rank asleep in a part of each step; returns that rank."""
    late = plant.rank % torch.distributed.get_world_size()

    def sleep_in(part: str) -> Callable[[], None]:
        return lambda: time.sleep(SECONDS if (rank, part) == (late, plant.part) else 0.0)

    net = Net(buffers=plant.buffers, in_forward=sleep_in("forward"), in_backward=sleep_in("backward"))
    ddp = DistributedDataParallel(net, transport=plant.transport)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: sleep_in("optimizer")())
    for _ in range(STEPS):
        sleep_in(DATA)()
        optimizer.zero_grad()
        ddp(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
    ddp.recorder.write(folder)
    return late


def train_beside_load(rank: int, folder: Path, plant: Plant) -> int:
    """The same, while the first rank has another process that keeps a core busy."""
    if rank:
        return train(rank, folder, plant)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as load:
        try:
            return train(rank, folder, plant)
        finally:
            load.kill()


def check_named(folder: Path, rank: int, part: str) -> None:
    progress = read_progress(folder)
    assert progress is not None
    assert progress.slowest == SlowestRank(rank, pytest.approx(SECONDS, rel=0.5), part)
    assert f"rank {rank} slowest by " in str(progress)
    assert str(progress).endswith(f" ms, in {part}")
    [(_, analysis)] = analyse_recording(folder)
    assert f"Rank {rank} has been a straggler since step " in analysis.summary
    assert f"which wait for it; it is slow in {part}." in analysis.summary
    # On a busy machine another rank may be a little late.
    [late] = [each for each in analysis.stragglers if each.late_ms > SECONDS * 500]
    assert (late.rank, late.slow_part) == (rank, part)
    assert late.slow_part_ms == pytest.approx(SECONDS * 1e3, rel=0.5)


# The first rank is the source of buffers: others wait for it, while it may wait for nobody.
@pytest.mark.parametrize(
    ("buffers", "rank"),
    [(False, -1), (True, 0), (True, -1)],
    ids=["plain", "batch norm, first rank", "batch norm, last rank"],
)
@pytest.mark.parametrize("part", ["forward", "backward", "optimizer", DATA])
@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_the_rank_and_the_part_of_a_delay_are_named(
    ranks: RankPool, tmp_path: Path, rank: int, part: str, buffers: bool, transport: str
) -> None:
    late, *_ = ranks.run(train, tmp_path, Plant(part, rank, buffers, transport))
    check_named(tmp_path, late, part)


def test_a_rank_with_a_busy_process_is_not_taken_for_the_late_one(ranks: RankPool, tmp_path: Path) -> None:
    late, *_ = ranks.run(train_beside_load, tmp_path, Plant("backward"))
    check_named(tmp_path, late, "backward")
