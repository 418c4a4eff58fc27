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
from paceline.tools.report.figure_steps import detailed_steps, figure_steps, first_step
from paceline.tools.report.step_parts import (
    NEXT_TO_NOTHING,
    StepPart,
    communication,
    median,
    place,
    rank_part_times,
)
from paceline.tools.report.wall_time import RankWallTime, rank_wall_times
from paceline.tools.report.wrapper_runs import WrapperRun, wrapper_runs

# Rates and pauses are of this many seconds, in which pauses and steps are as frequent as in the whole run. Of
# quick steps on many ranks it is less, because reading them would take long.
WINDOW_SECONDS = 60
_MOST_ROWS = 8_192
# Communication and the slowest rank are of this many steps: they say how it is now.
WINDOW = 32
# The slowest rank is named if it was the last in this share of them, by this share of a step.
LAST_SHARE = 2 / 3
LEAST_DELAY = 0.02
# A wrapper is no longer trained if others have stepped for so many of its steps since its last one.
_MANY_STEPS = 10
# Wrappers that step in turn have about the same wall time: this share of the longest one, or more.
_ABOUT_ALL = 0.9
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
        where = f", {place(self.part)}" if self.part else ""
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
        module: the class of the wrapper's module; empty if there is only one wrapper.
    """

    step: int
    steps_per_second: float
    paused: float
    units_per_second: float | None
    unit: str
    overlap: float | None
    buckets: int
    slowest: SlowestRank | None
    module: str = ""

    def __str__(self) -> str:
        return ", ".join(self.parts())

    def parts(self) -> list[str]:
        """The figures as text, the most important first."""
        whose = f"{printable(self.module)}: " if self.module else ""
        parts = [f"{whose}step {self.step:,}", f"{plain_number(self.steps_per_second)} steps/s"]
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
    """The same at the end of the run, with the rates that the report has."""
    try:
        runs = wrapper_runs(read_recording(folder))
    except RecordingError:
        return None
    if not runs:
        return None
    longest = max(map(_wall_time, runs))
    shown = min((run for run in runs if _wall_time(run) >= _ABOUT_ALL * longest), key=_number)
    found = figure_steps(shown)
    rates = _Rates(found.steps_per_second, found.units_per_second, found.paused_share)
    return _run_progress(found.run, rates, _shown_module(shown, runs))


def _last_seconds(recordings: Sequence[PlanRecording]) -> list[PlanRecording]:
    """The recordings without the rows that are older than the window."""
    return [replace(each, rows=_last_rows(each.rows)) for each in recordings]


def _last_rows(rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    since = rows[-1][StepColumn.END] - WINDOW_SECONDS * 10**9 if rows else 0
    older = [row for row in rows[: -WINDOW - 1] if row[StepColumn.END] >= since]
    return [*older, *rows[-WINDOW - 1 :]]


def progress(recordings: Sequence[PlanRecording]) -> RunProgress | None:
    """The progress of one wrapper: of those that still step, the one that was made first.

    If it were the one that stepped last, the line would be of another one each time if they step in turn.
    """
    # Some ranks may have ended a step with new buckets before others have.
    incomplete = {each.wrapper for each in recordings if not each.rows}
    complete = [each for each in recordings if each.wrapper not in incomplete]
    runs = wrapper_runs(complete) if complete else []
    now = max(map(_last_end, runs), default=0)
    for run in sorted(runs, key=lambda run: (_has_stopped(run, now), _number(run))):
        rates = _last_rates(run)
        found = None if rates is None else _run_progress(run, rates, _shown_module(run, runs))
        if found is not None:
            return found
    return None


def _number(run: WrapperRun) -> int:
    """The number of the wrapper in the process."""
    return int(run.description["wrapper"])


def _wall_time(run: WrapperRun) -> int:
    return max(sum(timeline.step_times) for timeline in run.timelines)


def _last_end(run: WrapperRun) -> int:
    return max(timeline[StepColumn.END][-1] for timeline in run.timelines)


def _has_stopped(run: WrapperRun, now: int) -> bool:
    """Whether other wrappers have stepped since then for as long as many steps of this one."""
    begin, last = min(timeline[StepColumn.BEGIN][0] for timeline in run.timelines), _last_end(run)
    return now - last > _MANY_STEPS * (last - begin) / detailed_steps(run)


def _shown_module(run: WrapperRun, runs: Sequence[WrapperRun]) -> str:
    """The class of a wrapper's module; empty if there is no other wrapper."""
    return run.module if len({each.module for each in runs}) > 1 else ""


