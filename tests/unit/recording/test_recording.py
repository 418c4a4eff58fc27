"""Recordings: bounded, whole at any time, readable later, and honest about what they lack."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import RecordingError
from paceline.recording import ring as rings
from paceline.recording.chapter import About, Bucket, Plan
from paceline.recording.reader import Chapter, latest, read
from paceline.recording.recorder import Recorder, optimizer_began, optimizer_ended
from paceline.recording.ring import Ring
from paceline.recording.rows import VERSION, BucketColumn, Column, Kind, Sum, sums_of, width

PLAN = Plan([Bucket([2, 1], 800), Bucket([0], 40)], "the average")


def about(rank: int = 0) -> About:
    return About(
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
    """A clock that goes on by one at each look."""
    now = [1000]

    def tick() -> int:
        now[0] += 1
        return now[0]

    monkeypatch.setattr("paceline.recording.recorder.time.monotonic_ns", tick)
    return tick


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
            recorder.done(bucket)
        recorder.landed()
        recorder.ended()
        optimizer_began([7])
        optimizer_ended([7])
        optimizer_began([8])  # another module's
        optimizer_ended([8])


def recorded(folder: Path, steps: int) -> Chapter:
    recorder = Recorder([7], folder)
    recorder.follow(PLAN, about())
    run(recorder, steps)
    recorder.close()
    [chapter] = read(folder)
    return chapter


@pytest.mark.usefixtures("clock")
def test_a_step_is_written_down_as_it_happened(tmp_path: Path) -> None:
    chapter = recorded(tmp_path, 2)
    row = chapter.rows[1]
    stamps = [
        *(Column.FORWARD_START, Column.BUFFERS_END, Column.FORWARD_END, Column.BACKWARD_START),
        *(len(Column) + BucketColumn.READY, len(Column) + BucketColumn.LAUNCH),
        *(len(Column) + len(BucketColumn) + column for column in (BucketColumn.READY, BucketColumn.LAUNCH)),
        Column.BACKWARD_END,
        *(len(Column) + bucket * len(BucketColumn) + BucketColumn.DONE for bucket in range(2)),
        *(Column.LANDED, Column.END, Column.OPTIMIZER_START, Column.OPTIMIZER_END),
    ]
    assert [row[stamp] - row[Column.BEGIN] for stamp in stamps] == list(range(len(stamps)))
    assert (row[Column.STEP], row[Column.FORWARDS], row[Column.COUNT]) == (1, 1, 8)
    assert row[len(Column) + BucketColumn.LAST] == 1
    assert [row[Column.STEP] for row in chapter.rows] == [0, 1]
    assert chapter.sums[0][Sum.STEP] == chapter.rows[1][Column.BEGIN] - chapter.rows[0][Column.BEGIN]
    assert chapter.about["slots"] == ["a", "b", "c"]
    assert chapter.about["buckets"] == [{"slots": [2, 1], "nbytes": 800}, {"slots": [0], "nbytes": 40}]


def test_memory_is_bounded_and_sums_cover_every_step(tmp_path: Path) -> None:
    columns, steps = width(2), 60_000
    ring = Ring(columns, tmp_path / "rank0-wrapper0-plan0.rows")
    size = (tmp_path / "rank0-wrapper0-plan0.rows").stat().st_size
    row = [0] * columns
    for step in range(steps):
        row[Column.STEP] = step
        row[Column.BEGIN] = 10 + 7 * step
        row[Column.COUNT] = 3
        ring.append(row, sums_of(row, next_begin=17 + 7 * step, communication=0))
    assert (tmp_path / "rank0-wrapper0-plan0.rows").stat().st_size == size < 5_000_000
    described = {"version": VERSION, "buckets": [{}, {}], "rank": 0, "wrapper": 0, "plan": 0}
    (tmp_path / "rank0-wrapper0-plan0.json").write_text(json.dumps(described))
    [chapter] = read(tmp_path)
    assert chapter.written == steps
    kept = [row[Column.STEP] for row in chapter.rows]
    assert kept == list(range(steps - len(kept), steps))
    assert len(kept) > 10_000
    assert sum(sums[Sum.STEPS] for sums in chapter.sums) == steps
    assert sum(sums[Sum.STEP] for sums in chapter.sums) == 7 * steps
    assert sum(sums[Sum.COUNT] for sums in chapter.sums) == 3 * steps
    assert {sums[Sum.STEPS] for sums in chapter.sums[:-1]} == {32}
    assert [sums[Sum.FIRST] for sums in chapter.sums] == list(range(0, steps, 32))
    assert {sums[Sum.LONGEST] for sums in chapter.sums} == {7}
    for rows in (5, steps % len(kept) + 5):  # the second of them begin at the end of the file
        [newest] = latest(tmp_path, rows=rows)
        assert [row[Column.STEP] for row in newest.rows] == list(range(steps - rows, steps))


def test_a_killed_rank_leaves_what_it_had_recorded(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=record_and_die, args=(tmp_path,))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    [chapter] = read(tmp_path)
    assert [row[Column.STEP] for row in chapter.rows] == list(range(99))  # the last one was not closed


def record_and_die(folder: Path) -> None:
    recorder = Recorder([7], folder)
    recorder.follow(PLAN, about())
    run(recorder, 100)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_forked_child_leaves_the_record_alone(tmp_path: Path) -> None:
    recorder = Recorder([7], tmp_path)
    recorder.follow(PLAN, about())
    run(recorder, 3)
    child = multiprocessing.get_context("fork").Process(target=recorder.close)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    [chapter] = read(tmp_path)
    assert [row[Column.STEP] for row in chapter.rows] == [0, 1]


@pytest.mark.usefixtures("clock")
def test_accumulating_forwards_second_backwards_and_lost_steps(tmp_path: Path) -> None:
    recorder = Recorder([7], tmp_path)
    recorder.follow(PLAN, about())
    for _ in range(3):
        recorder.forward_began()
        recorder.forward_ended()
    recorder.backward_began(0)
    recorder.ended()
    recorder.backward_began(1)  # over the same forward
    recorder.ended(Kind.LOST)
    recorder.backward_began(2)
    recorder.ended(Kind.SHADOW)
    recorder.close()
    [chapter] = read(tmp_path)
    first, second, third = chapter.rows
    assert first[Column.FORWARDS] == 3
    assert first[Column.FORWARD_START] - first[Column.BEGIN] == 4
    assert (second[Column.FORWARDS], second[Column.KIND]) == (0, Kind.LOST)
    assert second[Column.BEGIN] == second[Column.BACKWARD_START]
    assert third[Column.KIND] == Kind.SHADOW


def test_another_plan_begins_a_chapter_and_of_many_the_last_are_kept(tmp_path: Path) -> None:
    recorder = Recorder([7], tmp_path)
    for buckets in range(1, 13):
        recorder.follow(Plan([Bucket([0], 40)] * buckets, "the average"), about())
        recorder.forward_began()
        recorder.backward_began(buckets)
        recorder.launched(buckets - 1)
        recorder.ended()
    recorder.close()
    chapters = read(tmp_path)
    assert [chapter.plan for chapter in chapters] == list(range(4, 12))
    assert [chapter.rows[0][Column.STEP] for chapter in chapters] == list(range(5, 13))


def test_what_was_kept_in_memory_can_be_written(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.follow(PLAN, about())
    run(recorder, 5)
    recorder.count(2, "tokens")
    recorder.write(tmp_path / "new" / "folder")
    [chapter] = read(tmp_path / "new" / "folder")
    assert len(chapter.rows) == 5
    assert chapter.about["unit"] == "tokens"


def test_without_room_steps_are_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(rings.os, "posix_fallocate", full)
    recorder = Recorder([7], tmp_path)
    recorder.follow(PLAN, about())
    with pytest.warns(RuntimeWarning, match=r"steps are not recorded in .*no space left"):
        run(recorder, 3)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    recorder.write(tmp_path / "later")
    [chapter] = read(tmp_path / "later")
    assert len(chapter.rows) == 3


def test_room_is_taken_as_steps_come_and_where_it_ends_the_last_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder([7], tmp_path)
    recorder.follow(PLAN, about())
    run(recorder, 5)
    path = tmp_path / "rank0-wrapper0-plan0.rows"
    assert path.stat().st_blocks * 512 < 400_000 < path.stat().st_size
    reserve, reserved = os.posix_fallocate, []

    def hardly(*arguments: int) -> None:
        reserved.append(arguments)
        if len(reserved) > 2:
            raise OSError("no space left on device")
        reserve(*arguments)

    monkeypatch.setattr(rings.os, "posix_fallocate", hardly)
    run(recorder, 3000)
    recorder.close()
    [chapter] = read(tmp_path)
    assert len(reserved) == 3
    assert chapter.written == 3005
    steps = [row[Column.STEP] for row in chapter.rows]
    assert 500 < len(steps) < 1500
    assert steps == list(range(3000 - len(steps), 3000))
    assert sum(sums[Sum.STEPS] for sums in chapter.sums) == 3005


@pytest.mark.parametrize(
    ("suffix", "content", "words"),
    [
        ("json", None, "there is no recording in the folder"),
        ("json", b"{", "this is not what a rank has written"),
        ("json", b"[1]", "this is not what a rank has written"),
        ("json", b'{"version": 99}', "of another version of paceline"),
        ("rows", None, "the recording is damaged"),
        ("rows", b"x" * 10, "cut off after 10 bytes"),
        ("rows", b"\0" * 80_000, "does not begin as it should"),
        ("rows", slice(80_000), "it is cut off"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, suffix: str, content: bytes | slice | None, words: str
) -> None:
    recorded(tmp_path, 3)
    path = tmp_path / f"rank0-wrapper0-plan0.{suffix}"
    written = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(written[content] if isinstance(content, slice) else content)
    with pytest.raises(RecordingError, match=words):
        read(tmp_path)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="there is no such folder"):
        read(tmp_path / "none")
