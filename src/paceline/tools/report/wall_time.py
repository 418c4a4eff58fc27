"""Where the wall time of a run goes: the parts of its steps, and its pauses; together they are all of it.

The wall time of a rank is from the begin of its first recorded step to the end of its last one.

Note [Pauses]. Between its steps, and between the parts of a step, a rank does what the wrapper does not see.
The usual time that it takes for that is the first quartile of all steps, because steps may come in bursts.
What exceeds it in one step is a pause, if it is longer than a whole usual step. Another wrapper that works in
every step does not pause this one, nor do forwards and backwards that accumulate gradients, nor the batches
for more of them than usual. A loss takes longer for a larger batch, as forward and backward do. So it is
compared with the third quartile of steps of about the same forward and backward, and has to exceed it by more
than these. If another rank waits for a rank that pauses, that wait is a pause too, for at most as long as
that rank's. The time in which ranks are replaced is also one, and so are the waits of a step that was lost.
"""

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.recording.rows import StepColumn, StepKind, elapsed
from paceline.tools.formatting import rank_list
from paceline.tools.report.step_parts import (
    BETWEEN_PARTS,
    BetweenTimes,
    PartTimes,
    StepPart,
    at_most,
    quartiles,
    rank_part_times,
)
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun

_LEAST = 1_000_000  # nanoseconds
# Ranks that pause together wait for each other a little.
_MATTERS = 0.1
# What a rank does by itself, outside of forward, backward and optimizer.
_OUTSIDE = (
    StepPart.ACCUMULATION, StepPart.LOSS, StepPart.BEFORE_OPTIMIZER, StepPart.AFTER_OPTIMIZER,
    *BETWEEN_PARTS, StepPart.DATA,
)  # fmt: skip
_WAITS = (StepPart.JOIN, StepPart.BUFFERS, StepPart.WAITING)

# From so many steps of one size, their usual loss is known.
_FEWEST_ALIKE = 4

# What tells the causes of pauses, beside the parts that they are in.
_COUNTS = (StepColumn.EVALUATIONS, StepColumn.OTHER_OPTIMIZERS, StepColumn.ACCUMULATED)


class PauseCause(enum.StrEnum):
    """What a pause was for, as far as it can be guessed."""

    EVALUATION = "evaluation"
    """Forwards of the wrapper without gradients, or without a backward."""
    CHECKPOINT = "checkpoint"
    """``torch.save``."""
    OTHER_WRAPPER = "another wrapper"
    OTHER_MODEL = "training of another model"
    """An optimizer of other parameters stepped."""
    DATA = "data"
    """A ``DataLoader`` was waited for, or made."""
    CODE = "code outside of the wrapper"
    """Nothing is known: evaluation of the bare module, for example."""
    OTHER_RANK = "a pause of another rank"
    HEALING = "healing"
    LOST = "lost steps"
    """Waits of steps that were lost, because a rank raised an error, ended or stopped."""


@dataclass(frozen=True)
class Pause:
    """A pause of one rank.

    Attributes:
        row: the row of the step that it is in, or after.
        step: the number of that step.
        start: when it began, in nanoseconds.
        nanoseconds: how long it was.
        cause: what it was for.
        awaited: if this rank waited for another one, what that one's pause was for.
    """

    row: int
    step: int
    start: int
    nanoseconds: int
    cause: PauseCause
    awaited: PauseCause | None = None


@dataclass(frozen=True)
class RankWallTime:
    """The wall time of one rank, in nanoseconds.

    Attributes:
        steps: how many steps.
        wall: from the begin of the first one to the end of the last one.
        times: the parts of each step; what is a pause is in ``StepPart.PAUSE``.
        pauses: the pauses, in order; also those between steps that did not follow each other at once.
    """

    steps: int
    wall: int
    times: PartTimes
    pauses: Sequence[Pause]

    def per_step(self) -> dict[StepPart, float]:
        """Mean nanoseconds per step; their sum is the wall time of a step."""
        means = {part: sum(own) / max(1, self.steps) for part, own in self.times.items()}
        means[StepPart.PAUSE] = self.paused / max(1, self.steps)
        return means

    @property
    def paused(self) -> int:
        """All pauses together."""
        return sum(pause.nanoseconds for pause in self.pauses)

    def usual_steps(self) -> list[int]:
        """The step times without pauses."""
        parts = [own for part, own in self.times.items() if part is not StepPart.PAUSE]
        return [sum(row) for row in zip(*parts, strict=True)]


