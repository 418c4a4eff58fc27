"""What each bucket waits for: its last gradient, then earlier buckets, which must be launched first."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.recording.rows import BucketColumn, StepColumn
from paceline.tools.report.step_parts import median, sampled_rows
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun

# A launch itself takes some microseconds; a shorter time between ready and launch is no wait.
_LEAST_WAIT = 50_000


@dataclass(frozen=True)
class BucketTimes:
    """A bucket on one rank: median milliseconds after the start of backward."""

    ready: float
    launch: float
    reduced: float


@dataclass(frozen=True)
class BucketWait:
    """A bucket, and what it waits for.

    Attributes:
        bucket: its index in the plan.
        nbytes: the size of its gradients.
        parameters: how many parameters it has.
        ranks: its times on each rank.
        last_parameter: the parameter whose gradient most often comes last.
        last_share: the share of the steps in which it is that parameter.
        queued_ms: how long the bucket is ready but not launched, because buckets are launched in order.
        queued_behind: the earlier bucket that it waits for then; None if the wait is negligible.
        queued_behind_parameter: the parameter that this earlier bucket waits for.
    """

    bucket: int
    nbytes: int
    parameters: int
    ranks: Sequence[BucketTimes]
    last_parameter: str
    last_share: float
    queued_ms: float
    queued_behind: int | None
    queued_behind_parameter: str | None


def bucket_waits(run: WrapperRun) -> list[BucketWait]:
    """What each bucket of a run waits for."""
    last_parameters: list[str] = []
    waits = []
    queues = [_LaunchQueue(timeline) for timeline in run.timelines]
    for index, bucket in enumerate(run.buckets):
        slot, share = _last_slot(run, index)
        last_parameters.append(run.parameter_name(slot) if share else "none")
        queued, behind = _queued(queues, index)
        waits.append(
            BucketWait(
                bucket=index,
                nbytes=int(bucket["nbytes"]),
                parameters=len(bucket["slots"]),
                ranks=[_times(timeline, index) for timeline in run.timelines],
                last_parameter=last_parameters[index],
                last_share=share,
                queued_ms=queued / 1e6,
                queued_behind=behind,
                queued_behind_parameter=None if behind is None else last_parameters[behind],
            )
        )
    return waits


def _times(timeline: RankTimeline, bucket: int) -> BucketTimes:
    start, rows = timeline[StepColumn.BACKWARD_START], sampled_rows(timeline)
    columns = (
        timeline.bucket(bucket, each)
        for each in (BucketColumn.READY, BucketColumn.LAUNCH, BucketColumn.REDUCED)
    )
    return BucketTimes(
        *(
            round(median([column[row] - start[row] for row in rows if column[row]]) / 1e6, 4)
            for column in columns
        )
    )


def _last_slot(run: WrapperRun, bucket: int) -> tuple[int, float]:
    """The slot whose gradient most often comes last, and in which share of the steps."""
    counts: Counter[int] = Counter()
    for timeline in run.timelines:
        ready = timeline.bucket(bucket, BucketColumn.READY)
        last_slot = timeline.bucket(bucket, BucketColumn.LAST_SLOT)
        counts.update(last_slot[row] for row in sampled_rows(timeline) if ready[row])
    if not counts:
        return 0, 0.0
    slot, steps = counts.most_common(1)[0]
    return slot, steps / counts.total()


class _LaunchQueue:
    """The buckets of one rank, which are asked for in launch order."""

    def __init__(self, timeline: RankTimeline) -> None:
        self._timeline = timeline
        self._rows = sampled_rows(timeline)
        # For each row: when the last of the buckets so far was ready, and which one that is.
        self._last_ready = [(0, -1)] * len(self._rows)

    def next(self, bucket: int) -> Iterator[tuple[int, int | None]]:
        """For each step: how long the bucket was ready but not launched, and behind which bucket."""
        ready = self._timeline.bucket(bucket, BucketColumn.READY)
        launch = self._timeline.bucket(bucket, BucketColumn.LAUNCH)
        for number, row in enumerate(self._rows):
            time, earlier = self._last_ready[number]
            if ready[row] and launch[row]:
                yield max(0, launch[row] - ready[row]), earlier if time > ready[row] else None
            self._last_ready[number] = max(self._last_ready[number], (ready[row], bucket))


def _queued(queues: Sequence[_LaunchQueue], bucket: int) -> tuple[float, int | None]:
    """Median time that a bucket is ready but not launched, and the bucket that it waits for most often."""
    waits = [each for queue in queues for each in queue.next(bucket)]
    queued = median([time for time, _ in waits])
    behind = Counter(each for _, each in waits if each is not None)
    if not behind or queued < _LEAST_WAIT:
        return queued, None
    return queued, behind.most_common(1)[0][0]
