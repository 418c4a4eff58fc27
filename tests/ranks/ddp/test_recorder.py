"""What the recorder records of real steps."""

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel
from paceline.recording.reader import PlanRecording, read_recording
from paceline.recording.recorder import waited_for_loader
from paceline.recording.rows import BucketColumn, StepColumn, StepKind, SumColumn
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


def second_plans(folder: Path) -> list[PlanRecording]:
    """Each rank's recording of the plan that follows the first step."""
    return [recording for recording in read_recording(folder) if recording.plan == 1]


def bucket_columns(row: Any, column: BucketColumn) -> list[int]:
    return list(row[len(StepColumn) + column :: len(BucketColumn)])


def check_row(row: Any, description: dict[str, Any]) -> None:
    # After a forward without gradients, module buffers are left alone once, as in torch's wrapper.
    places = [column for column in StepColumn if row[column] or column != StepColumn.BUFFERS_END]
    stamps = [
        row[StepColumn.BEGIN],
        *(row[place] for place in places if StepColumn.FORWARDS < place < StepColumn.COUNT),
    ]
    assert stamps == sorted(stamps)
    assert min(stamps) > 0
    assert (row[StepColumn.FORWARDS], row[StepColumn.KIND], row[StepColumn.COUNT]) == (
        1,
        StepKind.ORDINARY,
        5,
    )
    ready, last, launch, reduced = (bucket_columns(row, column) for column in BucketColumn)
    assert launch == sorted(launch)
    assert reduced == sorted(reduced)
    for first, second, third in zip(ready, launch, reduced, strict=True):
        assert row[StepColumn.BACKWARD_START] < first <= second < third <= row[StepColumn.ALL_REDUCED]
    for slot, bucket in zip(last, description["buckets"], strict=True):
        assert slot in bucket["slots"]
    # Gradients come from the last layer to the first, and of a layer's the weight's is the later.
    assert [description["slots"][slot] for slot in last] == ["layers.2.weight", "layers.0.weight"]


@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_steps_are_recorded_in_order(pair: RankPool, tmp_path: Path, transport: str) -> None:
    pair.run(train, tmp_path, transport)
    recordings = second_plans(tmp_path)
    assert [recording.rank for recording in recordings] == [0, 1]
    for recording in recordings:
        assert recording.description["transport"] == {"auto": "shared memory", "c10d": "c10d"}[transport]
        assert [row[StepColumn.STEP] for row in recording.rows] == list(range(1, STEPS))
        for row in recording.rows:
            check_row(row, recording.description)
        assert sum(sums[SumColumn.STEPS] for sums in recording.sums) == STEPS - 1


def in_the_environments_folder(rank: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_RECORD", str(folder))
        ddp, optimizer = wrap()
    step(ddp, optimizer)
    with ddp.no_sync():
        step(ddp, optimizer)
    step(ddp, optimizer)
    with contextlib.suppress(Exception):  # the other rank is told, and raises too
        ddp(torch.randn(5, 8), fail=rank == 0).backward()
    step(ddp, optimizer)
    with ddp.join():
        for _ in range(1 + rank):
            step(ddp, optimizer)
    del ddp, optimizer  # which closes the last row


def test_accumulation_lost_steps_and_steps_without_inputs_are_recorded(
    pair: RankPool, tmp_path: Path
) -> None:
    pair.run(in_the_environments_folder, tmp_path)
    first, second = second_plans(tmp_path)
    assert [row[StepColumn.FORWARDS] for row in second.rows] == [2, 1, 1, 1, 1]
    assert [row[StepColumn.KIND] for row in second.rows] == [0, StepKind.LOST, 0, 0, 0]
    assert [row[StepColumn.KIND] for row in first.rows] == [0, StepKind.LOST, 0, 0, StepKind.NO_INPUTS]
    assert [row[StepColumn.STEP] for row in first.rows] == [row[StepColumn.STEP] for row in second.rows]


def fail_without_step(_: int, folder: Path) -> None:
    ddp, optimizer = wrap()
    step(ddp, optimizer)
    for kind in ("forward", "forward without gradients", "backward"):
        step(ddp, optimizer)
        with contextlib.suppress(ZeroDivisionError), ddp.no_sync():
            with torch.set_grad_enabled(kind != "forward without gradients"):
                loss = ddp(torch.randn(5, 8), fail=kind != "backward")
            loss.register_hook(lambda _: 1 / 0)
            loss.backward()
        asked = time.monotonic_ns()
        time.sleep(0.001)
        waited_for_loader(asked)
    step(ddp, optimizer)
    ddp.recorder.write(folder)


def test_what_follows_an_error_is_recorded_though_no_step_was_lost(pair: RankPool, tmp_path: Path) -> None:
    pair.run(fail_without_step, tmp_path)
    for recording in second_plans(tmp_path):
        waits = [(row[StepColumn.LOADER], row[StepColumn.LOADER_INSIDE]) for row in recording.rows]
        # The forward is of the second of these steps, the backward of the last one.
        assert [(after > 0, inside > 0) for after, inside in waits] == [
            (False, False), (True, True), (False, False), (False, True),
        ]  # fmt: skip
