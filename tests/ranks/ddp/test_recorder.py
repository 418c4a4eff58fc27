"""What the recorder writes down of real steps."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel
from paceline.recording.reader import Chapter, read
from paceline.recording.rows import BucketColumn, Column, Kind, Sum
from paceline.testing import RankPool

STEPS = 6


class Net(nn.Module):
    """Two buckets, a module buffer, and a place to fail in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 4))

    def forward(self, x: Tensor, *, fail: bool = False) -> Tensor:
        if fail:
            raise ZeroDivisionError
        return self.layers(x).square().mean()


def wrap(**options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.01, **options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    ddp.recorder.count(5)
    ddp(torch.randn(5, 8)).backward()
    optimizer.step()


def train(_: int, folder: Path, transport: str) -> None:
    ddp, optimizer = wrap(transport=transport)
    for _ in range(STEPS):
        step(ddp, optimizer)
        with torch.no_grad():
            ddp(torch.randn(5, 8))
    ddp.recorder.write(folder)


def learned(folder: Path) -> list[Chapter]:
    """Each rank's rows of the plan that the first step taught."""
    return [chapter for chapter in read(folder) if chapter.plan == 1]


def bucket_columns(row: Any, column: BucketColumn) -> list[int]:
    return list(row[len(Column) + column :: len(BucketColumn)])


def check_row(row: Any, about: dict[str, Any]) -> None:
    # After a forward without gradients, module buffers are left alone once, as in torch's wrapper.
    places = [column for column in Column if row[column] or column != Column.BUFFERS_END]
    stamps = [row[Column.BEGIN], *(row[place] for place in places if Column.FORWARDS < place < Column.COUNT)]
    assert stamps == sorted(stamps)
    assert min(stamps) > 0
    assert (row[Column.FORWARDS], row[Column.KIND], row[Column.COUNT]) == (1, Kind.ORDINARY, 5)
    ready, last, launch, done = (bucket_columns(row, column) for column in BucketColumn)
    assert launch == sorted(launch)
    assert done == sorted(done)
    for first, second, third in zip(ready, launch, done, strict=True):
        assert row[Column.BACKWARD_START] < first <= second < third <= row[Column.LANDED]
    for slot, bucket in zip(last, about["buckets"], strict=True):
        assert slot in bucket["slots"]
    # Gradients come from the last layer to the first, and of a layer's the weight's is the later.
    assert [about["slots"][slot] for slot in last] == ["layers.2.weight", "layers.0.weight"]


@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_steps_are_recorded_in_order(pair: RankPool, tmp_path: Path, transport: str) -> None:
    pair.run(train, tmp_path, transport)
    chapters = learned(tmp_path)
    assert [chapter.rank for chapter in chapters] == [0, 1]
    for chapter in chapters:
        assert chapter.about["transport"] == {"auto": "shared memory", "c10d": "c10d"}[transport]
        assert [row[Column.STEP] for row in chapter.rows] == list(range(1, STEPS))
        for row in chapter.rows:
            check_row(row, chapter.about)
        assert sum(sums[Sum.STEPS] for sums in chapter.sums) == STEPS - 1


def in_the_environments_folder(rank: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_RECORD", str(folder))
        ddp, optimizer = wrap()
    step(ddp, optimizer)
    with ddp.no_sync():
        step(ddp, optimizer)
    step(ddp, optimizer)
    with contextlib.suppress(Exception):  # on the other rank it is the word of this one
        ddp(torch.randn(5, 8), fail=rank == 0).backward()
    step(ddp, optimizer)
    with ddp.join():
        for _ in range(1 + rank):
            step(ddp, optimizer)
    del ddp, optimizer  # which closes the last row


def test_accumulation_lost_steps_and_shadows_are_recorded(pair: RankPool, tmp_path: Path) -> None:
    pair.run(in_the_environments_folder, tmp_path)
    first, second = learned(tmp_path)
    assert [row[Column.FORWARDS] for row in second.rows] == [2, 1, 1, 1, 1]
    assert [row[Column.KIND] for row in second.rows] == [0, Kind.LOST, 0, 0, 0]
    assert [row[Column.KIND] for row in first.rows] == [0, Kind.LOST, 0, 0, Kind.SHADOW]
    assert [row[Column.STEP] for row in first.rows] == [row[Column.STEP] for row in second.rows]