def rank_wall_times(run: WrapperRun) -> list[RankWallTime]:
    """The wall time of each rank."""
    ranks = [
        _Rank(timeline, times) for timeline, times in zip(run.timelines, rank_part_times(run), strict=True)
    ]
    own = [rank.own_pauses() for rank in ranks]
    found = []
    for number, rank in enumerate(ranks):
        longest = _longest_by_step(pauses for place, pauses in enumerate(own) if place != number)
        found.append(rank.wall_time([*own[number], *rank.waits_for(longest)]))
    return found


# A pause, and how much of it is in which part.
_PauseParts = tuple["Pause", Mapping[StepPart, int]]


def _longest_by_step(ranks: Iterable[Sequence[_PauseParts]]) -> dict[int, "Pause"]:
    """The longest pause that any of some ranks had in or after each step."""
    longest: dict[int, Pause] = {}
    for pauses in ranks:
        for pause, _ in pauses:
            known = longest.get(pause.step)
            if known is None or pause.nanoseconds > known.nanoseconds:
                longest[pause.step] = pause
    return longest


class _UsualLoss:
    """The usual loss of a step, by the length of its forward and backward.

    Args:
        times: the parts of a rank's steps.
        rows: the steps to learn from.
    """

    def __init__(self, times: PartTimes, rows: Sequence[int]) -> None:
        self._times = times
        by_size: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            by_size[self._size(row)].append(times[StepPart.LOSS][row])
        fewest = min(_FEWEST_ALIKE, max(map(len, by_size.values()), default=0))
        self._usual = {size: quartiles(own)[2] for size, own in by_size.items() if len(own) >= fewest}

    def excess(self, row: int) -> int:
        """By how much a loss exceeds the usual; 0 if not by more than its step's forward and backward."""
        size = self._size(row)
        smaller = [known for known in self._usual if known <= size] or [min(self._usual)]
        # A larger step has no shorter loss. Of a size that is rare, it is as much longer as the step itself.
        usual = max(self._usual[known] for known in smaller) * 2.0 ** max(0, size - max(smaller))
        excess = int(self._times[StepPart.LOSS][row] - usual)
        return excess if excess > self._work(row) else 0

    def _work(self, row: int) -> int:
        return self._times[StepPart.FORWARD][row] + self._times[StepPart.BACKWARD][row]

    def _size(self, row: int) -> int:
        """Steps of one size differ by less than a factor of two."""
        return self._work(row).bit_length()


