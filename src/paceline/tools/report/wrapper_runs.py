"""Puts the recordings of single ranks together: one run per wrapper, with one timeline per rank.

A timeline has the steps of the bucket plan that most steps had. All times are on the clock of the first
rank's host.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paceline.errors import RecordingError
from paceline.recording.reader import PlanRecording
from paceline.recording.rows import BucketColumn, StepColumn, StepKind, row_width
from paceline.tools.report.host_clocks import SAME_CLOCK, ClockOffset, clock_offsets, host_key

_NOT_TIMES = (StepColumn.STEP, StepColumn.KIND, StepColumn.FORWARDS, StepColumn.COUNT)


@dataclass(frozen=True)
class RankTimeline:
    """The steps that one rank did with one bucket plan.

    Attributes:
        description: what the rank wrote about itself; see ``PlanRecording``.
        columns: the columns of ``StepColumn``, then ``BucketColumn`` for each bucket.
        sums: sums over blocks of all steps, whatever their plan.
        clock: what was added to the rank's own times.
    """

    description: Mapping[str, Any]
    columns: Sequence[Sequence[int]]
    sums: Sequence[Sequence[int]]
    clock: ClockOffset

    @property
    def rank(self) -> int:
        """The global rank of the process."""
        return int(self.description["rank"])

    def __len__(self) -> int:
        return len(self.columns[StepColumn.STEP])

    def __getitem__(self, column: StepColumn) -> Sequence[int]:
        return self.columns[column]

    def bucket(self, index: int, column: BucketColumn) -> Sequence[int]:
        """One column of one bucket."""
        return self.columns[len(StepColumn) + index * len(BucketColumn) + column]

    def from_step(self, step: int) -> "RankTimeline":
        """The timeline without the steps before this one."""
        first = next((row for row, each in enumerate(self[StepColumn.STEP]) if each >= step), len(self))
        return self if first == 0 else replace(self, columns=[column[first:] for column in self.columns])

    @cached_property
    def step_times(self) -> Sequence[int]:
        """From each step's begin to the next one's; for the last step, to its own end."""
        begins = self[StepColumn.BEGIN]
        if not begins:
            return []
        ends = [*begins[1:], max(self[StepColumn.END][-1], self[StepColumn.OPTIMIZER_END][-1])]
        return [max(0, end - begin) for begin, end in zip(begins, ends, strict=True)]


@dataclass(frozen=True)
class PlanSummary:
    """A bucket plan that the wrapper had: its number, how many steps and buckets, and how it averaged."""

    number: int
    steps: int
    buckets: int
    exchange: str


@dataclass(frozen=True)
class WrapperRun:
    """One wrapper on all of its ranks.

    Attributes:
        module: the class name of the wrapped module.
        group: the global ranks that the wrapper averages over.
        timelines: of each rank, the steps with the plan that most steps had.
        plans: all plans of the wrapper.
        missing: ranks of the group that recorded nothing.
    """

    module: str
    group: Sequence[int]
    timelines: Sequence[RankTimeline]
    plans: Sequence[PlanSummary]
    missing: Sequence[int]

    @property
    def description(self) -> Mapping[str, Any]:
        """What the first rank wrote about itself."""
        return self.timelines[0].description

    @property
    def buckets(self) -> Sequence[Mapping[str, Any]]:
        """The buckets of the plan, in launch order."""
        return list(self.description["buckets"])

    @property
    def clock_uncertainty(self) -> int | None:
        """How many nanoseconds a difference between two ranks' times may be wrong; None if unknown."""
        known = [timeline.clock.uncertainty for timeline in self.timelines]
        return None if None in known else max(each for each in known if each is not None)

    @cached_property
    def common_rows(self) -> Sequence[Sequence[int]]:
        """Of each timeline, the rows of the steps that were ordinary on every rank."""
        rows_by_step = [
            {
                step: row
                for row, (step, kind) in enumerate(
                    zip(timeline[StepColumn.STEP], timeline[StepColumn.KIND], strict=True)
                )
                if kind == StepKind.ORDINARY
            }
            for timeline in self.timelines
        ]
        common = sorted(set(rows_by_step[0]).intersection(*rows_by_step[1:]))
        return [[rows[step] for step in common] for rows in rows_by_step]

    @cached_property
    def common_steps(self) -> Sequence[int]:
        """The numbers of those steps."""
        numbers = self.timelines[0][StepColumn.STEP]
        return [numbers[row] for row in self.common_rows[0]]

    @cached_property
    def last_backward_ends(self) -> Mapping[int, int]:
        """When the slowest rank ended its backward, by step."""
        last: dict[int, int] = {}
        for timeline in self.timelines:
            for step, end in zip(timeline[StepColumn.STEP], timeline[StepColumn.BACKWARD_END], strict=True):
                if end > last.get(step, 0):
                    last[step] = end
        return last

    def from_step(self, step: int) -> "WrapperRun":
        """The run without the steps before this one."""
        return replace(self, timelines=[timeline.from_step(step) for timeline in self.timelines])

    def parameter_name(self, slot: int) -> str:
        """The name of a parameter."""
        names = self.description["slots"]
        return str(names[slot]) if 0 <= slot < len(names) else f"slot {slot}"

    def steps_of_kind(self, kind: StepKind) -> int:
        """How many steps were of a kind on at least one rank."""
        steps = {
            step
            for timeline in self.timelines
            for step, each in zip(timeline[StepColumn.STEP], timeline[StepColumn.KIND], strict=True)
            if each & kind
        }
        return len(steps)


