"""Where the time of a step goes: its parts, and how much communication overlaps with backward."""

import enum
import statistics
from collections.abc import Mapping, Sequence

from paceline.recording.rows import BucketColumn, StepColumn, StepKind, elapsed
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun

# Figures of buckets are taken from about this many steps, spread over the timeline.
_SAMPLES = 512


class StepPart(enum.StrEnum):
    """What a rank does during a step, in order; the parts add up to the whole step."""

    ACCUMULATION = "gradient accumulation"
    """Forwards and backwards under ``no_sync``."""
    BUFFERS = "buffer sync"
    FORWARD = "forward"
    LOSS = "loss"
    """Between forward and backward."""
    BACKWARD = "backward"
    WAITING = "waiting for the slowest rank"
    """Backward has ended on this rank, and still runs on another one."""
    EXPOSED_COMMUNICATION = "exposed communication"
    """Backward has ended on all ranks, and the last bucket is not reduced yet."""
    GRAD_ASSIGNMENT = "assigning .grad"
    BEFORE_OPTIMIZER = "before optimizer"
    """Between the end of backward and the optimizer's step: clipping of gradients, for example."""
    OPTIMIZER = "optimizer"
    DATA = "data loading and other"
    """Before the next forward."""


# Nanoseconds of each part, step by step.
PartTimes = Mapping[StepPart, Sequence[int]]


def part_times(timeline: RankTimeline, last_backward_ends: Mapping[int, int]) -> PartTimes:
    """Nanoseconds that each of a rank's steps spent in each part.

    Args:
        timeline: the rank's steps.
        last_backward_ends: when the slowest rank ended its backward, by step.
    """
    times: dict[StepPart, list[int]] = {part: [] for part in StepPart}
    rows = zip(*timeline.columns[: len(StepColumn)], strict=True)
    for row, step_time in zip(rows, timeline.step_times, strict=True):
        for part, spent in zip(StepPart, _parts(row, step_time, last_backward_ends), strict=True):
            times[part].append(spent)
    return times


def rank_part_times(run: WrapperRun) -> list[PartTimes]:
    """The parts of the steps of each rank."""
    return [part_times(timeline, run.last_backward_ends) for timeline in run.timelines]


def _parts(row: Sequence[int], step_time: int, last_backward_ends: Mapping[int, int]) -> tuple[int, ...]:
    (
        step, kind, begin, _, forward_start, buffers_end, forward_end, backward_start, backward_end,
        all_reduced, end, optimizer_start, optimizer_end, _,
    ) = row  # fmt: skip
    after_backward = elapsed(backward_end, all_reduced)
    # What a later generation did in this step again is no matter.
    last_backward_end = 0 if kind & StepKind.LOST else last_backward_ends.get(step, 0)
    waiting = min(after_backward, elapsed(backward_end, last_backward_end))
    spent = (
        elapsed(begin, forward_start),
        elapsed(forward_start, buffers_end),
        elapsed(max(buffers_end, forward_start), forward_end),
        elapsed(max(forward_end, forward_start), backward_start),
        elapsed(backward_start, backward_end),
        waiting,
        after_backward - waiting,
        elapsed(all_reduced, end),
        elapsed(end, optimizer_start),
        elapsed(optimizer_start, optimizer_end),
    )
    return *spent, max(0, step_time - sum(spent))


def typical_rows(step_times: Sequence[int]) -> list[int]:
    """The rows of the middle half of the steps by time; without the last step, whose time is not complete."""
    ordered = sorted(range(max(1, len(step_times) - 1)), key=lambda row: step_times[row])
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def mean_parts(times: PartTimes, rows: Sequence[int]) -> dict[StepPart, float]:
    """Mean nanoseconds of each part in these rows."""
    return {part: statistics.fmean(column[row] for row in rows) for part, column in times.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile; 0 if there are no values."""
    if not values:
        return 0.0, 0.0, 0.0
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def median(values: Sequence[float]) -> float:
    """The median; 0 if there are no values."""
    return statistics.median(values) if values else 0.0


def sampled_rows(timeline: RankTimeline) -> range:
    """Some rows of a timeline, evenly spread."""
    return range(0, len(timeline), max(1, len(timeline) // _SAMPLES))


def communication(run: WrapperRun, timeline: RankTimeline) -> tuple[float, float]:
    """Mean nanoseconds per step in which a bucket was in flight, and how many of them in backward."""
    in_flight, overlap, rows = 0, 0, sampled_rows(timeline)
    columns = [
        (timeline.bucket(each, BucketColumn.LAUNCH), timeline.bucket(each, BucketColumn.REDUCED))
        for each in range(len(run.buckets))
    ]
    for row in rows:
        backward_end = timeline[StepColumn.BACKWARD_END][row]
        for start, end in _union([(launch[row], reduced[row]) for launch, reduced in columns]):
            in_flight += end - start
            overlap += max(0, min(end, backward_end) - start)
    return in_flight / len(rows), overlap / len(rows)


def _union(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if 0 < span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
