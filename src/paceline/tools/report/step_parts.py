"""Where the time of a step goes: its parts, and how much communication overlaps with backward."""

import enum
import statistics
from collections.abc import Mapping, Sequence

from paceline.recording.rows import (
    EVALUATION_COLUMNS,
    LOADER_COLUMNS,
    OTHERS_COLUMNS,
    SAVING_COLUMNS,
    BucketColumn,
    StepColumn,
    StepKind,
    elapsed,
)
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun

# Figures of buckets are taken from about this many steps, spread over the timeline.
_SAMPLES = 512
# If less than this share of communication overlaps with backward, the reason is worth a word.
NEXT_TO_NOTHING = 0.05


class StepPart(enum.StrEnum):
    """What a rank does during a step; the parts add up to the whole step."""

    ACCUMULATION = "gradient accumulation"
    """Earlier forwards (and backwards) of the same step: under ``no_sync``, or several for one backward."""
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
    """Between the end of backward and an optimizer's step: clipping of gradients, for example."""
    OPTIMIZER = "optimizer"
    DATA = "data loading and other"
    """What is left before the next forward."""
    JOIN = "waiting in join"
    """Ranks tell each other at the start of forward who has inputs; those without inputs wait for others."""
    AFTER_OPTIMIZER = "after optimizer"
    """From the optimizer's step until a ``DataLoader`` is asked: schedulers and logging, for example."""
    LOADER = "DataLoader"
    """Waiting for a batch of torch's ``DataLoader``."""
    OTHER_WRAPPERS = "other wrappers"
    """Forward, backward and optimizer of other wrappers, between the parts of this one."""
    EVALUATION = "forward without gradients"
    """Forwards of this wrapper under ``torch.no_grad``."""
    SAVING = "torch.save"
    """In the thread that calls forward."""
    PAUSE = "pauses"
    """Time beyond the usual; see Note [Pauses]."""


# What is done between other parts of a step, with its columns: before the step's end, and after it.
BETWEEN_PARTS: Mapping[StepPart, tuple[StepColumn, StepColumn]] = {
    StepPart.OTHER_WRAPPERS: OTHERS_COLUMNS,
    StepPart.EVALUATION: EVALUATION_COLUMNS,
    StepPart.SAVING: SAVING_COLUMNS,
    StepPart.LOADER: LOADER_COLUMNS,
}


def place(part: str) -> str:
    """Where in a step a part is, for a sentence: "in forward", "before the optimizer"."""
    if part in (StepPart.BEFORE_OPTIMIZER, StepPart.AFTER_OPTIMIZER):
        return part.replace(" ", " the ")
    return f"in the {part}" if part in (StepPart.LOSS, StepPart.LOADER) else f"in {part}"


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
        spent = _parts(row, step_time, last_backward_ends)
        for part, own in times.items():
            own.append(spent.get(part, 0))
    return times


def rank_part_times(run: WrapperRun) -> list[PartTimes]:
    """The parts of the steps of each rank."""
    return [part_times(timeline, run.last_backward_ends) for timeline in run.timelines]


def _parts(row: Sequence[int], step_time: int, last_backward_ends: Mapping[int, int]) -> dict[StepPart, int]:
    (
        step, kind, begin, _, forward_start, buffers_end, forward_end, backward_start, backward_end,
        all_reduced, end, optimizer_start, optimizer_end, _, join_end, *_,
    ) = row  # fmt: skip
    after_backward = elapsed(backward_end, all_reduced or end)
    # What a later generation did in this step again is no matter.
    last_backward_end = 0 if kind & StepKind.LOST else last_backward_ends.get(step, 0)
    waiting = min(after_backward, elapsed(backward_end, last_backward_end))
    joined = max(forward_start, join_end)
    optimizers = elapsed(optimizer_start, optimizer_end)
    inside = min(max(0, row[StepColumn.OPTIMIZER]), optimizers)
    spent = {
        StepPart.ACCUMULATION: elapsed(begin, forward_start),
        StepPart.JOIN: elapsed(forward_start, join_end),
        StepPart.BUFFERS: elapsed(joined, buffers_end),
        StepPart.FORWARD: elapsed(max(buffers_end, joined), forward_end),
        StepPart.LOSS: elapsed(max(forward_end, forward_start), backward_start),
        StepPart.BACKWARD: elapsed(backward_start, backward_end),
        StepPart.WAITING: waiting,
        StepPart.EXPOSED_COMMUNICATION: after_backward - waiting,
        StepPart.GRAD_ASSIGNMENT: elapsed(all_reduced, end),
        # With several optimizers, also what is between them.
        StepPart.BEFORE_OPTIMIZER: elapsed(end, optimizer_start) + optimizers - inside,
        StepPart.OPTIMIZER: inside,
    }
    rest = max(0, step_time - sum(spent.values()))
    without_inputs = min(max(0, row[StepColumn.WITHOUT_INPUTS]), rest)
    spent[StepPart.JOIN] += without_inputs
    return _with_between(spent, row, rest - without_inputs)


