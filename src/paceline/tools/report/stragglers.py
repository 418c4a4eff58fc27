"""Finds stragglers: ranks that the others wait for. By how much, since when, and in which part of a step.

The last steps are recorded in detail: there, a straggler is who reaches a synchronisation point late. Of
earlier steps only sums are left: there, a straggler is who waits least for module buffers and after backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.recording.rows import SumColumn
from paceline.tools.report.delays import (
    LEAST,
    Delays,
    Period,
    SyncPoint,
    delays_against_others,
    last_share,
    slow_part,
    sync_delays,
)
from paceline.tools.report.step_parts import PartTimes, median, quartiles, rank_part_times, typical
from paceline.tools.report.wrapper_runs import WrapperRun

# A delay matters if it is this share of a step, and more than noise.
_SHARE = 0.03
# In fewer steps it may be chance. A period that is over must have had more steps, and this share of all.
_FEWEST = 8
_FEWEST_OVER = 32
_SHARE_OVER = 0.05
# Of two delays of about the same length, the one at the end of backward counts: there all ranks wait.
_CLEARLY = 1.25


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for, during a period of steps.

    Attributes:
        rank: the rank.
        sync_point: where it is late; a ``SyncPoint``.
        late_ms: its delay against the median of the other ranks, in the median step of the period.
        last_share: the share of the period's steps in which it came last.
        first_step: the first step of the period.
        last_step: the last step of the period; None if it lasts until the end of the recording.
        first_step_error: by how many steps ``first_step`` may be wrong.
        slow_part: the part of a step that takes longer than on other ranks; None if there is none.
        slow_part_ms: how much longer that part takes than on the median of the other ranks.
        step_ms: the typical step during the period.
        other_step_ms: the typical one of the other steps; None if there are too few.
    """

    rank: int
    sync_point: str
    late_ms: float
    last_share: float
    first_step: int
    last_step: int | None
    first_step_error: int
    slow_part: str | None
    slow_part_ms: float
    step_ms: float
    other_step_ms: float | None


@dataclass(frozen=True)
class RankDelay:
    """How late a rank reaches a synchronisation point, in the median step, and how often it is the last."""

    rank: int
    sync_point: str
    late_ms: float
    last_share: float


def late_period(delays: Sequence[float], least: float, *, fewest_over: int = _FEWEST) -> Period | None:
    """The period in which a rank is late: where what exceeds a threshold adds up to most.

    The threshold is half of the delay, once that is known. One very late step counts as a few late ones. Most
    steps of the period must be late. A period that is over must be long, or it may be noise.

    Args:
        delays: the rank's delay, step by step.
        least: the least delay that matters.
        fewest_over: the fewest steps of a period that is over.
    """
    period = _heaviest(delays, least)
    if period is not None:
        period = _heaviest(delays, max(least, median(delays[slice(*period)]) / 2))
    if period is None:
        return None
    start, end = period
    is_over = len(delays) - end >= _FEWEST
    fewest = max(fewest_over, _SHARE_OVER * len(delays)) if is_over else _FEWEST
    low, middle, _ = quartiles(delays[start:end])
    is_late = low >= least / 2 and middle >= least
    return period if end - start >= min(fewest, len(delays)) and is_late else None


def _heaviest(delays: Sequence[float], threshold: float) -> Period | None:
    best, period, total, start = 0.0, None, 0.0, 0
    for index, delay in enumerate(delays):
        if total <= 0:
            total, start = 0.0, index
        total += max(-threshold, min(delay - threshold, 3 * threshold))
        if total > best:
            best, period = total, (start, index + 1)
    return period


def find_stragglers(run: WrapperRun, step_ns: float) -> list[Straggler]:
    """The stragglers of a run, those that cost most first; ``step_ns`` is its median step."""
    if len(run.timelines) < 2:
        return []
    least = max(_SHARE * step_ns, LEAST)
    found = _in_rows(run, least) or _in_sums(run, least)
    return sorted(found, key=lambda each: -each.late_ms)


def rank_delays(run: WrapperRun, step_ns: float, stragglers: Sequence[Straggler]) -> list[RankDelay]:
    """How late each rank reaches the point where the first straggler is late, or the end of backward."""
    point = stragglers[0].sync_point if stragglers else SyncPoint.BACKWARD_END
    delays = sync_delays(run, max(_SHARE * step_ns, LEAST)).get(SyncPoint(point), [])
    return [
        RankDelay(timeline.rank, point, median(own) / 1e6, last_share(delays, number, (0, len(own))))
        for number, (timeline, own) in enumerate(zip(run.timelines, delays, strict=True))
    ]


