"""What is read out of recordings of real steps."""

import time
from pathlib import Path

import torch
from click.testing import CliRunner
from torch import Tensor, nn

from paceline import DistributedDataParallel
from paceline.testing import RankPool
from paceline.tools.main import main
from paceline.tools.report.lateness import Late
from paceline.tools.report.report import recorded

STEPS, SINCE, SECONDS = 40, 20, 0.03


class Slow(nn.Module):
    """Takes its time, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4))

    def forward(self, x: Tensor, *, seconds: float) -> Tensor:
        time.sleep(seconds)
        return self.layers(x).square().mean()


def train(rank: int, folder: Path, buffers: bool) -> None:
    net = Slow()
    if buffers:
        net.layers.append(nn.BatchNorm1d(4))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        late = SECONDS if rank == 1 and step >= SINCE else 0.0
        if buffers:  # in place of loading data
            time.sleep(late)
        optimizer.zero_grad()
        ddp(torch.randn(5, 8), seconds=0.0 if buffers else late).backward()
        optimizer.step()
    ddp.recorder.write(folder)


def late(folder: Path) -> Late:
    """Who is late in the end; before, on a busy machine, anyone may have been."""
    [(_, found)] = recorded(folder)
    [now] = [each for each in found.late if each.until is None]
    return now


def test_a_rank_that_is_slow_in_forward_is_named(pool: RankPool, tmp_path: Path) -> None:
    pool.run(train, tmp_path, False)
    found = late(tmp_path)
    assert (found.rank, found.part, found.where) == (1, "forward", "the end of backward")
    assert abs(found.since - SINCE) <= 2
    assert found.late_ms > SECONDS * 500
    output = CliRunner().invoke(main, ["report", str(tmp_path)]).output
    assert "Slow on ranks 0 and 1, 40 steps" in output
    assert "Rank 1 is late" in output


def test_a_rank_that_is_slow_with_its_data_is_named_where_buffers_are_awaited(
    pool: RankPool, tmp_path: Path
) -> None:
    pool.run(train, tmp_path, True)
    found = late(tmp_path)
    assert (found.rank, found.part, found.where) == (1, "data and the rest", "the start of forward")
