"""The pace of a run that is being recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.recording.reader import Chapter
from paceline.recording.rows import BucketColumn, Column, Kind, width
from paceline.tools.run.live import look, pace

MS = 1_000_000


def row(step: int, *, late: int = 0, kind: Kind = Kind.ORDINARY, count: int = 0) -> list[int]:
    """A step of 100 ms, whose backward lasts from 20 to 60 ms, and communication from 40 to 80."""
    cells = [0] * width(1)
    begin = (1000 + 100 * step) * MS
    cells[Column.STEP], cells[Column.KIND], cells[Column.COUNT] = step, kind, count
    cells[Column.BEGIN] = begin
    cells[Column.BACKWARD_START] = begin + 20 * MS
    cells[Column.BACKWARD_END] = begin + (60 + late) * MS
    cells[len(Column) + BucketColumn.LAUNCH] = begin + (40 + late) * MS
    cells[Column.LANDED] = cells[Column.END] = begin + (80 + late) * MS
    return cells


def chapter(rank: int, rows: list[list[int]], *, wrapper: int = 0) -> Chapter:
    about = {"rank": rank, "wrapper": wrapper, "plan": 1, "unit": "rows"}
    return Chapter(about, rows, [], len(rows))


def test_the_figures_are_of_the_steps_that_all_ranks_have_ended() -> None:
    ahead = chapter(0, [row(step, count=8) for step in range(5, 12)])
    behind = chapter(1, [row(step, count=4, late=7) for step in range(3, 10)])
    found = pace([ahead, behind])
    assert found is not None
    assert found.step == 9
    assert found.steps_a_second == pytest.approx(10)
    assert found.count_a_second == pytest.approx(120)
    assert found.hidden == pytest.approx(0.5)
    assert (found.slowest, found.behind) == (1, pytest.approx(0.007))
    assert str(found) == ("step 9, 10 steps/s, 120 rows/s, 50% of communication hidden, rank 1 last, by 7 ms")


def test_a_rank_is_late_where_ranks_meet_for_module_buffers_too() -> None:
    ranks = [[row(step) for step in range(8)] for rank in range(2)]
    for late, rows in enumerate(ranks):
        for cells in rows:
            cells[Column.FORWARD_START] = cells[Column.BEGIN] + 5 * late * MS
            cells[Column.BUFFERS_END] = cells[Column.BEGIN] + 6 * MS
            cells[Column.BACKWARD_END] += (1 - late) * MS
    found = pace([chapter(rank, rows) for rank, rows in enumerate(ranks)])
    assert found is not None
    assert (found.slowest, found.behind) == (1, pytest.approx(0.005))


@pytest.mark.parametrize(
    "late", [lambda step, rank: 3 * (step % 2 == rank), lambda _, rank: rank], ids=["by turns", "hardly"]
)
def test_ranks_that_are_late_by_turns_or_hardly_are_not_named(late: Callable[[int, int], int]) -> None:
    ranks = [[row(step, late=late(step, rank)) for step in range(8)] for rank in range(2)]
    found = pace([chapter(rank, rows) for rank, rows in enumerate(ranks)])
    assert found is not None
    assert found.slowest is None
    assert str(found) == "step 7, 10 steps/s, 50% of communication hidden"


def test_lost_and_shadow_steps_do_not_count_and_few_steps_say_nothing() -> None:
    rows = [row(0), row(1, kind=Kind.LOST), row(2, kind=Kind.SHADOW)]
    assert pace([chapter(0, rows)]) is None
    assert pace([]) is None
    assert pace([chapter(0, rows), chapter(1, [])]) is None


def test_steps_that_a_rank_without_inputs_shadows_count_by_the_others() -> None:
    ahead = chapter(0, [row(step, count=8) for step in range(9)])
    kinds = [Kind.ORDINARY] * 4 + [Kind.SHADOW] * 4
    exhausted = chapter(1, [row(step, late=7, kind=kind) for step, kind in enumerate(kinds)])
    assert str(pace([ahead, exhausted])) == "step 7, 10 steps/s, 80 rows/s, 50% of communication hidden"


def test_of_several_wrappers_the_one_that_stepped_last_is_shown() -> None:
    finished = chapter(0, [row(step) for step in range(9)])
    steps = [row(step) for step in range(3)]
    for cells in steps:
        for column in (Column.BEGIN, Column.END):
            cells[column] += 5000 * MS
    found = pace([finished, chapter(0, steps, wrapper=1), chapter(0, [], wrapper=2)])
    assert found is not None
    assert (found.step, found.count_a_second) == (2, None)


def test_a_folder_without_recordings_says_nothing(tmp_path: Path) -> None:
    assert look(tmp_path) is None
    (tmp_path / "rank0-wrapper0-plan0.json").write_text("{")
    assert look(tmp_path) is None
