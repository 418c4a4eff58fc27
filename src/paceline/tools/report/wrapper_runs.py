"""Puts the recordings of single ranks together: one run per wrapper, with one timeline per rank.

A timeline has the buckets of the plan that most steps had, and the steps of other plans without buckets: see
Note [Plans that follow each other]. All times are on the clock of the first rank's host. See Note [Runs that
were healed] for runs whose ranks were replaced.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from paceline.errors import RecordingError
from paceline.recording.reader import PlanRecording
from paceline.recording.rows import NOT_TIMES, BucketColumn, StepColumn, StepKind, row_width
from paceline.tools.report.generations import (
    PlanSummary,
    done_again_from,
    generation_of,
    main_recordings,
    mark_lost,
    other_plans,
    recorded_plans,
)
from paceline.tools.report.host_clocks import SAME_CLOCK, ClockOffset, clock_offsets, host_key


@dataclass(frozen=True)
class RankTimeline:
    """The steps of one rank.

    Attributes:
        descriptions: what the rank wrote about itself with each of its plans; see ``PlanRecording``.
        columns: the columns of ``StepColumn``, then ``BucketColumn`` for each bucket of the main plan; these
            are 0 in steps of other plans.
        sums: sums over blocks of all steps, whatever their plan.
        clocks: what was added to the rank's own times, with each of its plans.
        last_rows: the last row of each generation; the next row's step did not follow at once.
    """

    descriptions: Sequence[Mapping[str, Any]]
    columns: Sequence[Sequence[int]]
    sums: Sequence[Sequence[int]]
    clocks: Sequence[ClockOffset]
    last_rows: Sequence[int]

    @property
    def rank(self) -> int:
        """The global rank of the process."""
        return int(self.descriptions[0]["rank"])

    @property
    def host(self) -> str:
        """The name of its host; if a process on another host took its place, the names of both."""
        return ", ".join(dict.fromkeys(str(each["host"]) for each in self.descriptions))

    def __len__(self) -> int:
        return len(self.columns[StepColumn.STEP])

    def __getitem__(self, column: StepColumn) -> Sequence[int]:
        return self.columns[column]

    def row(self, number: int) -> Sequence[int]:
        """One step, without its buckets."""
        return [column[number] for column in self.columns[: len(StepColumn)]]

    def bucket(self, index: int, column: BucketColumn) -> Sequence[int]:
        """One column of one bucket."""
        return self.columns[len(StepColumn) + index * len(BucketColumn) + column]

    def has_buckets(self, row: int) -> bool:
        """Whether a step has launched buckets of the main plan; the first is launched first."""
        return self.bucket(0, BucketColumn.LAUNCH)[row] > 0

    def row_of(self, step: int) -> int:
        """The first row that is not of a step before this one."""
        return next((row for row, each in enumerate(self[StepColumn.STEP]) if each >= step), len(self))

    def from_step(self, step: int) -> "RankTimeline":
        """The timeline without the steps before this one."""
        first = self.row_of(step)
        if first == 0:
            return self
        columns = [column[first:] for column in self.columns]
        last_rows = [row - first for row in self.last_rows if row >= first]
        return replace(self, columns=columns, last_rows=last_rows)

    @cached_property
    def step_times(self) -> Sequence[int]:
        """From each step's begin to the next one's; for the last step of a generation, to its own end."""
        begins = self[StepColumn.BEGIN]
        ends = [*begins[1:], 0]
        for row in self.last_rows:
            ends[row] = max(self[StepColumn.END][row], self[StepColumn.OPTIMIZER_END][row])
        return [max(0, end - begin) for begin, end in zip(begins, ends, strict=False)]


@dataclass(frozen=True)
class WrapperRun:
    """One wrapper on all of its ranks.

    Attributes:
        module: the class name of the wrapped module; with a number, if another wrapper has the same.
        group: the global ranks that the wrapper averages over.
        timelines: the steps of each rank.
        plans: all plans of the wrapper.
        missing: ranks of the group that recorded nothing.
        done_again: the steps that were lost, and that a later generation did again.
        description: what the first rank wrote about itself, when it began with the plan.
    """

    module: str
    group: Sequence[int]
    timelines: Sequence[RankTimeline]
    plans: Sequence[PlanSummary]
    missing: Sequence[int]
    done_again: Collection[int]
    description: Mapping[str, Any]

    @property
    def buckets(self) -> Sequence[Mapping[str, Any]]:
        """The buckets of the plan, in launch order."""
        return list(self.description["buckets"])

    @property
    def clock_uncertainty(self) -> int | None:
        """How many nanoseconds a difference between two ranks' times may be wrong; None if unknown."""
        known = [clock.uncertainty for timeline in self.timelines for clock in timeline.clocks]
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
        """When the slowest rank ended its backward, by step; without steps that were lost."""
        last: dict[int, int] = {}
        columns = (StepColumn.STEP, StepColumn.KIND, StepColumn.BACKWARD_END)
        for timeline in self.timelines:
            for step, kind, end in zip(*(timeline[column] for column in columns), strict=True):
                if end > last.get(step, 0) and not kind & StepKind.LOST:
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


