"""Puts together the generations of a run: what was recorded before and after ranks were replaced.

Note [Runs that were healed]. When a rank is lost, the others go on with a process that takes its place, and
with plans that begin anew: a new generation. The steps of the same plan in all generations are one timeline.
A generation begins with a step of another plan, which does again what was lost. It is there too, without its
buckets. Which process a rank was does not matter: its number stays. If a rank was lost and not replaced, the
wrapper averages over other ranks, perhaps with other numbers, so this is another run.

Note [Plans that follow each other]. A wrapper gets another plan when its parameters or its hook change, or
when bucket caps are tried. The steps of such plans are in the same timeline, without their buckets, as long
as they follow each other: no step between two plans has left the ring, or was averaged over another group.
Only the very first step is left out, if it has a plan of its own. In it, ranks wait until all have started.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from paceline.recording.reader import PlanRecording
from paceline.recording.recorder import PLANS_PER_GENERATION
from paceline.recording.rows import StepColumn, StepKind, SumColumn, row_width


@dataclass(frozen=True)
class PlanSummary:
    """A bucket plan that the wrapper had: its number, how many steps and buckets, and how it averaged.

    If several generations had the same plan, it has the number of the first one, and the steps of all.
    """

    number: int
    steps: int
    buckets: int
    exchange: str


def generation_of(plan: int) -> int:
    """The generation that a plan's number tells."""
    return plan // PLANS_PER_GENERATION


def done_again_from(recordings: Iterable[PlanRecording]) -> dict[int, float]:
    """For each generation of a wrapper, the first step that a later one has done; infinite without one."""
    first: dict[int, float] = {}
    for each in recordings:
        steps = [row[StepColumn.STEP] for row in each.rows[:1]]
        steps += [block[SumColumn.FIRST_STEP] for block in each.sums[:1]]
        own = generation_of(each.plan)
        first[own] = min([first.get(own, math.inf), *steps])
    again, first_later = {}, math.inf
    for generation in sorted(first, reverse=True):
        again[generation] = first_later
        first_later = min(first_later, first[generation])
    return again


def mark_lost(recording: PlanRecording, again_from: float) -> PlanRecording:
    """The recording, with those steps lost that were done again, though they may have ended well here."""
    if again_from == math.inf:
        return recording
    rows = [list(row) for row in recording.rows]
    for row in rows:
        if row[StepColumn.STEP] >= again_from:
            row[StepColumn.KIND] |= int(StepKind.LOST)
    return replace(recording, rows=rows)


class RecordedPlan:
    """A bucket plan, and its recordings by number; see Note [Runs that were healed]."""

    def __init__(self) -> None:
        self.recordings: dict[int, list[PlanRecording]] = defaultdict(list)

    @property
    def summary(self) -> PlanSummary:
        """The plan in a few words."""
        first = min(self.recordings)
        description = self.recordings[first][0].description
        steps = sum(map(self.steps, self.recordings))
        return PlanSummary(first, steps, len(description["buckets"]), str(description["exchange"]))

    def steps(self, number: int) -> int:
        """How many steps had it under a number."""
        return max(each.written for each in self.recordings[number])

    def main_numbers(self) -> list[int]:
        """Of each generation, the number with most steps."""
        generations = groupby(sorted(self.recordings), key=generation_of)
        return [max(numbers, key=self.steps) for _, numbers in generations]


def recorded_plans(recordings: Sequence[PlanRecording]) -> list[RecordedPlan]:
    """The plans of a wrapper, those with the lowest numbers first."""
    plans: dict[tuple[str, str], RecordedPlan] = defaultdict(RecordedPlan)
    for each in recordings:
        key = (str(each.description["buckets"]), str(each.description["exchange"]))
        plans[key].recordings[each.plan].append(each)
    return sorted(plans.values(), key=lambda plan: min(plan.recordings))


def main_recordings(plans: Sequence[RecordedPlan]) -> list[PlanRecording]:
    """The recordings of the plan that most steps had, by rank and generation; without those of no step."""
    main = max(plans, key=lambda plan: sum(map(plan.steps, plan.main_numbers())))
    found = [each for number in main.main_numbers() for each in main.recordings[number]]
    with_rows = [each for each in found if each.rows]
    return sorted(with_rows or found, key=lambda each: (each.rank, each.plan))


def other_plans(recordings: Sequence[PlanRecording], main: Sequence[PlanRecording]) -> list[PlanRecording]:
    """What belongs into the same timelines and has other plans, without buckets.

    See Note [Plans that follow each other]. Of later generations, of which none has the main plan, all plans.
    """
    known = {(each.rank, each.plan) for each in main}
    no_buckets = [0] * (row_width(len(main[0].description["buckets"])) - len(StepColumn))
    numbers = _numbers_in_timeline(recordings, {each.plan for each in main})
    return [
        replace(each, rows=[[*row[: len(StepColumn)], *no_buckets] for row in each.rows])
        for each in recordings
        if each.plan in numbers and (each.rank, each.plan) not in known and each.rows
    ]


def _numbers_in_timeline(recordings: Sequence[PlanRecording], main: Collection[int]) -> set[int]:
    """The numbers of the plans whose steps are in the same timeline as those of the main plan."""
    spans = _plan_spans(recordings)
    found: set[int] = set()
    for generation, numbers in groupby(sorted(spans), key=generation_of):
        own = list(numbers)
        places = [own.index(number) for number in main if number in own]
        if places:
            found.update(_following_each_other(own, spans, places[0]))
        elif generation > min(map(generation_of, main)):
            found.update(own)
    return found - _plan_of_the_first_step(spans)


@dataclass(frozen=True)
class _PlanSpan:
    """The recorded steps of a plan; whether they are all that it had, and whether that is one step only."""

    first: int
    last: int
    is_whole: bool
    is_single: bool


def _plan_spans(recordings: Sequence[PlanRecording]) -> dict[int, _PlanSpan]:
    by_number: dict[int, list[PlanRecording]] = defaultdict(list)
    for each in recordings:
        if each.rows:
            by_number[each.plan].append(each)
    return {
        number: _PlanSpan(
            first=min(each.rows[0][StepColumn.STEP] for each in own),
            last=max(each.rows[-1][StepColumn.STEP] for each in own),
            is_whole=all(len(each.rows) >= each.written for each in own),
            is_single=all(each.written == 1 for each in own),
        )
        for number, own in by_number.items()
    }


def _following_each_other(numbers: Sequence[int], spans: Mapping[int, _PlanSpan], place: int) -> list[int]:
    """Of some plans, those around one of them with no step missing between them."""
    joined = [
        spans[left].last + 1 == spans[right].first and spans[right].is_whole
        for left, right in pairwise(numbers)
    ]
    start = end = place
    while start > 0 and joined[start - 1]:
        start -= 1
    while end < len(joined) and joined[end]:
        end += 1
    return list(numbers[start : end + 1])


def _plan_of_the_first_step(spans: Mapping[int, _PlanSpan]) -> set[int]:
    """The plan that only the very first step had."""
    return {number for number, span in spans.items() if number == 0 and span.is_single}
