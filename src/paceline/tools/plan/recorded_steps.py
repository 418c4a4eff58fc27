"""What a plan takes from a recording: when each rank's buckets were ready, step by step (no torch).

Steps with a pause, such as an evaluation or a checkpoint, are left out: drawn for one rank of many, a pause
would be a straggler in every step. See Note [Pauses] in wall_time.py.
"""

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import RecordingError
from paceline.recording.reader import read_recording
from paceline.recording.rows import BucketColumn, StepColumn
from paceline.tools.formatting import byte_size, milliseconds, rank_list
from paceline.tools.report.step_parts import median
from paceline.tools.report.wall_time import RankWallTime, handshake, rank_wall_times
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun, wrapper_runs

_FEWEST_STEPS = 8
# How recordings call the exchange without a hook, and what carries it on one host.
PLAIN = "the average"
_ON_ONE_HOST = "shared memory"


@dataclass(frozen=True)
class RankStep:
    """One rank's own work in one step; seconds since the averages of the step before were there.

    Attributes:
        ready: when each bucket was ready, in launch order.
        backward_end: when backward ended.
        averaged: when all averages were there; 0 if that says nothing of one host that averages plainly.
    """

    ready: tuple[float, ...]
    backward_end: float
    averaged: float = 0.0


@dataclass(frozen=True)
class BucketSizes:
    """The parameters of a bucket.

    Attributes:
        slots: their indices.
        numels: their elements. Recordings have bytes only: an element counts as float32.
    """

    slots: tuple[int, ...]
    numels: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return 4 * sum(self.numels)


@dataclass(frozen=True)
class RecordedSteps:
    """The steps of the wrapper that took most time, of those with two ranks or more.

    Attributes:
        module: the class name of the wrapped module.
        ranks: how many ranks recorded.
        ranks_per_host: how many of the run's ranks were on each host.
        buckets: the buckets, in launch order.
        steps: of each step, every rank's own work.
        step_seconds: the median of the whole steps.
        hosts: on how many hosts the recording was made.
        paused_steps: how many steps were left out, because a rank paused in them or waited for a pause.
        paused_seconds: how much pauses add to a step, on average over all steps.
        missing: ranks of the wrapper that recorded no steps.
        other_modules: the modules of the other wrappers in the recording.
        has_join: whether ranks told each other in join who has inputs.
        exchange: how gradients were averaged.
        summing_ranks: the ranks of a host that summed gradients in shared memory, as part of their recorded
            work; 1 if there were none.
    """

    module: str
    ranks: int
    ranks_per_host: int
    buckets: Sequence[BucketSizes]
    steps: Sequence[Sequence[RankStep]]
    step_seconds: float
    hosts: int
    paused_steps: int = 0
    paused_seconds: float = 0.0
    missing: Sequence[int] = ()
    other_modules: Sequence[str] = ()
    has_join: bool = False
    exchange: str = PLAIN
    summing_ranks: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def notes(self) -> list[str]:
        """What of the recording is not in the plan, one line each."""
        found = []
        if self.missing:
            do = "it does" if len(self.missing) == 1 else "they do"
            found.append(f"{rank_list(self.missing)} recorded no steps, and what {do} is not in the plan")
        if self.other_modules:
            found.append(
                f"the plan is for {self.module}: what other wrappers exchange is not in it "
                f"({', '.join(self.other_modules)})"
            )
        if self.has_join:
            found.append("recorded in join: what hosts tell each other there is not in the plan")
        if self.paused_steps:
            found.append(
                f"pauses add {milliseconds(self.paused_seconds * 1e3)} per step; they are not in the plan "
                f"(steps left out: {self.paused_steps})"
            )
        how = [f"on {self.hosts} hosts"] * (self.hosts > 1)
        how += [f"with {self.exchange}"] * (self.exchange != PLAIN)
        if how:
            found.append(
                f"recorded {' and '.join(how)}: what that took in backward counts as the ranks' own work "
                "(record one host without a hook)"
            )
        return found

    @property
    def own_seconds(self) -> float:
        """The median of what a rank's own work takes in a step."""
        return median([rank.backward_end for step in self.steps for rank in step])