def _in_rows(run: WrapperRun, least: float) -> list[Straggler]:
    """The stragglers of the detailed steps; one that is late at both points, where it is clearly later."""
    if len(run.common_steps) < _FEWEST:
        return []
    late = [
        (point, delays, number, period)
        for point, delays in sync_delays(run, least).items()
        for number, own in enumerate(delays)
        if (period := late_period(own, least, fewest_over=_FEWEST_OVER)) is not None
    ]
    # Most runs have no straggler, and the parts of all steps take long to find out.
    parts = rank_part_times(run) if late else []
    found: dict[int, Straggler] = {}
    for point, delays, number, period in late:
        each = _straggler(run, parts, delays, number, point=point, period=period, least=least)
        known = found.get(each.rank)
        if known is None or _CLEARLY * known.late_ms < each.late_ms:
            found[each.rank] = each
    return list(found.values())


def _straggler(
    run: WrapperRun,
    parts: Sequence[PartTimes],
    delays: Delays,
    number: int,
    *,
    point: SyncPoint,
    period: Period,
    least: float,
) -> Straggler:
    start, end = period
    steps, own = run.common_steps, delays[number]
    first, error = _in_earlier_sums(run, number, steps[0], least) if start == 0 else (steps[start], 0)
    part, excess = slow_part(run, parts, number, period)
    step_ms, other_step_ms = _step_ms(_common_step_times(run, number), period)
    return Straggler(
        rank=run.timelines[number].rank,
        sync_point=point,
        late_ms=median(own[start:end]) / 1e6,
        last_share=last_share(delays, number, period),
        first_step=first,
        last_step=None if len(own) - end < _FEWEST else steps[end - 1],
        first_step_error=error,
        slow_part=part,
        slow_part_ms=excess / 1e6,
        step_ms=step_ms,
        other_step_ms=other_step_ms,
    )


def _common_step_times(run: WrapperRun, number: int) -> list[float]:
    times = run.timelines[number].step_times
    return [times[row] for row in run.common_rows[number]]


def _step_ms(times: Sequence[float], period: Period, *, steps: int = 1) -> tuple[float, float | None]:
    """The typical step during a period, and outside of it if that has enough; a time is of some steps."""
    others = [*times[: period[0]], *times[period[1] :]]
    is_known = len(others) * steps >= _FEWEST
    return typical(times[slice(*period)]) / 1e6, typical(others) / 1e6 if is_known else None


def _delays_in_sums(run: WrapperRun) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """The blocks that all ranks have, as first step and number of steps; each rank's mean delay in them."""
    waits = [
        {
            (each[SumColumn.FIRST_STEP], each[SumColumn.STEPS]): (
                (each[SumColumn.JOIN] + each[SumColumn.BUFFERS] + each[SumColumn.WAIT_AFTER_BACKWARD])
                // max(1, each[SumColumn.STEPS])
            )
            for each in timeline.sums
        }
        for timeline in run.timelines
    ]
    blocks = sorted(set(waits[0]).intersection(*waits[1:]))
    delays = [delays_against_others([-own[block] for own in waits]) for block in blocks]
    return blocks, [list(own) for own in zip(*delays, strict=True)] or [[] for _ in waits]


def _in_earlier_sums(run: WrapperRun, number: int, first: int, least: float) -> tuple[int, int]:
    """The first step of a straggler that is late from the first detailed step on, and its error."""
    blocks, delays = _delays_in_sums(run)
    period = late_period(delays[number], least / 2)
    if period is None or blocks[period[0]][0] >= first or sum(blocks[period[1] - 1]) < first:
        return first, 0
    since, steps = blocks[period[0]]
    return since, steps - 1


def _in_sums(run: WrapperRun, least: float) -> list[Straggler]:
    """The stragglers of steps of which only sums are left."""
    blocks, delays = _delays_in_sums(run)
    found = []
    for number, own in enumerate(delays):
        period = late_period(own, least)
        if period is None or blocks[period[0]][1] <= 1:
            continue
        start, end = period
        first, steps = blocks[start]
        step_ms, other_step_ms = _step_ms(_block_step_times(run, number, blocks), period, steps=steps)
        found.append(
            Straggler(
                rank=run.timelines[number].rank,
                sync_point=SyncPoint.BACKWARD_END,
                late_ms=median(own[start:end]) / 1e6,
                last_share=last_share(delays, number, period),
                first_step=first,
                last_step=sum(blocks[end - 1]) - 1 if end < len(blocks) else None,
                first_step_error=steps - 1,
                slow_part=None,
                slow_part_ms=0.0,
                step_ms=step_ms,
                other_step_ms=other_step_ms,
            )
        )
    return found


def _block_step_times(run: WrapperRun, number: int, blocks: Sequence[tuple[int, int]]) -> list[float]:
    """The mean step of each block."""
    means = {
        each[SumColumn.FIRST_STEP]: each[SumColumn.STEP] / max(1, each[SumColumn.STEPS])
        for each in run.timelines[number].sums
    }
    return [means[first] for first, _ in blocks]
