"""How late each rank is where ranks wait for each other, and in which part of a step it loses the time.

Only what a rank does by itself counts. See Note [Delays that are passed on].
"""

import enum
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from paceline.recording.rows import StepColumn
from paceline.tools.report.step_parts import PartTimes, StepPart, median
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun

# Note [Delays that are passed on]
#
# A rank that comes late to the broadcast of module buffers may hold up some ranks there and not others: the
# source sends and goes on, while another rank waits. That one then ends its backward as late as the rank that
# it waited for. So a rank's backward counts as if it had ended earlier, by what the rank has waited after the
# first rank had left the broadcast. A rank that came later than that has not waited, and its delay stays.

# What a rank does alone; in the other parts it waits for other ranks.
_ALONE: list[StepPart] = [
    part
    for part in StepPart
    if part not in (StepPart.JOIN, StepPart.BUFFERS, StepPart.WAITING, StepPart.EXPOSED_COMMUNICATION)
]
# A part that takes this many nanoseconds longer than on other ranks is worth naming; less is noise.
LEAST = 100_000

# For each rank, step by step: its delay against the median of the other ranks, in nanoseconds.
Delays = Sequence[Sequence[int]]
# From the first index to the one after the last, of steps or blocks.
Period = tuple[int, int]


class SyncPoint(enum.StrEnum):
    """Where ranks wait for each other."""

    FORWARD_START = "the start of forward"
    """If module buffers are synchronised there, or under join."""
    BACKWARD_END = "the end of backward"


class SyncTimes(NamedTuple):
    """When a rank came to the synchronisation points of a step, and when it left the first of them."""

    forward_start: int
    buffers_end: int
    backward_end: int


def delays_against_others(times: Sequence[int]) -> list[int]:
    """By how much each time is after the median of the others; of two middle ones the earlier counts."""
    if len(times) < 2:
        return [0] * len(times)
    ordered = sorted(times)
    middle = (len(times) - 2) // 2
    return [time - ordered[middle + (bisect_left(ordered, time) <= middle)] for time in times]


def sync_delays(run: WrapperRun, least: float) -> dict[SyncPoint, Delays]:
    """How late each rank is at each synchronisation point, in the steps that all ranks have.

    Args:
        run: the run.
        least: the least delay that matters; clocks of hosts that are worse than that are not used.
    """
    by_step = _sync_times(run, uses_clocks=_are_clocks_good(run, least))
    ends = [own_backward_ends(step) for step in by_step]
    found = {SyncPoint.BACKWARD_END: _compare(ends, len(run.timelines))}
    if all(_waits_in_forward(timeline) for timeline in run.timelines):
        starts = [[each.forward_start for each in step] for step in by_step]
        found[SyncPoint.FORWARD_START] = _compare(starts, len(run.timelines))
    return found


def _waits_in_forward(timeline: RankTimeline) -> bool:
    return any(timeline[StepColumn.BUFFERS_END]) or any(timeline[StepColumn.JOIN_END])


def own_backward_ends(ranks: Sequence[SyncTimes]) -> list[int]:
    """When each rank ended its backward in a step, without delays that were passed on to it."""
    first = min(each.buffers_end for each in ranks)
    return [each.backward_end - (each.buffers_end - max(each.forward_start, first)) for each in ranks]


def _sync_times(run: WrapperRun, *, uses_clocks: bool) -> list[tuple[SyncTimes, ...]]:
    """For each step, the times of all ranks."""
    ranks = []
    for timeline, rows in zip(run.timelines, run.common_rows, strict=True):
        reduced = timeline[StepColumn.ALL_REDUCED]
        ranks.append([_rank_times(timeline, row, zero=0 if uses_clocks else reduced[row]) for row in rows])
    return list(zip(*ranks, strict=True))


def _rank_times(timeline: RankTimeline, row: int, *, zero: int) -> SyncTimes:
    start, join_end = timeline[StepColumn.FORWARD_START][row], timeline[StepColumn.JOIN_END][row]
    # Without a broadcast, and without join, a rank is through with it at once.
    ready = max(start, join_end, timeline[StepColumn.BUFFERS_END][row])
    return SyncTimes(start - zero, ready - zero, timeline[StepColumn.BACKWARD_END][row] - zero)


def _are_clocks_good(run: WrapperRun, least: float) -> bool:
    """Whether clocks show delays that matter.

    If not, times are taken from when the last bucket was reduced, which is the same moment on all ranks.
    """
    uncertainty = run.clock_uncertainty
    return uncertainty is not None and 2 * uncertainty <= least


def _compare(by_step: Sequence[Sequence[int]], ranks: int) -> Delays:
    return list(zip(*map(delays_against_others, by_step), strict=True)) or [[]] * ranks


def last_share(delays: Sequence[Sequence[float]], rank: int, period: Period) -> float:
    """The share of steps in which a rank had the longest delay."""
    steps = list(zip(*(own[slice(*period)] for own in delays), strict=True))
    last = sum(1 for step in steps if step[rank] == max(step) > min(step))
    return last / max(1, len(steps))


def slow_part(
    run: WrapperRun, parts: Sequence[PartTimes], number: int, period: Period
) -> tuple[StepPart | None, float]:
    """The part in which a rank exceeds the others most, and by how many nanoseconds; None if it does not.

    Only parts in which a rank does not wait for others are compared.

    Args:
        run: the run.
        parts: the parts of each rank's steps.
        number: the rank's place among the run's timelines.
        period: the steps to look at, of those that all ranks have.
    """
    excess: dict[StepPart, float] = {}
    for part in _ALONE:
        medians = [
            int(median([own[part][row] for row in rows[slice(*period)]]))
            for own, rows in zip(parts, run.common_rows, strict=True)
        ]
        excess[part] = delays_against_others(medians)[number]
    part = max(excess, key=lambda each: excess[each])
    return (part, excess[part]) if excess[part] >= LEAST else (None, 0.0)
