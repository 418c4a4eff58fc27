"""Recordings are bounded, can be read at any time, and errors say what is missing."""

import itertools
import multiprocessing
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import RecordingError
from paceline.recording import ring_buffer
from paceline.recording.reader import PlanRecording, read_latest, read_recording
from paceline.recording.recorder import (
    Recorder,
    optimizer_began,
    optimizer_ended,
    state_saved,
    waited_for_loader,
)
from paceline.recording.rows import (
    BucketColumn,
    StepColumn,
    StepKind,
    SumColumn,
    row_sums,
    row_width,
)
from paceline.recording.writer import PlanDescription, PlanWriter, WrapperDescription

PLAN = PlanDescription([[2, 1], [0]], "the average")


def describe(rank: int) -> WrapperDescription:
    return WrapperDescription(
        rank=rank,
        world=2,
        group=[0, 1],
        module="Net",
        slots=["a", "b", "c"],
        nbytes=[40, 400, 400],
        backend="gloo",
        transport="c10d",
        hosts=1,
        device="cpu",
        first_cap=1000,
        cap=2000,
        wrapper=0,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A clock that advances by one each time it is read; recorders of other tests had another one."""
    monkeypatch.setattr("paceline.recording.recorder._recorders", weakref.WeakSet())
    now = [1000]

    def tick() -> int:
        now[0] += 1
        return now[0]

    monkeypatch.setattr("paceline.recording.recorder.time.monotonic_ns", tick)
    return tick


def new_recorder(folder: Path | None) -> Recorder:
    """A recorder of rank 0; what stands for the process group is the rank."""
    recorder = Recorder([7], describe=describe, folder=folder)
    recorder.follow(PLAN, 0)
    return recorder


def run(recorder: Recorder, steps: int) -> None:
    for step in range(steps):
        recorder.count(8)
        recorder.forward_began()
        recorder.buffers_synced()
        recorder.forward_ended()
        recorder.backward_began(step)
        for bucket in range(2):
            recorder.ready(bucket, 1 - bucket)
            recorder.launched(bucket)
        recorder.backward_ended()
        for bucket in range(2):
            recorder.reduced(bucket)
        recorder.all_reduced()
        recorder.step_ended()
        optimizer_began([7])
        optimizer_ended([7])
        optimizer_began([8])  # another module's
        optimizer_ended([8])


def recorded(folder: Path, steps: int) -> PlanRecording:
    recorder = new_recorder(folder)
    run(recorder, steps)
    recorder.close()
    [recording] = read_recording(folder)
    return recording


@pytest.mark.usefixtures("clock")
def test_a_step_is_recorded_as_it_happened(tmp_path: Path) -> None:
    recording = recorded(tmp_path, 2)
    row = recording.rows[1]
    stamps = [
        *(
            StepColumn.FORWARD_START,
            StepColumn.BUFFERS_END,
            StepColumn.FORWARD_END,
            StepColumn.BACKWARD_START,
        ),
        *(len(StepColumn) + BucketColumn.READY, len(StepColumn) + BucketColumn.LAUNCH),
        *(
            len(StepColumn) + len(BucketColumn) + column
            for column in (BucketColumn.READY, BucketColumn.LAUNCH)
        ),
        StepColumn.BACKWARD_END,
        *(len(StepColumn) + bucket * len(BucketColumn) + BucketColumn.REDUCED for bucket in range(2)),
        *(StepColumn.ALL_REDUCED, StepColumn.END, StepColumn.OPTIMIZER_START, StepColumn.OPTIMIZER_END),
    ]
    assert [row[stamp] - row[StepColumn.BEGIN] for stamp in stamps] == list(range(len(stamps)))
    assert (row[StepColumn.STEP], row[StepColumn.FORWARDS], row[StepColumn.COUNT]) == (1, 1, 8)
    assert row[len(StepColumn) + BucketColumn.LAST_SLOT] == 1
    assert [row[StepColumn.STEP] for row in recording.rows] == [0, 1]
    assert (
        recording.sums[0][SumColumn.STEP]
        == recording.rows[1][StepColumn.BEGIN] - recording.rows[0][StepColumn.BEGIN]
    )
    assert recording.description["slots"] == ["a", "b", "c"]
    assert recording.description["buckets"] == [
        {"slots": [2, 1], "nbytes": 800},
        {"slots": [0], "nbytes": 40},
    ]


@pytest.mark.usefixtures("clock")
def test_what_happens_between_steps_is_recorded_with_the_step_before(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    run(recorder, 2)
    recorder.evaluation_began()
    recorder.evaluation_ended()
    waited_for_loader(0)
    state_saved(0)
    run(recorder, 1)
    recorder.close()
    [recording] = read_recording(tmp_path)
    row = recording.rows[1]
    # As it is in every step of ``run``, an optimizer of other parameters stepped.
    assert [each[StepColumn.OTHER_OPTIMIZERS] for each in recording.rows] == [1, 1, 1]
    assert (row[StepColumn.EVALUATION], row[StepColumn.EVALUATIONS]) == (1, 1)
    # Since the end of the evaluation at most, however early it was asked for.
    assert (row[StepColumn.LOADER], row[StepColumn.SAVING]) == (1, 2)
    assert row[StepColumn.LOADER_START] > row[StepColumn.OPTIMIZER_END]
    assert row[StepColumn.KNOWN_BEFORE_LOADER] == 1
    assert not any(recording.rows[0][column] for column in (StepColumn.EVALUATION, StepColumn.LOADER))


@pytest.mark.usefixtures("clock")
def test_what_happens_inside_of_a_step_is_recorded_with_its_place(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    waited_for_loader(0)  # before the first step there is none that it could be in
    for step in range(2):
        recorder.forward_began()
        recorder.forward_ended()
        recorder.accumulation_began()
        recorder.accumulated()
        waited_for_loader(0)
        recorder.forward_began()
        recorder.forward_ended()
        state_saved(0)
        recorder.evaluation_began()
        recorder.evaluation_ended()
        recorder.backward_began(step)
        recorder.step_ended()
        state_saved(0)
        optimizer_began([7])
        optimizer_ended([7])
        waited_for_loader(0)
    recorder.close()
    [recording] = read_recording(tmp_path)
    inside = (StepColumn.LOADER_INSIDE, StepColumn.SAVING_INSIDE, StepColumn.EVALUATION_INSIDE)
    after = (StepColumn.LOADER, StepColumn.SAVING, StepColumn.EVALUATION, StepColumn.EVALUATIONS)
    for row in recording.rows:
        assert [row[column] for column in inside] == [1, 1, 1]
        assert [row[column] for column in after] == [1, 1, 0, 0]
        assert row[StepColumn.KNOWN_BEFORE_FORWARD] == 1
        assert (row[StepColumn.KNOWN_BEFORE_OPTIMIZER], row[StepColumn.KNOWN_BEFORE_LOADER]) == (1, 1)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("event", "column"), [(waited_for_loader, StepColumn.LOADER), (state_saved, StepColumn.SAVING)]
)
def test_what_another_thread_loads_or_saves_is_no_wait(
    tmp_path: Path, event: Callable[[int], None], column: StepColumn
) -> None:
    recorder = new_recorder(tmp_path)
    run(recorder, 1)
    beside = threading.Thread(target=event, args=(0,))
    beside.start()
    beside.join()
    assert recorder._row[column] == 0
    event(0)
    assert recorder._row[column] > 0


@pytest.mark.usefixtures("clock")
def test_the_exchange_of_join_is_recorded_and_is_of_the_last_forward(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    for step in range(2):
        recorder.forward_began()
        if step == 0:
            recorder.joined()
        recorder.forward_ended()
        recorder.backward_began(step)
        recorder.step_ended()
    recorder.close()
    [recording] = read_recording(tmp_path)
    first, second = recording.rows
    assert first[StepColumn.JOIN_END] - first[StepColumn.FORWARD_START] == 1
    assert second[StepColumn.JOIN_END] == 0


@pytest.mark.usefixtures("clock")
def test_a_rank_without_inputs_waits_until_the_join_ends(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    run(recorder, 1)
    recorder.inputs_ran_out()
    for step in (1, 2):
        recorder.inputs_ran_out()
        recorder.backward_began(step)
        recorder.step_ended(StepKind.NO_INPUTS)
    recorder.join_ended()
    run(recorder, 1)
    recorder.close()
    [recording] = read_recording(tmp_path)
    # The clock ticks when inputs run out, and when the next step begins, or the join ends.
    assert [row[StepColumn.WITHOUT_INPUTS] for row in recording.rows] == [1, 1, 1, 0]


@pytest.mark.usefixtures("clock")
def test_an_optimizer_that_calls_forward_and_backward_is_recorded_around_them(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    for number in range(2):
        optimizer_began([7])
        for closure in range(2):
            recorder.forward_began()
            recorder.forward_ended()
            recorder.backward_began(2 * number + closure)
            recorder.step_ended()
        optimizer_ended([7])
    recorder.close()
    [recording] = read_recording(tmp_path)
    for row, later in itertools.pairwise(recording.rows):
        assert row[StepColumn.OPTIMIZER_START] == row[StepColumn.END]
        assert row[StepColumn.END] < row[StepColumn.OPTIMIZER_END] <= later[StepColumn.BEGIN]
    # Inside the optimizer, its part lasts until the next forward.
    first, second = recording.rows[:2]
    assert first[StepColumn.OPTIMIZER_END] == second[StepColumn.BEGIN]
    for row in recording.rows:
        inside = row[StepColumn.OPTIMIZER_END] - row[StepColumn.OPTIMIZER_START]
        assert row[StepColumn.OPTIMIZER] == inside == 1


@pytest.mark.usefixtures("clock")
def test_the_time_of_another_wrapper_is_recorded_unless_this_one_is_in_its_own_parts(tmp_path: Path) -> None:
    one, other = new_recorder(tmp_path / "one"), Recorder([9], describe=describe, folder=tmp_path / "other")
    other.follow(PLAN, 0)
    for step in range(3):
        one.forward_began()
        other.forward_began()  # inside of the other's
        other.forward_ended()
        one.forward_ended()
        other.backward_began(step)  # one waits for it, until its own begins
        one.backward_began(step)
        other.step_ended()
        one.step_ended()
        optimizer_began([9])
        optimizer_ended([9])
    for recorder in (one, other):
        recorder.close()
    [recording] = read_recording(tmp_path / "one")
    for row in recording.rows[1:]:  # in the first step, writing the description also reads the clock
        assert row[StepColumn.OTHERS_INSIDE] == 1
        assert row[StepColumn.OTHERS] == 1


@pytest.mark.usefixtures("clock")
def test_forwards_without_gradients_and_backwards_that_accumulate_are_parts_for_other_wrappers(
    tmp_path: Path,
) -> None:
    one, other = new_recorder(tmp_path / "one"), Recorder([9], describe=describe, folder=tmp_path / "other")
    other.evaluation_began()
    other.evaluation_ended()  # before the first step of the one
    for step in range(3):
        one.forward_began()
        one.forward_ended()
        other.evaluation_began()
        other.evaluation_ended()
        one.backward_began(step)
        one.step_ended()
        other.forward_began()
        other.forward_ended()
        other.accumulation_began()
        other.accumulated()
    one.close()
    [recording] = read_recording(tmp_path / "one")
    for row in recording.rows:
        assert row[StepColumn.OTHERS_INSIDE] == 1
        assert row[StepColumn.OTHERS] == 2


@pytest.mark.usefixtures("clock")
def test_a_forward_without_gradients_inside_of_an_optimizer_is_part_of_that(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    optimizer_began([7])
    recorder.forward_began()
    recorder.forward_ended()
    recorder.backward_began(0)
    recorder.step_ended()
    recorder.evaluation_began()
    recorder.evaluation_ended()
    optimizer_ended([7])
    recorder.close()
    [recording] = read_recording(tmp_path)
    row = recording.rows[0]
    assert (row[StepColumn.OPTIMIZER], row[StepColumn.EVALUATION]) == (1, 0)


@pytest.mark.usefixtures("clock")
def test_a_shared_backward_ends_before_the_first_wrapper_waits_for_other_ranks(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    for step in range(2):
        recorder.forward_began()
        recorder.forward_ended()
        recorder.backward_began(step)
        for bucket in range(2 if step else 1):  # of the first step's second bucket, nothing is known yet
            recorder.ready(bucket, 1 - bucket)
        recorder.shared_backward_ended()
        recorder.backward_ended()
        recorder.step_ended()
    recorder.close()
    [recording] = read_recording(tmp_path)
    first, second = recording.rows
    for row in recording.rows:
        assert row[StepColumn.END] - row[StepColumn.BACKWARD_END] == 1
    assert (first[StepColumn.OTHERS_IN_BACKWARD], second[StepColumn.OTHERS_IN_BACKWARD]) == (0, 1)


def test_under_join_forward_and_buffers_begin_when_ranks_have_told_who_has_inputs() -> None:
    row = [0] * row_width(1)
    row[StepColumn.BEGIN] = row[StepColumn.FORWARD_START] = 100
    row[StepColumn.JOIN_END], row[StepColumn.BUFFERS_END], row[StepColumn.FORWARD_END] = 150, 170, 200
    sums = row_sums(row, next_begin=300)
    assert [sums[each] for each in (SumColumn.JOIN, SumColumn.BUFFERS, SumColumn.FORWARD)] == [50, 20, 30]
    row[StepColumn.BUFFERS_END] = 0
    sums = row_sums(row, next_begin=300)
    assert [sums[each] for each in (SumColumn.JOIN, SumColumn.BUFFERS, SumColumn.FORWARD)] == [50, 0, 50]


def test_memory_is_bounded_and_sums_cover_every_step(tmp_path: Path) -> None:
    columns, steps = row_width(2), 60_000
    ring = PlanWriter(describe(0), PLAN, 0, unit="samples", folder=tmp_path).ring
    size = (tmp_path / "rank0-wrapper0-plan0.rows").stat().st_size
    row = [0] * columns
    for step in range(steps):
        row[StepColumn.STEP] = step
        row[StepColumn.BEGIN] = 10 + 7 * step
        row[StepColumn.COUNT] = 3
        ring.append(row, row_sums(row, next_begin=17 + 7 * step))
    assert (tmp_path / "rank0-wrapper0-plan0.rows").stat().st_size == size < 5_000_000
    [recording] = read_recording(tmp_path)
    assert recording.written == steps
    kept = [row[StepColumn.STEP] for row in recording.rows]
    assert kept == list(range(steps - len(kept), steps))
    assert len(kept) > 10_000
    assert sum(sums[SumColumn.STEPS] for sums in recording.sums) == steps
    assert sum(sums[SumColumn.STEP] for sums in recording.sums) == 7 * steps
    assert sum(sums[SumColumn.COUNT] for sums in recording.sums) == 3 * steps
    assert {sums[SumColumn.STEPS] for sums in recording.sums[:-1]} == {32}
    assert [sums[SumColumn.FIRST_STEP] for sums in recording.sums] == list(range(0, steps, 32))
    assert {sums[SumColumn.LONGEST] for sums in recording.sums} == {7}
    for rows in (5, steps % len(kept) + 5):  # the second of them begin at the end of the file
        [newest] = read_latest(tmp_path, rows=rows)
        assert [row[StepColumn.STEP] for row in newest.rows] == list(range(steps - rows, steps))


def test_the_recording_of_a_killed_rank_can_be_read(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=record_and_die, args=(tmp_path,))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    [recording] = read_recording(tmp_path)
    # The row of the last one was not closed.
    assert [row[StepColumn.STEP] for row in recording.rows] == list(range(99))


def record_and_die(folder: Path) -> None:
    recorder = new_recorder(folder)
    run(recorder, 100)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_forked_child_does_not_change_the_recording(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    run(recorder, 3)
    child = multiprocessing.get_context("fork").Process(target=recorder.close)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    [recording] = read_recording(tmp_path)
    assert [row[StepColumn.STEP] for row in recording.rows] == [0, 1]


@pytest.mark.usefixtures("clock")
def test_accumulation_second_backwards_lost_steps_and_steps_without_inputs_are_recorded(
    tmp_path: Path,
) -> None:
    recorder = new_recorder(tmp_path)
    for _ in range(3):
        recorder.forward_began()
        recorder.forward_ended()
    recorder.backward_began(0)
    recorder.step_ended()
    recorder.backward_began(1)  # over the same forward
    recorder.step_ended(StepKind.LOST)
    recorder.backward_began(2)
    recorder.step_ended(StepKind.NO_INPUTS)
    recorder.close()
    [recording] = read_recording(tmp_path)
    first, second, third = recording.rows
    assert first[StepColumn.FORWARDS] == 3
    assert first[StepColumn.FORWARD_START] - first[StepColumn.BEGIN] == 4
    assert (second[StepColumn.FORWARDS], second[StepColumn.KIND]) == (0, StepKind.LOST)
    assert second[StepColumn.BEGIN] == second[StepColumn.BACKWARD_START]
    assert third[StepColumn.KIND] == StepKind.NO_INPUTS


def test_each_plan_has_its_own_files_and_of_many_plans_the_last_are_kept(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    for buckets in range(1, 13):
        recorder.follow(PlanDescription([[0]] * buckets, "the average"), 0)
        recorder.forward_began()
        recorder.backward_began(buckets)
        recorder.launched(buckets - 1)
        recorder.step_ended()
    recorder.close()
    recordings = read_recording(tmp_path)
    assert [recording.plan for recording in recordings] == list(range(4, 12))
    assert [recording.rows[0][StepColumn.STEP] for recording in recordings] == list(range(5, 13))


def test_the_wrapper_is_described_anew_for_each_group(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    run(recorder, 1)
    recorder.follow(PLAN, 1)
    run(recorder, 2)
    recorder.close()
    recordings = read_recording(tmp_path)
    assert [(each.rank, each.plan, each.written) for each in recordings] == [(0, 0, 1), (1, 1, 2)]


def test_a_recording_in_memory_can_be_written(tmp_path: Path) -> None:
    recorder = new_recorder(None)
    run(recorder, 5)
    recorder.count(2, "tokens")
    recorder.write(tmp_path / "new" / "folder")
    [recording] = read_recording(tmp_path / "new" / "folder")
    assert len(recording.rows) == 5
    assert recording.description["unit"] == "tokens"


def test_steps_are_kept_in_memory_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(ring_buffer.os, "posix_fallocate", full)
    recorder = new_recorder(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"steps are not recorded in .* but in memory.*no space left"):
        run(recorder, 3)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    recorder.write(tmp_path / "later")
    [recording] = read_recording(tmp_path / "later")
    assert len(recording.rows) == 3


def test_counting_goes_on_in_memory_if_the_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    recorder = new_recorder(folder)
    run(recorder, 3)
    shutil.rmtree(folder)
    with pytest.warns(RuntimeWarning, match=r"steps are not recorded in .*gone but in memory"):
        recorder.count(2, "tokens")
    run(recorder, 2)
    recorder.count(2, "images")
    recorder.write(tmp_path / "later")
    [recording] = read_recording(tmp_path / "later")
    assert len(recording.rows) == 5
    assert recording.description["unit"] == "images"


def test_disk_space_is_reserved_in_pieces_and_when_the_disk_is_full_the_last_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = new_recorder(tmp_path)
    run(recorder, 5)
    path = tmp_path / "rank0-wrapper0-plan0.rows"
    assert path.stat().st_blocks * 512 < 400_000 < path.stat().st_size
    reserve, reserved = os.posix_fallocate, []

    def hardly(*arguments: int) -> None:
        reserved.append(arguments)
        if len(reserved) > 2:
            raise OSError("no space left on device")
        reserve(*arguments)

    monkeypatch.setattr(ring_buffer.os, "posix_fallocate", hardly)
    run(recorder, 3000)
    recorder.close()
    [recording] = read_recording(tmp_path)
    assert len(reserved) == 3
    assert recording.written == 3005
    steps = [row[StepColumn.STEP] for row in recording.rows]
    assert 500 < len(steps) < 1500
    assert steps == list(range(3000 - len(steps), 3000))
    assert sum(sums[SumColumn.STEPS] for sums in recording.sums) == 3005


@pytest.mark.parametrize(
    ("suffix", "content", "words"),
    [
        ("json", None, "there is no recording in the folder"),
        ("json", b"{", "is not the description of a recording"),
        ("json", b"[1]", "is not the description of a recording"),
        ("json", b'{"version": 99}', "written by another version of paceline"),
        ("rows", None, "the recording is damaged"),
        ("rows", b"x" * 10, "truncated after 10 bytes"),
        ("rows", b"\0" * 80_000, "bad header"),
        ("rows", slice(80_000), "truncated, or of another plan"),
    ],
)
def test_the_error_says_what_cannot_be_read(
    tmp_path: Path, suffix: str, content: bytes | slice | None, words: str
) -> None:
    recorded(tmp_path, 3)
    path = tmp_path / f"rank0-wrapper0-plan0.{suffix}"
    written = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(written[content] if isinstance(content, slice) else content)
    with pytest.raises(RecordingError, match=words):
        read_recording(tmp_path)


def test_the_error_says_that_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="there is no such folder"):
        read_recording(tmp_path / "none")
