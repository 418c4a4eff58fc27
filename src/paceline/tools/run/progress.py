"""How a run is going, read from the recordings that its ranks are still writing."""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RecordingError
from paceline.recording.reader import PlanRecording, read_latest
from paceline.recording.rows import StepColumn, StepKind, first_launch
from paceline.tools.formatting import printable
from paceline.tools.report.delays import last_share, slow_part, sync_delays
from paceline.tools.report.step_parts import median, rank_part_times
from paceline.tools.report.wrapper_runs import WrapperRun, wrapper_run

# The figures are of this many steps.
WINDOW = 32
# The slowest rank is named if it was the last in this share of them, by this share of a step.
LAST_SHARE = 2 / 3
LEAST_DELAY = 0.02


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
        return f"rank {self.rank} slowest by {self.delay * 1e3:.3g} ms{where}"


@dataclass(frozen=True)
class RunProgress:
    """The last steps of a run.

    Attributes:
        step: the last step that every rank has ended.
        steps_per_second: the median rate.
        units_per_second: how many samples, or other units, all ranks process; None if they are not counted.
        unit: what is counted.
        overlap: the share of communication that was during backward; None if there was no communication.
        slowest: the rank that the others waited for in most steps; None if it made no difference.
    """

    step: int
    steps_per_second: float
    units_per_second: float | None
    unit: str
    overlap: float | None
    slowest: SlowestRank | None

    def __str__(self) -> str:
        return ", ".join(self.parts())

    def parts(self) -> list[str]:
        """The figures as text, the most important first."""
        parts = [f"step {self.step:,}", f"{self.steps_per_second:,.3g} steps/s"]
        if self.units_per_second is not None:
            parts.append(f"{self.units_per_second:,.0f} {printable(self.unit)}/s")
        if self.overlap is not None:
            parts.append(f"{self.overlap:.0%} of communication overlapped")
        if self.slowest is not None:
            parts.append(str(self.slowest))
        return parts


def read_progress(folder: Path) -> RunProgress | None:
    """The progress of the run that records in a folder; None if there are too few steps yet."""
    try:
        return progress(read_latest(folder, rows=WINDOW + 1))
    except RecordingError:  # a rank is just creating its files
        return None


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
    return RunProgress(
        step=max(by_step),
        steps_per_second=1 / step,
        units_per_second=counted / sum(seconds) if counted else None,
        unit=str(recordings[0].description["unit"]),
        overlap=_overlap(row for rows in by_step.values() for row in rows.values()),
        slowest=_slowest(recordings, least=LEAST_DELAY * step * 1e9, steps=len(by_step)),
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


def _slowest(recordings: Sequence[PlanRecording], *, least: float, steps: int) -> SlowestRank | None:
    """The rank that was last in most steps, if its delay matters.

    Args:
        recordings: the recordings of the wrapper's ranks.
        least: the least delay that matters, in nanoseconds.
        steps: how many steps the figures are of.
    """
    run = wrapper_run([each for each in recordings if _had_inputs(each)])
    number, delay = _last_in_most(run, least, steps)
    if number is None:
        return None
    # The last step goes on, so its parts are not complete.
    part, _ = slow_part(run, rank_part_times(run), number, (0, max(1, len(run.common_steps) - 1)))
    return SlowestRank(run.timelines[number].rank, delay / 1e9, part)


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


def _overlap(rows: Iterable[Sequence[int]]) -> float | None:
    """The share of communication that was during backward."""
    overlap = total = 0
    for row in rows:
        launch = first_launch(row)
        total += row[StepColumn.ALL_REDUCED] - launch
        overlap += max(0, row[StepColumn.BACKWARD_END] - launch)
    return overlap / total if total > 0 else None