def wrapper_runs(recordings: Iterable[PlanRecording]) -> list[WrapperRun]:
    """One run per wrapper, the one that took most time first.

    Raises:
        RecordingError: no step was recorded.
    """
    runs = [wrapper_run(each) for each in _by_wrapper(recordings)]
    if not any(len(timeline) for run in runs for timeline in run.timelines):
        raise RecordingError(
            "no step was recorded: the ranks ended before their first synchronised backward did"
        )
    whole = [run for run in runs if all(map(len, run.timelines))]
    return sorted(whole, key=lambda run: -max(sum(timeline.step_times) for timeline in run.timelines))


def _by_wrapper(recordings: Iterable[PlanRecording]) -> list[list[PlanRecording]]:
    """The recordings of each wrapper; its ranks may have numbered their wrappers differently."""
    by_rank: dict[tuple[int, int], list[PlanRecording]] = defaultdict(list)
    for recording in recordings:
        by_rank[recording.rank, recording.wrapper].append(recording)
    seen: Counter[tuple[Any, ...]] = Counter()
    together: dict[tuple[Any, ...], list[PlanRecording]] = defaultdict(list)
    for (rank, _), own in sorted(by_rank.items()):
        key = (tuple(own[0].description["group"]), str(own[0].description["module"]))
        together[*key, seen[rank, key]].extend(own)
        seen[rank, key] += 1
    return list(together.values())


def wrapper_run(recordings: Sequence[PlanRecording]) -> WrapperRun:
    """The run of one wrapper, from the recordings of its ranks and plans."""
    steps: Counter[int] = Counter()
    for each in recordings:
        steps[each.plan] = max(steps[each.plan], each.written)
    plan = max(steps, key=lambda number: (steps[number], -number))
    main = [each for each in recordings if each.plan == plan and each.rows]
    if not main:
        main = [each for each in recordings if each.plan == plan]
    description = main[0].description
    # A folder that was used twice may hold files of a run that had more ranks.
    main = [each for each in main if len(each.description["buckets"]) == len(description["buckets"])]
    sums: dict[int, list[Sequence[int]]] = defaultdict(list)
    for each in recordings:
        sums[each.rank] += each.sums
    clocks = clock_offsets(main)
    return WrapperRun(
        module=str(description["module"]),
        group=list(description["group"]),
        timelines=[_timeline(each, sums[each.rank], clocks[host_key(each)]) for each in main],
        plans=[_plan_summary(recordings, number, steps[number]) for number in sorted(steps)],
        missing=sorted(set(description["group"]) - {each.rank for each in main}),
    )


def _plan_summary(recordings: Sequence[PlanRecording], number: int, steps: int) -> PlanSummary:
    description = next(each.description for each in recordings if each.plan == number)
    return PlanSummary(number, steps, len(description["buckets"]), str(description["exchange"]))


def _timeline(recording: PlanRecording, sums: Sequence[Sequence[int]], clock: ClockOffset) -> RankTimeline:
    width = row_width(len(recording.description["buckets"]))
    columns: list[Sequence[int]] = [list(each) for each in zip(*recording.rows, strict=True)] or [[]] * width
    if clock is not SAME_CLOCK:
        offsets = [clock.at(step) for step in columns[StepColumn.STEP]]
        for index, column in enumerate(columns):
            if _is_time(index):
                columns[index] = [time and time + more for time, more in zip(column, offsets, strict=True)]
    return RankTimeline(recording.description, columns, sums, clock)


def _is_time(column: int) -> bool:
    if column < len(StepColumn):
        return column not in _NOT_TIMES
    return (column - len(StepColumn)) % len(BucketColumn) != BucketColumn.LAST_SLOT
