"""The timeline of a run whose figures leave out the steps before a rank became a straggler."""

from dataclasses import replace
from pathlib import Path

import pytest
from recordings import PauseEvery, Run, Slow, write, write_healed

from paceline.recording.rows import StepColumn
from paceline.tools.report.analysis import RunAnalysis, analyse_recording
from paceline.tools.report.figure_steps import wall_times_of_all
from paceline.tools.report.step_parts import StepPart
from paceline.tools.report.wall_time import RankWallTime
from paceline.tools.report.wrapper_runs import WrapperRun
from paceline.tools.run.progress import read_whole

# From step 141 on, rank 0 waits for rank 1.
STRAGGLER = Run(ranks=2, steps=200, slow=[Slow(1, 200, 140, part="data")])


def drawn(folder: Path) -> tuple[WrapperRun, RunAnalysis, list[RankWallTime]]:
    """A recording, its analysis, and what the timeline has."""
    [(run, found)] = analyse_recording(folder)
    return run, found, wall_times_of_all(run, found.figures_from_step)


def test_steps_that_a_straggler_makes_longer_are_no_pauses(tmp_path: Path) -> None:
    _, found, walls = drawn(write(STRAGGLER, tmp_path))
    assert (found.figures_from_step, found.parts["pauses"]) == (141, 0)
    assert [len(wall.pauses) for wall in walls] == [0, 0]


def test_since_then_the_timeline_has_the_pauses_of_the_figures_and_before_it_has_its_own(
    tmp_path: Path,
) -> None:
    slow = [*STRAGGLER.slow, Slow(0, 500, 50, 51, "data"), Slow(0, 900, 180, 181, "data")]
    run, found, walls = drawn(write(replace(STRAGGLER, slow=slow), tmp_path))
    assert [pause.step for wall in walls for pause in wall.pauses] == [50, 180, 51, 181]
    since = [wall.times[StepPart.PAUSE][run.timelines[0].row_of(141) :] for wall in walls]
    assert sum(map(sum, since)) / 1e6 == pytest.approx(2 * found.figures_steps * found.parts["pauses"])


@pytest.mark.parametrize("killed", [100, 170])
def test_the_timeline_adds_up_to_all_steps(tmp_path: Path, killed: int) -> None:
    pauses = [PauseEvery(0, 600, 25)]
    run, found, walls = drawn(
        write_healed(replace(STRAGGLER, pauses=pauses), tmp_path, [(killed, 0)], pause=700)
    )
    assert found.figures_from_step == 141
    for timeline, wall in zip(run.timelines, walls, strict=True):
        assert [sum(own) for own in zip(*wall.times.values(), strict=True)] == timeline.step_times
        assert [timeline[StepColumn.STEP][pause.row] for pause in wall.pauses] == [
            each.step for each in wall.pauses
        ]
        end = timeline[StepColumn.OPTIMIZER_END][-1]
        assert wall.wall == end - timeline[StepColumn.BEGIN][0]


def test_ranks_with_different_numbers_of_steps_have_the_rates_and_shares_of_all_steps(tmp_path: Path) -> None:
    # Steps of 35.8 ms. Rank 1 has 40 of them, before rank 0 pauses.
    pauses = [Slow(0, 500, step, step + 1, "data") for step in (50, 70, 90)]
    run = Run(ranks=2, steps=101, slow=pauses)
    write(run, tmp_path)
    write(replace(run, steps=41), tmp_path / "short")
    for file in (tmp_path / "short").glob("rank1-*"):
        file.replace(tmp_path / file.name)
    _, found, _ = drawn(tmp_path)
    assert [round(rank.wall_ms / rank.mean_step_ms) for rank in found.ranks] == [100, 40]
    seconds = sum(rank.wall_ms for rank in found.ranks) / 1e3
    assert found.steps_per_second == pytest.approx(140 / seconds)
    assert seconds == pytest.approx(140 * 0.0358 + 1.5, rel=0.01)
    each = [rank.wall_ms / 1e3 for rank in found.ranks]
    assert found.units_per_second == pytest.approx(32 * (100 / each[0] + 40 / each[1]))
    shares = [
        sum(pauses.share for pauses in found.pauses),
        found.parts["pauses"] / found.mean_step_ms,
    ]
    assert shares == pytest.approx([1.5 / seconds] * 2, rel=0.01)
    last = read_whole(tmp_path)
    assert last is not None
    assert last.paused == pytest.approx(shares[0])
    assert last.steps_per_second == pytest.approx(found.steps_per_second)