class BetweenTimes:
    """What one step has of ``BETWEEN_PARTS``, by the part that it was in the middle of.

    Args:
        row: the step's row.

    Attributes:
        before_forward: nanoseconds in the middle of gradient accumulation.
        in_loss: in the middle of the loss.
        before_optimizer: before the last optimizer's step.
        after_optimizer: between the optimizer's step and the first question for a batch.
        last: after the optimizer.
        inside: nanoseconds of each part before the step's end.
        after: the same after it.
    """

    def __init__(self, row: Sequence[int]) -> None:
        self.inside = {part: max(0, row[inside]) for part, (inside, _) in BETWEEN_PARTS.items()}
        self.after = {part: max(0, row[after]) for part, (_, after) in BETWEEN_PARTS.items()}
        inside, after = sum(self.inside.values()), sum(self.after.values())
        self.before_forward = _limited(row[StepColumn.KNOWN_BEFORE_FORWARD], inside)
        self.in_loss = inside - self.before_forward
        self.before_optimizer = _limited(row[StepColumn.KNOWN_BEFORE_OPTIMIZER], after)
        self.last = after - self.before_optimizer
        self.after_optimizer = _limited(
            row[StepColumn.KNOWN_BEFORE_LOADER] - self.before_optimizer, self.last
        )


def _limited(value: int, most: int) -> int:
    return min(max(0, value), most)


def at_most(most: int, times: Mapping[StepPart, int]) -> dict[StepPart, int]:
    """The times of some parts, cut to what they may have together; the longest is taken first."""
    found: dict[StepPart, int] = {}
    for part, time in sorted(times.items(), key=lambda each: -each[1]):
        found[part] = min(time, most)
        most -= found[part]
    return found


def _with_between(spent: dict[StepPart, int], row: Sequence[int], rest: int) -> dict[StepPart, int]:
    """The parts, with what was done between them, and what is left of the step."""
    known = BetweenTimes(row)
    in_backward = _limited(row[StepColumn.OTHERS_IN_BACKWARD], spent[StepPart.BACKWARD])
    in_accumulation = min(known.before_forward, spent[StepPart.ACCUMULATION])
    in_loss = min(known.in_loss, spent[StepPart.LOSS])
    before_optimizer = min(known.before_optimizer, spent[StepPart.BEFORE_OPTIMIZER])
    last = min(known.last, rest)
    inside = at_most(in_accumulation + in_loss, known.inside)
    after = at_most(before_optimizer + last, known.after)
    since = max(row[StepColumn.END], row[StepColumn.OPTIMIZER_END])
    until_loader = elapsed(since, row[StepColumn.LOADER_START]) - known.after_optimizer
    after_optimizer = _limited(until_loader, rest - last)
    found = spent | {part: inside[part] + after[part] for part in BETWEEN_PARTS}
    found[StepPart.ACCUMULATION] -= in_accumulation
    found[StepPart.LOSS] -= in_loss
    found[StepPart.BACKWARD] -= in_backward
    found[StepPart.OTHER_WRAPPERS] += in_backward
    found[StepPart.BEFORE_OPTIMIZER] -= before_optimizer
    return found | {
        StepPart.AFTER_OPTIMIZER: after_optimizer,
        StepPart.DATA: rest - last - after_optimizer,
    }


def typical(values: Sequence[float]) -> float:
    """The mean of the middle half of some values."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])


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


def communication(run: WrapperRun, timeline: RankTimeline, pauses: Sequence[int]) -> tuple[float, float]:
    """Mean nanoseconds per step in which a bucket was in flight, and how many of them in backward.

    Only of the steps with the main plan; in others it is not known.

    Args:
        run: the run.
        timeline: the rank's steps.
        pauses: the pauses in each of its steps; a bucket may be in flight for as long as another rank pauses.
    """
    sampled = [row for row in sampled_rows(timeline) if timeline.has_buckets(row)] or sampled_rows(timeline)
    rows = [row for row in sampled if not pauses[row]] or sampled
    in_flight, overlap = 0, 0
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