class _Rank:
    """Finds the pauses of one rank.

    Args:
        timeline: its steps.
        times: their parts.
    """

    def __init__(self, timeline: RankTimeline, times: PartTimes) -> None:
        self._timeline = timeline
        self._times = {part: list(own) for part, own in times.items()}
        # The last step of a generation has nothing after it.
        whole = sorted({*range(len(timeline))} - {*timeline.last_rows}) or list(range(len(timeline)))
        self._usual = {
            part: int(quartiles([times[part][row] for row in whole])[0]) for part in (*_OUTSIDE, *_WAITS)
        }
        self._usual_loss = _UsualLoss(times, whole)
        self._usual_counts = {
            column: quartiles([timeline[column][row] for row in whole])[0] for column in _COUNTS
        }
        self._usual_unanswered = quartiles([self._unanswered(row) for row in whole])[0]
        work = [part for part in StepPart if part not in self._usual]
        own = [sum(times[part][row] for part in work) for row in whole]
        self._limit = max(_LEAST, int(quartiles(own)[1]) + sum(self._usual.values()))

    def own_pauses(self) -> list[_PauseParts]:
        """The pauses in which this rank did something else."""
        outside = [
            (self._pause(row, excess, self._cause(row, excess)), excess)
            for row, excess in self._exceeding(_OUTSIDE)
        ]
        return [*outside, *self._waits_in_vain()]

    def _waits_in_vain(self) -> Iterator[_PauseParts]:
        """The waits of steps that were lost."""
        for row in filter(self._is_lost, range(len(self._timeline))):
            waits = {part: self._times[part][row] for part in (*_WAITS, StepPart.EXPOSED_COMMUNICATION)}
            if sum(waits.values()) > self._limit:
                yield self._pause(row, waits, PauseCause.LOST), waits

    def _is_lost(self, row: int) -> bool:
        return bool(self._timeline[StepColumn.KIND][row] & StepKind.LOST)

    def waits_for(self, pauses: Mapping[int, Pause]) -> list[_PauseParts]:
        """The pauses in which this rank waited for another one.

        Args:
            pauses: the longest pause of another rank in or after a step, by step.
        """
        found: list[_PauseParts] = []
        for row, excess in self._exceeding(_WAITS):
            if self._is_lost(row):
                continue
            step = self._timeline[StepColumn.STEP][row]
            near = [pauses[each] for each in (step - 1, step) if each in pauses]
            if not near:
                continue
            awaited = max(near, key=lambda pause: pause.nanoseconds)
            waited = at_most(awaited.nanoseconds, excess)
            if sum(waited.values()) > self._limit:
                wait = self._pause(row, waited, PauseCause.OTHER_RANK)
                found.append((replace(wait, awaited=awaited.cause), waited))
        return found

    def wall_time(self, pauses: Sequence[_PauseParts]) -> RankWallTime:
        """The wall time of the rank, with these pauses and those between generations."""
        timeline = self._timeline
        for pause, excess in pauses:
            for part, more in excess.items():
                self._times[part][pause.row] -= more
            self._times[StepPart.PAUSE][pause.row] += pause.nanoseconds
        own = [pause for pause, _ in pauses]
        every = sorted([*own, *self._healings()], key=lambda pause: (pause.row, pause.start))
        between = sum(each.nanoseconds for each in every if each.cause is PauseCause.HEALING)
        wall = sum(timeline.step_times) + between
        return RankWallTime(len(timeline), wall, self._times, every)

    def _exceeding(self, parts: Sequence[StepPart]) -> Iterator[tuple[int, Mapping[StepPart, int]]]:
        """The rows in which these parts are far longer than usual, and by how much each."""
        for row in range(len(self._timeline)):
            excess = self._excess(row, parts)
            if sum(excess.values()) > self._limit:
                yield row, excess

    def _excess(self, row: int, parts: Sequence[StepPart]) -> dict[StepPart, int]:
        excess = {
            part: max(0, self._times[part][row] - self._usual[part])
            for part in parts
            if not self._is_work(part, row)
        }
        if StepPart.LOSS in excess:
            excess[StepPart.LOSS] = self._usual_loss.excess(row)
        return excess

    def _is_work(self, part: StepPart, row: int) -> bool:
        """Whether a part is no pause, however long it takes once."""
        if part is StepPart.ACCUMULATION:
            return self._unanswered(row) <= self._usual_unanswered
        if part is StepPart.LOADER:  # it gives a batch for each backward
            return self._more_than_usual(StepColumn.ACCUMULATED, row) > 0
        return part is StepPart.OTHER_WRAPPERS and self._usual[part] > 0

    def _unanswered(self, row: int) -> int:
        """How many forwards of a step had no backward, as in an evaluation with gradients."""
        return self._timeline[StepColumn.FORWARDS][row] - 1 - self._timeline[StepColumn.ACCUMULATED][row]

    def _pause(self, row: int, excess: Mapping[StepPart, int], cause: PauseCause) -> Pause:
        longest = max(excess, key=lambda part: excess[part])
        start = self._start_of(longest, row)
        return Pause(row, self._timeline[StepColumn.STEP][row], start, sum(excess.values()), cause)

    def _start_of(self, part: StepPart, row: int) -> int:
        """When a part begins in which there may be a pause."""
        columns = {
            StepPart.ACCUMULATION: StepColumn.BEGIN,
            StepPart.JOIN: StepColumn.FORWARD_START,
            StepPart.BUFFERS: StepColumn.FORWARD_START,
            StepPart.LOSS: StepColumn.FORWARD_END,
            StepPart.WAITING: StepColumn.BACKWARD_END,
            StepPart.EXPOSED_COMMUNICATION: StepColumn.BACKWARD_END,
            StepPart.BEFORE_OPTIMIZER: StepColumn.END,
        }
        after = (StepColumn.END, StepColumn.OPTIMIZER_END)
        if part in BETWEEN_PARTS:
            part = self._around(part, row)
        if part is StepPart.JOIN and 2 * handshake(self._timeline, row) < self._times[part][row]:
            part = StepPart.DATA
        if part is StepPart.BEFORE_OPTIMIZER:
            start, length = between_optimizers(self._timeline, row)
            if 2 * length > self._times[part][row]:
                return start
        return max(self._timeline[column][row] for column in ([columns[part]] if part in columns else after))

    def _around(self, part: StepPart, row: int) -> StepPart:
        """The part in the middle of which one of ``BETWEEN_PARTS`` was, for the most part."""
        known = BetweenTimes(self._timeline.row(row))
        if known.inside[part] > known.after[part]:
            return StepPart.ACCUMULATION if known.before_forward > known.in_loss else StepPart.LOSS
        return StepPart.BEFORE_OPTIMIZER if known.before_optimizer > known.last else StepPart.DATA

    def _cause(self, row: int, excess: Mapping[StepPart, int]) -> PauseCause:
        """A guess, from what was recorded after the step."""
        long = sum(excess.values())
        if 2 * excess.get(StepPart.OTHER_WRAPPERS, 0) >= long:
            return PauseCause.OTHER_WRAPPER
        saving = excess[StepPart.SAVING]
        if 4 * saving >= long and saving > excess[StepPart.EVALUATION]:
            return PauseCause.CHECKPOINT
        evaluates = self._more_than_usual(StepColumn.EVALUATIONS, row) > 0
        if evaluates or 2 * excess.get(StepPart.ACCUMULATION, 0) >= long:
            return PauseCause.EVALUATION
        if self._more_than_usual(StepColumn.OTHER_OPTIMIZERS, row) > 0:
            return PauseCause.OTHER_MODEL
        return PauseCause.DATA if 4 * excess.get(StepPart.LOADER, 0) >= long else PauseCause.CODE

    def _more_than_usual(self, column: StepColumn, row: int) -> float:
        return self._timeline[column][row] - self._usual_counts[column]

    def _healings(self) -> Iterator[Pause]:
        """The time between generations."""
        timeline, begins = self._timeline, self._timeline[StepColumn.BEGIN]
        for row in timeline.last_rows:
            if row + 1 < len(timeline):
                end = begins[row] + timeline.step_times[row]
                yield Pause(
                    row,
                    timeline[StepColumn.STEP][row],
                    end,
                    max(0, begins[row + 1] - end),
                    PauseCause.HEALING,
                )