def read_steps(folder: Path) -> RecordedSteps:
    """The recorded steps in a folder.

    Raises:
        RecordingError: there is no recording, or it has no communication, or too few steps, or a bucket that
            is larger than this machine's memory.
    """
    runs = wrapper_runs(read_recording(folder))
    run = next((each for each in runs if len(each.group) > 1), None)
    if run is None:
        raise RecordingError(
            f"the recording has no communication (folder: {folder}, ranks: 1); record two ranks or more: "
            f"paceline run -n 2 --record {folder} script.py"
        )
    # A run that went on with fewer ranks is of the same module.
    others = dict.fromkeys(each.module for each in runs if each.module != run.module)
    recorded = replace(_recorded_steps(run, folder), other_modules=list(others))
    largest = max((bucket.nbytes for bucket in recorded.buckets), default=0)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if largest > memory:
        raise RecordingError(
            "hooks cannot be measured here, because a recorded bucket is larger than this machine's memory "
            f"(folder: {folder}, bucket: {byte_size(largest)}, memory: {byte_size(memory)})"
        )
    return recorded


def _recorded_steps(run: WrapperRun, folder: Path) -> RecordedSteps:
    walls = rank_wall_times(run)
    whole = [own[:-1] for own in run.common_rows]  # the last step's time is not complete
    rows = _without_pauses(whole, walls)
    paused = len(whole[0]) - len(rows[0])
    by_rank = [
        [_rank_step(run, timeline, row) for row in own]
        for timeline, own in zip(run.timelines, rows, strict=True)
    ]
    steps = [
        [rank for rank in step if rank is not None] for step in zip(*by_rank, strict=True) if None not in step
    ]
    if len(steps) < _FEWEST_STEPS:
        raise RecordingError(
            f"the recording has too few whole steps for a plan (folder: {folder}, steps: {len(steps)}, "
            f"steps with pauses: {paused}; at least {_FEWEST_STEPS} without a pause); record a longer run"
        )
    hosts = max(1, int(run.description["hosts"]))
    ranks_per_host = -(-len(run.group) // hosts)
    times = [each.step_times[row] / 1e9 for each, own in zip(run.timelines, rows, strict=True) for row in own]
    return RecordedSteps(
        module=run.module,
        ranks=len(run.timelines),
        ranks_per_host=ranks_per_host,
        buckets=[_sizes(bucket, run.description["nbytes"]) for bucket in run.buckets],
        steps=steps,
        step_seconds=median(times),
        hosts=hosts,
        paused_steps=paused,
        # A rank's pauses and its waits for those of others: the longest are what the run lost.
        missing=run.missing,
        has_join=any(
            handshake(timeline, row) for timeline, own in zip(run.timelines, rows, strict=True) for row in own
        ),
        paused_seconds=max(wall.paused / max(1, wall.steps) for wall in walls) / 1e9,
        exchange=str(run.description["exchange"]),
        # On several hosts it is "shared memory and c10d".
        summing_ranks=ranks_per_host if run.description["transport"].startswith(_ON_ONE_HOST) else 1,
    )


def _without_pauses(rows: Sequence[Sequence[int]], walls: Sequence[RankWallTime]) -> list[list[int]]:
    """Of each rank's rows, step by step, those of steps in which no rank paused."""
    paused = [{pause.row for pause in wall.pauses} for wall in walls]
    steps = [step for step in zip(*rows, strict=True) if not any(map(operator.contains, paused, step))]
    return [[step[place] for step in steps] for place in range(len(rows))]


def _rank_step(run: WrapperRun, timeline: RankTimeline, row: int) -> RankStep | None:
    """One step; None if something of it was not recorded, or cannot be."""
    begin, end = timeline[StepColumn.BEGIN][row], timeline[StepColumn.BACKWARD_END][row]
    reduced = timeline[StepColumn.ALL_REDUCED][row]
    ready = [timeline.bucket(each, BucketColumn.READY)[row] for each in range(len(run.buckets))]
    if not (0 < begin < end and begin < reduced and timeline.has_buckets(row)):
        return None
    # From the averages to the next step's begin: the optimizer, and the next batch. A step is counted from
    # averages to averages, because there the ranks have met.
    after = max(0, timeline.step_times[row] - (reduced - begin))
    seconds = [(after + (each if begin <= each <= end else end) - begin) / 1e9 for each in (*ready, end)]
    description = run.description
    is_plain = description["transport"] == _ON_ONE_HOST and description["exchange"] == PLAIN
    averaged = (after + reduced - begin) / 1e9 if is_plain else 0.0
    return RankStep(tuple(seconds[:-1]), seconds[-1], averaged)


def _sizes(bucket: Mapping[str, Any], nbytes: Sequence[int]) -> BucketSizes:
    slots = tuple(bucket["slots"])
    return BucketSizes(slots, tuple(-(-nbytes[slot] // 4) for slot in slots))
