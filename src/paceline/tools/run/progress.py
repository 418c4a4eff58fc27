"""How a run is going, read from the recordings that its ranks are still writing."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import RecordingError
from paceline.recording.reader import PlanRecording, read_latest, read_recording
from paceline.recording.rows import StepColumn, StepKind
from paceline.tools.formatting import milliseconds, percent, plain_number, printable
from paceline.tools.report.delays import last_share, slow_part, sync_delays
from paceline.tools.report.step_parts import NEXT_TO_NOTHING, StepPart, communication, median, rank_part_times
from paceline.tools.report.wall_time import RankWallTime, rank_wall_times
from paceline.tools.report.wrapper_runs import WrapperRun, wrapper_run, wrapper_runs

# Rates and pauses are of this many seconds, in which pauses and steps are as frequent as in the whole run. Of
# quick steps on many ranks it is less, because reading them would take long.
WINDOW_SECONDS = 60
_MOST_ROWS = 8_192
# Communication and the slowest rank are of this many steps: they say how it is now.
WINDOW = 32
# The slowest rank is named if it was the last in this share of them, by this share of a step.
LAST_SHARE = 2 / 3
LEAST_DELAY = 0.02
# Pauses are told from this share of the wall time on.
LEAST_PAUSED = 0.05


@dataclass(frozen=True)
class SlowestRank:
    """A rank that the others wait for.

    Attributes:
        rank: the rank.
        delay: how many seconds it is behind the others, in the median step.
        part: the part of a step that takes longer on it than on the others; None if there is none.
    """

    rank: int
    delay: float
    part: str | None

    def __str__(self) -> str:
        where = f", in {self.part}" if self.part else ""
        return f"rank {self.rank} slowest by {milliseconds(self.delay * 1e3)}{where}"


@dataclass(frozen=True)
class RunProgress:
    """How a run is going, or has gone.

    Attributes:
        step: the last step that every rank has ended.
        steps_per_second: over wall time, with pauses.
        paused: the share of the wall time that is pauses.
        units_per_second: how many samples, or other units, all ranks process; None if they are not counted.
        unit: what is counted.
        overlap: the share of communication that was during backward; None if there was no communication.
        buckets: how many buckets there are.
        slowest: the rank that the others waited for in most steps; None if it made no difference.
    """

    step: int
    steps_per_second: float
    paused: float
    units_per_second: float | None
    unit: str
    overlap: float | None
    buckets: int
    slowest: SlowestRank | None

    def __str__(self) -> str:
        return ", ".join(self.parts())

    def parts(self) -> list[str]:
        """The figures as text, the most important first."""
        parts = [f"step {self.step:,}", f"{plain_number(self.steps_per_second)} steps/s"]
        if self.units_per_second is not None:
            parts.append(f"{plain_number(self.units_per_second)} {printable(self.unit)}/s")
        if self.paused >= LEAST_PAUSED:
            parts.append(f"{percent(self.paused)} of the time in pauses")
        if self.overlap is not None:
            why = " (one bucket)" if self.buckets == 1 and self.overlap < NEXT_TO_NOTHING else ""
            parts.append(f"{percent(self.overlap)} of communication overlapped{why}")
        if self.slowest is not None:
            parts.append(str(self.slowest))
        return parts


def read_progress(folder: Path) -> RunProgress | None:
    """The progress of the run that records in a folder; None if there are too few steps yet."""
    try:
        return progress(_last_seconds(read_latest(folder, rows=WINDOW + 1, of_all=_MOST_ROWS)))
    except RecordingError:  # a rank is just creating its files
        return None


def read_whole(folder: Path) -> RunProgress | None:
    """The same of all that is recorded in detail, for the end of the run."""
    try:
        runs = wrapper_runs(read_recording(folder))
    except RecordingError:
        return None
    if not runs:
        return None
    whole = [_whole_timelines(run) for run in runs]
    return _wrapper_progress(max(whole, key=_last_end))


def _last_seconds(recordings: Sequence[PlanRecording]) -> list[PlanRecording]:
    """The recordings without the rows that are older than the window."""
    return [replace(each, rows=_last_rows(each.rows)) for each in recordings]


def _last_rows(rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    since = rows[-1][StepColumn.END] - WINDOW_SECONDS * 10**9 if rows else 0
    older = [row for row in rows[: -WINDOW - 1] if row[StepColumn.END] >= since]
    return [*older, *rows[-WINDOW - 1 :]]


def _whole_timelines(run: WrapperRun) -> list[PlanRecording]:
    """The timelines of a run, as if all steps had had one plan."""
    return [
        PlanRecording(
            {**run.description, "rank": timeline.rank},
            list(zip(*timeline.columns, strict=True)),
            [],
            len(timeline),
        )
        for timeline in run.timelines
    ]


def progress(recordings: Sequence[PlanRecording]) -> RunProgress | None:
    """The progress of the wrapper that stepped last."""
    by_wrapper: dict[int, list[PlanRecording]] = {}
    for recording in recordings:
        by_wrapper.setdefault(recording.wrapper, []).append(recording)
    for same in sorted(by_wrapper.values(), key=_last_end, reverse=True):
        if (found := _wrapper_progress(same)) is not None:
            return found
    return None


def _last_end(recordings: Sequence[PlanRecording]) -> int:
    return max((each.rows[-1][StepColumn.END] for each in recordings if each.rows), default=0)


def _wrapper_progress(recordings: Sequence[PlanRecording]) -> RunProgress | None:
    by_step = _rows_by_step(recordings)
    if len(by_step) < 2:
        return None
    begins = [statistics.median(row[StepColumn.BEGIN] for row in rows.values()) for rows in by_step.values()]
    seconds = [(later - begin) / 1e9 for begin, later in itertools.pairwise(begins)]
    counted = sum(row[StepColumn.COUNT] for rows in [*by_step.values()][:-1] for row in rows.values())
    step = statistics.median(seconds)
    if step <= 0 or sum(seconds) <= 0:  # the files are damaged: steps do not begin one after the other
        return None
    run = wrapper_run([each for each in recordings if _had_inputs(each)])
    paused = _paused(rank_wall_times(run))
    run = run.from_step([*by_step][-WINDOW - 1 :][0])
    walls = rank_wall_times(run)
    return RunProgress(
        step=max(by_step),
        steps_per_second=len(seconds) / sum(seconds),
        paused=paused,
        units_per_second=counted / sum(seconds) if counted else None,
        unit=str(recordings[0].description["unit"]),
        overlap=_overlap(run, walls),
        buckets=len(recordings[0].description["buckets"]),
        slowest=_slowest(run, least=LEAST_DELAY * step * 1e9, steps=min(len(by_step), WINDOW + 1)),
    )


def _rows_by_step(recordings: Sequence[PlanRecording]) -> dict[int, dict[int, Sequence[int]]]:
    """The steps that every rank has ended, in order; each with the rows of the ranks that had inputs."""
    averaged = (StepKind.ORDINARY, StepKind.NO_INPUTS)
    ended = [
        {row[StepColumn.STEP] for row in each.rows if row[StepColumn.KIND] in averaged} for each in recordings
    ]
    by_step: dict[int, dict[int, Sequence[int]]] = {}
    for each in recordings:
        for row in each.rows:
            if row[StepColumn.KIND] == StepKind.ORDINARY:
                by_step.setdefault(row[StepColumn.STEP], {})[each.rank] = row
    return {step: by_step[step] for step in sorted(set.intersection(*ended)) if step in by_step}


def _slowest(run: WrapperRun, *, least: float, steps: int) -> SlowestRank | None:
    """The rank that was last in most steps, if its delay matters.

    Args:
        run: the last steps of the ranks that had inputs.
        least: the least delay that matters, in nanoseconds.
        steps: how many steps the figures are of.
    """
    number, delay = _last_in_most(run, least, steps)
    if number is None:
        return None
    # The last step goes on, so its parts are not complete.
    part, _ = slow_part(run, rank_part_times(run), number, (0, max(1, len(run.common_steps) - 1)))
    return SlowestRank(run.timelines[number].rank, delay / 1e9, part)


def _paused(walls: Sequence[RankWallTime]) -> float:
    """The share of the wall time that is pauses, on the average rank."""
    return sum(each.paused for each in walls) / max(1, sum(each.wall for each in walls))


def _had_inputs(recording: PlanRecording) -> bool:
    return any(row[StepColumn.KIND] == StepKind.ORDINARY for row in recording.rows)


def _last_in_most(run: WrapperRun, least: float, steps: int) -> tuple[int | None, float]:
    """The place of the slowest rank among the timelines, and its delay where ranks wait longest for it."""
    slowest, longest = None, least
    for delays in sync_delays(run, least).values():
        for number, own in enumerate(delays):
            times_last = last_share(delays, number, (0, len(own))) * len(own)
            if times_last >= LAST_SHARE * steps and median(own) > longest:
                slowest, longest = number, median(own)
    return slowest, longest


def _overlap(run: WrapperRun, walls: Sequence[RankWallTime]) -> float | None:
    """The share of communication that was during backward, as the report has it."""
    pairs = zip(run.timelines, walls, strict=True)
    times = [communication(run, timeline, wall.times[StepPart.PAUSE]) for timeline, wall in pairs]
    total = sum(in_flight for in_flight, _ in times)
    return sum(overlap for _, overlap in times) / total if total else None