def handshake(timeline: RankTimeline, row: int) -> int:
    """How long the ranks took to tell each other who has inputs, before the last forward of a step."""
    return elapsed(timeline[StepColumn.FORWARD_START][row], timeline[StepColumn.JOIN_END][row])


def between_optimizers(timeline: RankTimeline, row: int) -> tuple[int, int]:
    """When an optimizer may have ended before another one's step, and how long it took until that began."""
    start, end = timeline[StepColumn.OPTIMIZER_START][row], timeline[StepColumn.OPTIMIZER_END][row]
    inside = min(max(0, timeline[StepColumn.OPTIMIZER][row]), elapsed(start, end))
    return start + inside // 2, elapsed(start, end) - inside


@dataclass(frozen=True)
class PauseSummary:
    """All pauses of one cause, with the waits for them.

    Attributes:
        cause: a ``PauseCause``.
        ranks: the ranks that had such pauses, and did not only wait for them.
        all_ranks: how many ranks there are.
        others_wait: whether another rank waited meanwhile, for a tenth of the pauses or more.
        count: how many there were, on the rank for which they took most time.
        total_ms: how long they were there together, in milliseconds.
        longest_ms: how long the longest of them was.
        longest_step: the step in or after which that was.
        share: their share of the wall time of all ranks.
        step_ms: how much of the wall time of a step they are, on the average rank.
    """

    cause: str
    ranks: Sequence[int]
    all_ranks: int
    others_wait: bool
    count: int
    total_ms: float
    longest_ms: float
    longest_step: int
    share: float
    step_ms: float

    def __str__(self) -> str:
        ranks = f" on {rank_list(self.ranks)}" if len(self.ranks) < self.all_ranks else ""
        return f"{self.cause}{ranks}"


def pause_summaries(run: WrapperRun, walls: Sequence[RankWallTime]) -> list[PauseSummary]:
    """The pauses of a run by cause, those that took most time first; waits count with what they were for."""
    found = [_summary(run, walls, cause) for cause in PauseCause if cause is not PauseCause.OTHER_RANK]
    return sorted((each for each in found if each is not None), key=lambda each: -each.share)


def _summary(run: WrapperRun, walls: Sequence[RankWallTime], cause: PauseCause) -> PauseSummary | None:
    by_rank = [[pause for pause in wall.pauses if cause in (pause.cause, pause.awaited)] for wall in walls]
    totals = [sum(pause.nanoseconds for pause in pauses) for pauses in by_rank]
    most = by_rank[totals.index(max(totals))]
    if not most:
        return None
    longest = max(most, key=lambda pause: pause.nanoseconds)
    waits = sum(pause.nanoseconds for pauses in by_rank for pause in pauses if pause.awaited)
    ranks = [
        timeline.rank
        for timeline, pauses in zip(run.timelines, by_rank, strict=True)
        if any(pause.cause is cause for pause in pauses)
    ]
    return PauseSummary(
        cause=str(cause),
        ranks=ranks,
        all_ranks=len(walls),
        others_wait=waits >= _MATTERS * (sum(totals) - waits),
        count=len(most),
        total_ms=max(totals) / 1e6,
        longest_ms=longest.nanoseconds / 1e6,
        longest_step=longest.step,
        share=sum(totals) / max(1, sum(wall.wall for wall in walls)),
        step_ms=sum(totals) / max(1, sum(wall.steps for wall in walls)) / 1e6,
    )