def wrapper_runs(recordings: Sequence[PlanRecording]) -> list[WrapperRun]:
    """One run per wrapper, the one that took most time first.

    Raises:
        RecordingError: no step was recorded.
    """
    of_all_groups: dict[tuple[str, int], list[PlanRecording]] = defaultdict(list)
    for each in recordings:
        of_all_groups[_wrapper_key(each)].append(each)
    runs = [wrapper_run(own, of_all_groups[_wrapper_key(own[0])]) for own in _by_wrapper(recordings)]
    if not any(len(timeline) for run in runs for timeline in run.timelines):
        raise RecordingError(
            "no step was recorded: the ranks ended before their first synchronised backward did"
        )
    whole = _told_apart([run for run in runs if all(map(len, run.timelines))])
    return sorted(whole, key=lambda run: -max(sum(timeline.step_times) for timeline in run.timelines))


def _told_apart(runs: Sequence[WrapperRun]) -> list[WrapperRun]:
    """The runs; if wrappers of the same ranks have modules of one class, with numbers behind its name."""
    by_name: dict[tuple[Any, ...], list[WrapperRun]] = defaultdict(list)
    for run in runs:
        by_name[run.module, *run.group].append(run)
    return [
        run if len(same) == 1 else replace(run, module=f"{run.module} ({number})")
        for same in by_name.values()
        for number, run in enumerate(sorted(same, key=lambda run: run.description["wrapper"]), start=1)
    ]


def _by_wrapper(recordings: Iterable[PlanRecording]) -> list[list[PlanRecording]]:
    """The recordings of each wrapper; its ranks may have numbered their wrappers differently."""
    by_rank: dict[tuple[Any, ...], list[PlanRecording]] = defaultdict(list)
    for each in recordings:
        key = (tuple(each.description["group"]), str(each.description["module"]))
        by_rank[each.rank, each.wrapper, *key].append(each)
    seen: Counter[tuple[Any, ...]] = Counter()
    together: dict[tuple[Any, ...], list[PlanRecording]] = defaultdict(list)
    for (rank, _, *rest), own in sorted(by_rank.items()):
        key = (rank, *rest)
        together[*rest, seen[key]].extend(own)
        seen[key] += 1
    return list(together.values())


def _wrapper_key(recording: PlanRecording) -> tuple[str, int]:
    return str(recording.description["module"]), recording.wrapper


def wrapper_run(
    recordings: Sequence[PlanRecording], of_all_groups: Sequence[PlanRecording] = ()
) -> WrapperRun:
    """The run of one wrapper, from the recordings of its ranks and plans.

    Args:
        recordings: the recordings, all of one group of ranks.
        of_all_groups: also those of other groups, with which the wrapper has done lost steps again.
    """
    again = done_again_from([*recordings, *of_all_groups])
    recordings = [mark_lost(each, again[generation_of(each.plan)]) for each in recordings]
    plans = recorded_plans(recordings)
    main = main_recordings(plans)
    clocks = clock_offsets(main)
    shown = [each for each in (*main, *other_plans(recordings, main)) if host_key(each) in clocks]
    by_rank, all_by_rank = _by_rank(shown), _by_rank(recordings)
    description = main[0].description
    return WrapperRun(
        module=str(description["module"]),
        group=list(description["group"]),
        timelines=[_timeline(own, all_by_rank[rank], clocks) for rank, own in by_rank.items()],
        plans=[plan.summary for plan in plans],
        missing=sorted(set(description["group"]) - by_rank.keys()),
        done_again={
            row[StepColumn.STEP]
            for each in shown
            for row in each.rows
            if row[StepColumn.STEP] >= again[generation_of(each.plan)]
        },
        description=description,
    )


def _by_rank(recordings: Iterable[PlanRecording]) -> dict[int, list[PlanRecording]]:
    """The recordings of each rank, by plan."""
    by_rank: dict[int, list[PlanRecording]] = defaultdict(list)
    for each in sorted(recordings, key=lambda each: (each.rank, each.plan)):
        by_rank[each.rank].append(each)
    return by_rank


def _timeline(
    own: Sequence[PlanRecording], of_all_plans: Iterable[PlanRecording], clocks: Mapping[str, ClockOffset]
) -> RankTimeline:
    own_clocks = [clocks[host_key(each)] for each in own]
    parts = [_columns(each, clock) for each, clock in zip(own, own_clocks, strict=True)]
    last_rows = {
        generation_of(each.plan): end - 1
        for each, end in zip(own, accumulate(len(each.rows) for each in own), strict=True)
        if end
    }
    return RankTimeline(
        descriptions=[each.description for each in own],
        columns=[list(chain(*column)) for column in zip(*parts, strict=True)],
        sums=[block for each in of_all_plans for block in each.sums],
        clocks=own_clocks,
        last_rows=list(last_rows.values()),
    )


def _columns(recording: PlanRecording, clock: ClockOffset) -> list[Sequence[int]]:
    width = row_width(len(recording.description["buckets"]))
    columns: list[Sequence[int]] = [list(each) for each in zip(*recording.rows, strict=True)] or [[]] * width
    if clock is not SAME_CLOCK:
        offsets = [clock.at(step) for step in columns[StepColumn.STEP]]
        for index, column in enumerate(columns):
            if _is_time(index):
                columns[index] = [time and time + more for time, more in zip(column, offsets, strict=True)]
    return columns


def _is_time(column: int) -> bool:
    if column < len(StepColumn):
        return column not in NOT_TIMES
    return (column - len(StepColumn)) % len(BucketColumn) != BucketColumn.LAST_SLOT
