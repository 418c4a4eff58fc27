"""What a timeline shows over the parts of a step: joins, pauses, and what was done between the parts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.recording.rows import StepColumn, StepKind
from paceline.tools.report.step_parts import BETWEEN_PARTS, BetweenTimes, PartTimes, StepPart, at_most
from paceline.tools.report.wall_time import Pause, PauseCause, RankWallTime, between_optimizers, handshake
from paceline.tools.report.wrapper_runs import RankTimeline


@dataclass(frozen=True)
class Overlay:
    """A time of a step that has another name than its place among the step's events says.

    Attributes:
        part: its name.
        start: when it began; of what is known by its length only, where it has room.
        nanoseconds: how long it was.
        cause: of a pause.
    """

    part: StepPart
    start: int
    nanoseconds: int
    cause: PauseCause | None = None


def step_overlays(timeline: RankTimeline, wall: RankWallTime) -> list[list[Overlay]]:
    """For each step, what a drawing of its parts has to show instead of them."""
    pauses: dict[int, list[Pause]] = defaultdict(list)
    for pause in wall.pauses:
        if pause.cause is not PauseCause.HEALING:
            pauses[pause.row].append(pause)
    return [_row_overlays(timeline, wall.times, row, pauses[row]) for row in range(len(timeline))]


def _between_overlays(
    timeline: RankTimeline, times: PartTimes, row: int, pauses: Sequence[Pause], *, free: int
) -> list[Overlay]:
    """What was done between other parts, from the begin of each part that it was in the middle of.

    Args:
        timeline: the rank's steps.
        times: their parts.
        row: the row of the step.
        pauses: the step's pauses, which are drawn first.
        free: when what follows the optimizer's step begins, without what is drawn there already.
    """
    known = BetweenTimes(timeline.row(row))
    left = {part: times[part][row] for part in BETWEEN_PARTS}
    in_backward = min(max(0, timeline[StepColumn.OTHERS_IN_BACKWARD][row]), left[StepPart.OTHER_WRAPPERS])
    backward_end = timeline[StepColumn.BACKWARD_END][row]
    found = [Overlay(StepPart.OTHER_WRAPPERS, backward_end - in_backward, in_backward)]
    left[StepPart.OTHER_WRAPPERS] -= in_backward
    inside, after = dict(known.inside), dict(known.after)
    for column, length, recorded in (
        (StepColumn.BEGIN, known.before_forward, inside),
        (StepColumn.FORWARD_END, known.in_loss, inside),
        (StepColumn.END, known.before_optimizer, after),
    ):
        here = at_most(length, {part: min(recorded[part], left[part]) for part in BETWEEN_PARTS})
        found += _in_line(_after_pauses(timeline[column][row], pauses), here)
        for part, drawn in here.items():
            recorded[part] -= drawn
            left[part] -= drawn
    return found + _in_line(free, {StepPart.AFTER_OPTIMIZER: times[StepPart.AFTER_OPTIMIZER][row], **left})


def _after_pauses(start: int, pauses: Sequence[Pause]) -> int:
    """When the pauses that begin at a time are over."""
    return start + sum(each.nanoseconds for each in pauses if each.start == start)


def _in_line(start: int, lengths: Mapping[StepPart, int]) -> list[Overlay]:
    """Parts that are drawn one after the other."""
    found = []
    for part, length in lengths.items():
        found.append(Overlay(part, start, length))
        start += length
    return found


def _row_overlays(
    timeline: RankTimeline, times: PartTimes, row: int, pauses: Sequence[Pause]
) -> list[Overlay]:
    def at(*columns: StepColumn) -> int:
        return max(timeline[column][row] for column in columns)

    between = at(StepColumn.END, StepColumn.OPTIMIZER_END)
    told = min(handshake(timeline, row), times[StepPart.JOIN][row])
    without_inputs = times[StepPart.JOIN][row] - told
    end = timeline[StepColumn.BEGIN][row] + timeline.step_times[row]
    drawn = [
        Overlay(StepPart.JOIN, at(StepColumn.FORWARD_START), told),
        Overlay(StepPart.BEFORE_OPTIMIZER, *between_optimizers(timeline, row)),
        *(Overlay(StepPart.PAUSE, each.start, each.nanoseconds, each.cause) for each in pauses),
    ]
    free = _after_pauses(between, pauses)
    if timeline[StepColumn.KIND][row] & StepKind.NO_INPUTS:
        drawn.append(Overlay(StepPart.JOIN, free, without_inputs))
        free += without_inputs
    else:  # it took the optimizer's step, and then had no inputs for the next one
        drawn.append(Overlay(StepPart.JOIN, end - without_inputs, without_inputs))
    drawn += _between_overlays(timeline, times, row, pauses, free=free)
    # What is known by its length only may seem to last longer than the step.
    clipped = [replace(each, nanoseconds=min(each.nanoseconds, end - each.start)) for each in drawn]
    return [each for each in clipped if each.nanoseconds > 0]