@dataclass(frozen=True)
class _Rates:
    """Steps and units per second of wall time, and the share of it that is pauses."""

    steps: float
    units: float | None
    paused: float


def _last_rates(run: WrapperRun) -> _Rates | None:
    """The rates while a run goes on: the last step is not complete, and only tells when it began."""
    had_inputs = _with_inputs(run)
    if not had_inputs.timelines:  # all steps with the last plan were lost
        return None
    chosen = figure_steps(had_inputs)
    steps = [each for each in _ended_steps(run) if each.number >= first_step(chosen.run)]
    seconds = (steps[-1].begin - steps[0].begin) / 1e9 if steps else 0.0
    if seconds <= 0:  # there is one step only, or the files are damaged
        return None
    counted = sum(each.count for each in steps[:-1])
    rate = (len(steps) - 1) / seconds
    return _Rates(rate, counted / seconds if counted else None, chosen.paused_share)


def _run_progress(run: WrapperRun, rates: _Rates, module: str) -> RunProgress | None:
    """The progress with these rates; communication and the slowest rank are of the last steps."""
    steps = _ended_steps(run)[-WINDOW - 1 :]
    usual = median([later.begin - each.begin for each, later in itertools.pairwise(steps)])
    if usual <= 0:  # there is one step only, or the files are damaged
        return None
    last = _with_inputs(run).from_step(steps[0].number)
    return RunProgress(
        step=steps[-1].number,
        steps_per_second=rates.steps,
        paused=rates.paused,
        units_per_second=rates.units,
        unit=str(run.description["unit"]),
        # One rank reduces its buckets, but with nobody.
        overlap=_overlap(last, rank_wall_times(last)) if len(run.group) > 1 else None,
        buckets=len(run.buckets),
        slowest=_slowest(last, least=LEAST_DELAY * usual, steps=len(steps)),
        module=module,
    )


@dataclass(frozen=True)
class _EndedStep:
    """A step that every rank has ended.

    Attributes:
        number: its number.
        begin: when it began, on the median of the ranks that had inputs.
        count: how many samples, or other units, these have counted.
    """

    number: int
    begin: float
    count: int


def _ended_steps(run: WrapperRun) -> list[_EndedStep]:
    """The steps that every rank has ended, in order; without those for which no rank had inputs."""
    columns = (StepColumn.STEP, StepColumn.KIND, StepColumn.BEGIN, StepColumn.COUNT)
    ended, with_inputs = [], []
    for timeline in run.timelines:
        rows = list(zip(*(timeline[column] for column in columns), strict=True))
        ended.append({step for step, kind, *_ in rows if kind in (StepKind.ORDINARY, StepKind.NO_INPUTS)})
        with_inputs.append(
            {step: (begin, count) for step, kind, begin, count in rows if kind == StepKind.ORDINARY}
        )
    found = []
    for step in sorted(set.intersection(*ended)):
        own = [known[step] for known in with_inputs if step in known]
        if own:
            begins, counts = zip(*own, strict=True)
            found.append(_EndedStep(step, statistics.median(begins), sum(counts)))
    return found


def _with_inputs(run: WrapperRun) -> WrapperRun:
    """The run on the ranks that had inputs."""
    had = [timeline for timeline in run.timelines if StepKind.ORDINARY in timeline[StepColumn.KIND]]
    return replace(run, timelines=had)


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
