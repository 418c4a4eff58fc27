"""The analysis of recordings of real steps."""

import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from paceline import DistributedDataParallel
from paceline.testing import RankPool
from paceline.tools.main import main
from paceline.tools.report.analysis import analyse_recording
from paceline.tools.report.stragglers import Straggler

# Long, because a busy machine adds some ten milliseconds to whatever a rank does; and in most steps, so that
# this delay is the usual one.
STEPS, SINCE, SECONDS = 30, 12, 0.25


class Slow(nn.Module):
    """Sleeps in forward, as long as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4))

    def forward(self, x: Tensor, *, seconds: float) -> Tensor:
        time.sleep(seconds)
        return self.layers(x).square().mean()


def train(rank: int, folder: Path, buffers: bool, late_rank: int = 1) -> None:
    net = Slow()
    if buffers:
        net.layers.append(nn.BatchNorm1d(4))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        late = SECONDS if rank == late_rank and step >= SINCE else 0.0
        if buffers:  # in place of loading data
            time.sleep(late)
        optimizer.zero_grad()
        ddp(torch.randn(5, 8), seconds=0.0 if buffers else late).backward()
        optimizer.step()
    ddp.recorder.write(folder)


def current_straggler(folder: Path) -> Straggler:
    """The worst straggler at the end; on a busy machine another rank may be a little late, or was before."""
    [(_, analysis)] = analyse_recording(folder)
    current, *_ = [each for each in analysis.stragglers if each.last_step is None]
    return current


def test_a_rank_that_is_slow_in_forward_is_named(pool: RankPool, tmp_path: Path) -> None:
    pool.run(train, tmp_path, False)
    found = current_straggler(tmp_path)
    assert (found.rank, found.slow_part, found.sync_point) == (1, "forward", "the end of backward")
    assert abs(found.first_step - SINCE) <= 2
    assert found.late_ms > SECONDS * 500
    output = CliRunner().invoke(main, ["report", str(tmp_path)]).output
    assert f"Slow on ranks 0 and 1, {STEPS} steps" in output
    assert "Rank 1 is a straggler" in output


# Others wait for rank 0's buffers before forward, while rank 0 waits for nobody before the end of backward.
@pytest.mark.parametrize(("late_rank", "point"), [(0, "the start of forward"), (1, "the end of backward")])
def test_a_rank_with_slow_data_is_named_where_others_wait_for_it(
    pool: RankPool, tmp_path: Path, late_rank: int, point: str
) -> None:
    pool.run(train, tmp_path, True, late_rank)
    found = current_straggler(tmp_path)
    expected = (late_rank, "data loading and other", point)
    assert (found.rank, found.slow_part, found.sync_point) == expected
