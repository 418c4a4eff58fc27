"""How a run is going, read from the recordings that its ranks are still writing."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RecordingError
from paceline.recording.reader import PlanRecording, read_latest
from paceline.recording.rows import StepColumn, StepKind, first_launch

# The figures are of this many steps.
WINDOW = 32
# The slowest rank is named if it was the last in this share of them, by this share of a step.
LAST_SHARE = 2 / 3
LEAST_DELAY = 0.02

# The rows of one step, by rank.
RowsByRank = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class RunProgress:
    """The last steps of a run.

    Attributes:
        step: the last step that every rank has ended.
        steps_per_second: the median rate.
        units_per_second: how many samples, or other units, all ranks process; None if they are not counted.
        unit: what is counted.
        overlap: the share of communication that was during backward; None if there was no communication.
        slowest_rank: the rank that the others waited for in most steps; None if it made no difference.
        delay: how many seconds it was behind, in the median step.
    """

    step: int
    steps_per_second: float
    units_per_second: float | None
    unit: str
    overlap: float | None
    slowest_rank: int | None
    delay: float

    def __str__(self) -> str:
        return ", ".join(self.parts())

    def parts(self) -> list[str]:
        """The figures as text, the most important first."""
        parts = [f"step {self.step:,}", f"{self.steps_per_second:,.3g} steps/s"]
        if self.units_per_second is not None:
            parts.append(f"{self.units_per_second:,.0f} {self.unit}/s")
        if self.overlap is not None:
            parts.append(f"{self.overlap:.0%} of communication overlapped")
        if self.slowest_rank is not None:
            parts.append(f"rank {self.slowest_rank} slowest by {self.delay * 1e3:.3g} ms")
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
    slowest, delay = _slowest([*by_step.values()])
    matters = delay > LEAST_DELAY * step
    return RunProgress(
        step=max(by_step),
        steps_per_second=1 / step,
        units_per_second=counted / sum(seconds) if counted else None,
        unit=str(recordings[0].description["unit"]),
        overlap=_overlap(row for rows in by_step.values() for row in rows.values()),
        slowest_rank=slowest if matters else None,
        delay=delay if matters else 0.0,
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


def _slowest(by_step: Sequence[RowsByRank]) -> tuple[int | None, float]:
    """The rank that was last in most steps, and its median delay in seconds; if the ranks share a clock."""
    delays = [_delays(rows) for rows in by_step if len(rows) > 1]
    last = [max(each, key=each.__getitem__) for each in delays]
    slowest = max(last, key=last.count, default=None)
    if slowest is None or last.count(slowest) < LAST_SHARE * len(by_step):
        return None, 0.0
    return slowest, statistics.median(each[slowest] for each in delays if slowest in each) / 1e9


def _delays(rows: RowsByRank) -> dict[int, int]:
    """How much later than the first each rank came to where ranks wait for each other."""
    delays = dict.fromkeys(rows, 0)
    sync_points = [StepColumn.BACKWARD_END]
    if all(row[StepColumn.BUFFERS_END] for row in rows.values()):
        sync_points.append(StepColumn.FORWARD_START)
    for column in sync_points:
        first = min(row[column] for row in rows.values())
        for rank, row in rows.items():
            delays[rank] += row[column] - first
    return delays


def _overlap(rows: Iterable[Sequence[int]]) -> float | None:
    """The share of communication that was during backward."""
    overlap = total = 0
    for row in rows:
        launch = first_launch(row)
        total += row[StepColumn.ALL_REDUCED] - launch
        overlap += max(0, row[StepColumn.BACKWARD_END] - launch)
    return overlap / total if total > 0 else None
