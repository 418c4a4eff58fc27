"""The progress of a run, from recordings that are still being written."""

from collections.abc import Callable
from pathlib import Path

import pytest
from recordings import Run, Slow, write

from paceline.recording.reader import PlanRecording
from paceline.recording.rows import BucketColumn, StepColumn, StepKind, row_width
from paceline.tools.report.analysis import analyse_recording
from paceline.tools.run.progress import RunProgress, SlowestRank, progress, read_progress, read_whole

MS = 1_000_000


def row(step: int, *, late: int = 0, kind: StepKind = StepKind.ORDINARY, count: int = 0) -> list[int]:
    """A step of 100 ms, whose backward lasts from 20 to 60 ms, and communication from 40 to 80."""
    cells = [0] * row_width(1)
    begin = (1000 + 100 * step) * MS
    cells[StepColumn.STEP], cells[StepColumn.KIND], cells[StepColumn.COUNT] = step, kind, count
    cells[StepColumn.BEGIN] = begin
    cells[StepColumn.BACKWARD_START] = begin + 20 * MS
    cells[StepColumn.BACKWARD_END] = begin + (60 + late) * MS
    cells[len(StepColumn) + BucketColumn.LAUNCH] = begin + (40 + late) * MS
    cells[len(StepColumn) + BucketColumn.REDUCED] = begin + (80 + late) * MS
    cells[StepColumn.ALL_REDUCED] = cells[StepColumn.END] = begin + (80 + late) * MS
    return cells


def recording(rank: int, rows: list[list[int]], *, wrapper: int = 0) -> PlanRecording:
    description = {"rank": rank, "wrapper": wrapper, "plan": 1, "unit": "rows", "module": "Net"}
    description |= {"group": [0, 1], "buckets": [{}], "exchange": "average"}
    return PlanRecording(description, rows, [], len(rows))


def test_the_figures_are_of_the_steps_that_all_ranks_have_ended() -> None:
    ahead = recording(0, [row(step, count=8) for step in range(5, 12)])
    behind = recording(1, [row(step, count=4, late=7) for step in range(3, 10)])
    found = progress([ahead, behind])
    assert found is not None
    assert found.step == 9
    assert found.steps_per_second == pytest.approx(10)
    assert found.units_per_second == pytest.approx(120)
    assert found.overlap == pytest.approx(0.5)
    assert found.slowest == SlowestRank(1, pytest.approx(0.007), "backward")
    assert str(found) == (
        "step 9, 10 steps/s, 120 rows/s, 50% of communication overlapped, "
        "rank 1 slowest by 7.00 ms, in backward"
    )


def test_steps_and_units_are_rates_of_the_same_wall_time_and_pauses_have_a_share() -> None:
    rows = [row(step, count=8) for step in range(21)]
    for number, cells in enumerate(rows):  # 450 ms after every fifth step
        for column in range(len(cells)):
            if cells[column] > MS:
                cells[column] += number // 5 * 450 * MS
    found = progress([recording(0, rows)])
    assert found is not None
    assert found.units_per_second == pytest.approx(8 * found.steps_per_second)
    assert (
        str(found)
        == "step 20, 5.26 steps/s, 42.1 rows/s, 46% of the time in pauses, 50% of communication overlapped"
    )


def test_rates_and_pauses_are_of_a_minute_and_at_the_end_of_the_whole_run(tmp_path: Path) -> None:
    # Steps of 35.8 ms, with 50 pauses of a second early on, and 14 in the last minute.
    early = Slow(0, 1000, 100, 150, "data")
    late = Slow(0, 1000, 1100, 1120, "data")
    write(Run(ranks=2, steps=2400, slow=[early, late], other_plan_from=1000), tmp_path)
    live, whole = read_progress(tmp_path), read_whole(tmp_path)
    assert live is not None
    assert whole is not None
    assert live.steps_per_second == pytest.approx(1294 / 60, rel=0.02)
    assert live.paused == pytest.approx(14 / 60, abs=0.02)
    assert whole.steps_per_second == pytest.approx(2400 / 156, rel=0.05)
    assert whole.paused == pytest.approx(70 / 156, abs=0.02)
    assert live.slowest is None


def test_without_a_recording_there_is_nothing_at_the_end(tmp_path: Path) -> None:
    assert read_whole(tmp_path) is None
    write(Run(ranks=2, steps=0), tmp_path)
    assert read_whole(tmp_path) is None


def test_delays_where_module_buffers_are_synchronised_count_too() -> None:
    ranks = [[row(step) for step in range(8)] for rank in range(2)]
    for late, rows in enumerate(ranks):
        for cells in rows:
            cells[StepColumn.BUFFERS_END] = cells[StepColumn.BEGIN] + 6 * MS
            cells[StepColumn.BEGIN] += 5 * late * MS
            cells[StepColumn.FORWARD_START] = cells[StepColumn.BEGIN]
            cells[StepColumn.BACKWARD_END] += (1 - late) * MS
    found = progress([recording(rank, rows) for rank, rows in enumerate(ranks)])
    assert found is not None
    assert found.slowest == SlowestRank(1, pytest.approx(0.005), "data loading and other")


@pytest.mark.parametrize(
    "late", [lambda step, rank: 3 * (step % 2 == rank), lambda _, rank: rank], ids=["in turn", "hardly"]
)
def test_ranks_that_are_late_in_turn_or_hardly_are_not_named(late: Callable[[int, int], int]) -> None:
    ranks = [[row(step, late=late(step, rank)) for step in range(8)] for rank in range(2)]
    found = progress([recording(rank, rows) for rank, rows in enumerate(ranks)])
    assert found is not None
    assert found.slowest is None
    assert str(found) == "step 7, 10 steps/s, 50% of communication overlapped"


