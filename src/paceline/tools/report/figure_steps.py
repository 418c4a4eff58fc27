"""Which steps the figures of a run are of, and what took how long in them.

If a rank has become a straggler, the figures are of the steps since then. What is usual has changed there, so
the steps before and since are looked at one by one: a step that is usual in one of them may be a pause in the
other. The report, its timeline and the launcher's last line all have these steps.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.recording.rows import StepColumn
from paceline.tools.report.step_parts import StepPart, quartiles
from paceline.tools.report.stragglers import Straggler, find_stragglers
from paceline.tools.report.wall_time import Pause, PauseCause, RankWallTime, rank_wall_times
from paceline.tools.report.wrapper_runs import WrapperRun

_FEWEST_STEPS = 8


@dataclass(frozen=True)
class FigureSteps:
    """The steps that the figures of a run are of.

    Attributes:
        run: these steps.
        walls: the wall time of each rank in them.
        stragglers: the stragglers of the whole run.
    """

    run: WrapperRun
    walls: Sequence[RankWallTime]
    stragglers: Sequence[Straggler]

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return detailed_steps(self.run)

    @property
    def wall_ms(self) -> float:
        """The wall time, on the average rank."""
        return statistics.fmean(wall.wall for wall in self.walls) / 1e6

    @property
    def parts(self) -> dict[StepPart, float]:
        """Where the wall time goes, as the mean of the steps of all ranks, in milliseconds.

        Each step counts once, also if ranks have different numbers of them. Rates are of the same time.
        """
        steps = max(1, sum(wall.steps for wall in self.walls))
        own = [(wall.per_step(), wall.steps) for wall in self.walls]
        return {part: sum(means[part] * many for means, many in own) / steps / 1e6 for part in StepPart}

    @property
    def mean_step_ms(self) -> float:
        """The wall time of a step: the sum of the parts."""
        return sum(self.parts.values())

    @property
    def paused_share(self) -> float:
        """The share of the wall time that is pauses."""
        return self.parts[StepPart.PAUSE] / (self.mean_step_ms or 1.0)

    @property
    def steps_per_second(self) -> float:
        """How many steps there were in a second of wall time."""
        return 1e3 / self.mean_step_ms if self.mean_step_ms else 0.0

    @property
    def units_per_second(self) -> float | None:
        """What all ranks together processed in a second of wall time; None if it was not counted."""
        counted = [sum(timeline[StepColumn.COUNT]) for timeline in self.run.timelines]
        pairs = zip(counted, self.walls, strict=True)
        return sum(count / wall.wall * 1e9 for count, wall in pairs if wall.wall) if any(counted) else None


def figure_steps(whole: WrapperRun) -> FigureSteps:
    """The steps since the last straggler became one, if there are enough of them; otherwise all steps."""
    stragglers = find_stragglers(whole, quartiles(_step_times(whole))[1])
    since = max(
        (each.first_step for each in stragglers if each.last_step is None and not each.first_step_error),
        default=0,
    )
    recent = whole.from_step(since)
    run = recent if min(map(len, recent.timelines)) >= _FEWEST_STEPS else whole
    return FigureSteps(run, rank_wall_times(run), stragglers)


def detailed_steps(run: WrapperRun) -> int:
    """How many steps are recorded in detail."""
    return max(map(len, run.timelines))


def first_step(run: WrapperRun) -> int:
    """The first of them."""
    return min(timeline[StepColumn.STEP][0] for timeline in run.timelines)


def _step_times(run: WrapperRun) -> list[int]:
    """Of all steps on all ranks; without each rank's last step, whose time is not complete."""
    return [time for timeline in run.timelines for time in timeline.step_times[: max(1, len(timeline) - 1)]]


def wall_times_of_all(whole: WrapperRun, figures_from: int) -> list[RankWallTime]:
    """The wall time of each rank in all steps, for a drawing of them.

    Args:
        whole: the whole run.
        figures_from: the first step that the figures are of.
    """
    since = rank_wall_times(whole.from_step(figures_from))
    firsts = [timeline.row_of(figures_from) for timeline in whole.timelines]
    if not any(firsts):
        return since
    before = rank_wall_times(_rows(whole, [(0, max(1, first)) for first in firsts]))
    # A rank may be late in a step because of what it did after the one before, which therefore counts as one
    # of those since then.
    starts = [max(0, first - 1) for first in firsts]
    ends = map(len, whole.timelines)
    last = rank_wall_times(_rows(whole, list(zip(starts, ends, strict=True))))
    return [
        _joined([(earlier, start), (at_last, first - start), (own, own.steps)])
        for earlier, at_last, own, start, first in zip(before, last, since, starts, firsts, strict=True)
    ]


def _rows(run: WrapperRun, bounds: Sequence[tuple[int, int]]) -> WrapperRun:
    """Some rows of each timeline, from the first bound up to the second one."""
    timelines = [
        replace(
            timeline,
            columns=[column[start:end] for column in timeline.columns],
            last_rows=sorted(
                {*(row - start for row in timeline.last_rows if start <= row < end), end - start - 1}
            ),
        )
        for timeline, (start, end) in zip(run.timelines, bounds, strict=True)
    ]
    return replace(run, timelines=timelines)


def _joined(pieces: Sequence[tuple[RankWallTime, int]]) -> RankWallTime:
    """Some steps of one rank, and the next ones: of each piece, so many of its first rows."""
    times: dict[StepPart, list[int]] = {part: [] for part in StepPart}
    pauses: list[Pause] = []
    steps = 0
    for piece, rows in pieces:
        pauses += [replace(each, row=each.row + steps) for each in piece.pauses if each.row < rows]
        for part, own in times.items():
            own += piece.times[part][:rows]
        steps += rows
    between = sum(each.nanoseconds for each in pauses if each.cause is PauseCause.HEALING)
    return RankWallTime(steps, sum(map(sum, times.values())) + between, times, pauses)