def test_lost_steps_and_steps_without_inputs_do_not_count_and_few_steps_give_nothing() -> None:
    rows = [row(0), row(1, kind=StepKind.LOST), row(2, kind=StepKind.NO_INPUTS)]
    assert progress([recording(0, rows)]) is None
    assert progress([]) is None
    assert progress([recording(0, rows), recording(1, [])]) is None


@pytest.mark.parametrize("kind", [StepKind.LOST, StepKind.NO_INPUTS])
def test_if_all_steps_were_lost_or_without_inputs_there_is_no_progress(kind: StepKind) -> None:
    ranks = [recording(0, [row(0, kind=StepKind.LOST)]), recording(1, [row(0, kind=kind)])]
    assert progress(ranks) is None


def test_steps_in_which_one_rank_has_no_inputs_count_by_the_other_ranks() -> None:
    ahead = recording(0, [row(step, count=8) for step in range(9)])
    kinds = [StepKind.ORDINARY] * 4 + [StepKind.NO_INPUTS] * 4
    exhausted = recording(1, [row(step, late=7, kind=kind) for step, kind in enumerate(kinds)])
    assert (
        str(progress([ahead, exhausted])) == "step 7, 10 steps/s, 80 rows/s, 50% of communication overlapped"
    )


def test_a_wrapper_that_no_longer_steps_is_not_shown() -> None:
    finished = recording(0, [row(step) for step in range(9)])
    steps = [row(step) for step in range(3)]
    for cells in steps:
        for column in (StepColumn.BEGIN, StepColumn.END):
            cells[column] += 5000 * MS
    found = progress([finished, recording(0, steps, wrapper=1), recording(0, [], wrapper=2)])
    assert found is not None
    assert (found.step, found.units_per_second) == (2, None)


@pytest.mark.parametrize("first", [0, 1])
def test_of_wrappers_that_step_in_turn_one_is_shown_with_its_module(tmp_path: Path, first: int) -> None:
    modules = ["Generator", "Critic"]
    starts = [1_000_000 * MS, 1_000_020 * MS]
    for wrapper, module in enumerate(modules):
        start = starts[(wrapper + first) % 2]
        write(Run(ranks=2, steps=60, module=module, wrapper=wrapper, start=start), tmp_path)
    for found in (read_progress(tmp_path), read_whole(tmp_path)):
        assert str(found).startswith("Generator: step 59, ")


def test_of_one_wrapper_the_module_is_not_told(tmp_path: Path) -> None:
    write(Run(ranks=2, steps=20), tmp_path)
    assert str(read_whole(tmp_path)).startswith("step 19, ")


@pytest.mark.parametrize("read", [read_progress, read_whole])
def test_of_one_rank_no_communication_is_told(
    tmp_path: Path, read: Callable[[Path], RunProgress | None]
) -> None:
    write(Run(ranks=1, steps=20), tmp_path / "one")
    assert "communication" not in str(read(tmp_path / "one"))
    write(Run(ranks=2, steps=20), tmp_path / "two")
    assert "of communication overlapped" in str(read(tmp_path / "two"))


PAUSES_AT_THE_END = [Slow(0, 300, step, step + 1, "data") for step in (3, 7, 11)]
LATE_STRAGGLER = [Slow(1, 200, 140, part="data"), Slow(0, 900, 180, 181, "data")]


@pytest.mark.parametrize(
    "run",
    [Run(ranks=1, steps=14, slow=PAUSES_AT_THE_END), Run(ranks=2, steps=200, slow=LATE_STRAGGLER)],
    ids=["pauses", "straggler"],
)
def test_the_last_line_has_the_rates_and_pauses_of_the_report(tmp_path: Path, run: Run) -> None:
    [(_, told)] = analyse_recording(write(run, tmp_path))
    found = read_whole(tmp_path)
    assert found is not None
    assert found.steps_per_second == pytest.approx(told.steps_per_second, rel=1e-9)
    assert found.units_per_second == pytest.approx(told.units_per_second, rel=1e-9)
    assert found.paused == pytest.approx(told.parts["pauses"] / told.mean_step_ms, rel=1e-9)
    assert found.paused > 0.04


def test_steps_are_no_pauses_that_a_straggler_makes_longer(tmp_path: Path) -> None:
    write(Run(ranks=2, steps=200, slow=LATE_STRAGGLER[:1]), tmp_path)
    for found in (read_progress(tmp_path), read_whole(tmp_path)):
        assert found is not None
        assert found.paused == 0
        assert found.steps_per_second == pytest.approx(1000 / 235.8, rel=0.02)


def test_many_steps_per_second_are_no_power_of_ten() -> None:
    found = RunProgress(1200, 1012.3, 0.0, 40484.2, "rows", 0.0, buckets=1, slowest=None)
    assert str(found) == (
        "step 1,200, 1,012 steps/s, 40,484 rows/s, 0% of communication overlapped (one bucket)"
    )


def test_a_folder_without_recordings_gives_nothing(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    (tmp_path / "rank0-wrapper0-plan0.json").write_text("{")
    assert read_progress(tmp_path) is None


def test_what_ranks_count_has_no_effect_on_the_terminal() -> None:
    damaged = recording(0, [row(step, count=8) for step in range(5)])
    damaged.description["unit"] = "\x1b[2Jrows"
    assert r"80 \x1b[2Jrows/s" in str(progress([damaged]))
