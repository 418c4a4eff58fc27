"""Analyses recordings: the results are plain values, for the page, the terminal and ``--json``."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.recording.reader import read_recording
from paceline.recording.rows import StepColumn, StepKind, SumColumn
from paceline.tools.formatting import milliseconds, rank_list
from paceline.tools.report.bucket_waits import BucketWait, bucket_waits
from paceline.tools.report.generations import PlanSummary
from paceline.tools.report.run_history import RunHistory, read_history
from paceline.tools.report.step_parts import (
    PartTimes,
    StepPart,
    communication,
    mean_parts,
    median,
    quartiles,
    rank_part_times,
    typical_rows,
)
from paceline.tools.report.stragglers import RankDelay, Straggler, find_stragglers, rank_delays
from paceline.tools.report.suggestions import RunFacts, Suggestion, suggestions
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun, wrapper_runs

_FEWEST_STEPS = 8
_NO_HISTORY = RunHistory()


@dataclass(frozen=True)
class RankFigures:
    """One rank's typical step; times are milliseconds.

    Attributes:
        rank: the rank.
        host: the name of its host; if a process on another host took its place, the names of both.
        step_ms: first quartile, median and third quartile of its steps.
        parts: where a step goes, on average over the middle half of its steps.
        communication_ms: how long a bucket was in flight, per step.
        overlap_ms: how much of that was during backward.
        mean_step_ms: the average step of the whole run.
        longest_step_ms: the longest step of the whole run.
    """

    rank: int
    host: str
    step_ms: tuple[float, float, float]
    parts: Mapping[str, float]
    communication_ms: float
    overlap_ms: float
    mean_step_ms: float
    longest_step_ms: float


@dataclass(frozen=True)
class RunAnalysis:
    """What the recording says about one wrapper.

    Attributes:
        module: the class name of the wrapped module.
        summary: the most important result, in one or two sentences.
        group: the ranks that the wrapper averages over.
        missing_ranks: those of them that recorded nothing.
        steps: how many steps there were, with all plans.
        detailed_steps: how many of them are recorded in detail; of the others only sums are left.
        first_detailed_step: the first of these.
        figures_from_step: the first step that the figures are taken from. They leave out the steps before a
            rank became a straggler.
        lost_steps: how many detailed steps were lost, because of an error.
        steps_done_again: how many of these were done again, after ranks had been replaced or left out.
        steps_without_inputs: in how many detailed steps a rank had no inputs left.
        step_ms: first quartile, median and third quartile of the steps of all ranks.
        mean_step_ms: the average step of the whole run.
        parts: where a step goes, on the average rank, in milliseconds.
        communication_ms: how long a bucket is in flight, per step.
        overlap: the share of that which is during backward; None if there is no communication.
        units_per_second: how many samples all ranks processed together; None if they were not counted.
        unit: what was counted, if not samples.
        ranks: the figures of each rank.
        delays: how late each rank reaches the point where ranks wait for each other.
        stragglers: the ranks that the others wait for.
        buckets: what each bucket waits for.
        suggestions: what to change.
        clock_uncertainty_us: by how much times of different hosts may be wrong; None if unknown.
        run: other facts about the run.
        plans: all bucket plans of the wrapper.
        history: what happened to the ranks and the samples of the whole run.
    """

    module: str
    summary: str
    group: Sequence[int]
    missing_ranks: Sequence[int]
    steps: int
    detailed_steps: int
    first_detailed_step: int
    figures_from_step: int
    lost_steps: int
    steps_done_again: int
    steps_without_inputs: int
    step_ms: tuple[float, float, float]
    mean_step_ms: float
    parts: Mapping[str, float]
    communication_ms: float
    overlap: float | None
    units_per_second: float | None
    unit: str
    ranks: Sequence[RankFigures]
    delays: Sequence[RankDelay]
    stragglers: Sequence[Straggler]
    buckets: Sequence[BucketWait]
    suggestions: Sequence[Suggestion]
    clock_uncertainty_us: float | None
    run: Mapping[str, str | int]
    plans: Sequence[PlanSummary]
    history: RunHistory


def analyse_recording(folder: Path) -> list[tuple[WrapperRun, RunAnalysis]]:
    """The runs that were recorded in a folder, one per wrapper, each with its analysis.

    Raises:
        RecordingError: there is no recording, or it cannot be read.
    """
    recordings = read_recording(folder)
    history = read_history(folder, recordings)
    return [(run, analyse(run, history)) for run in wrapper_runs(recordings)]


def analyse(whole: WrapperRun, history: RunHistory = _NO_HISTORY) -> RunAnalysis:
    """The analysis of one wrapper's run."""
    all_parts = rank_part_times(whole)
    stragglers = find_stragglers(whole, all_parts, quartiles(_step_times(whole))[1])
    run = _since_last_straggler(whole, stragglers)
    parts = all_parts if run is whole else rank_part_times(run)
    figures = [_figures(run, timeline, own) for timeline, own in zip(run.timelines, parts, strict=True)]
    step_ns = quartiles(_step_times(run))
    buckets = bucket_waits(run)
    facts = _facts(whole, run, figures, buckets, stragglers)
    overlap_ms = statistics.fmean(each.overlap_ms for each in figures)
    overlap = overlap_ms / facts.in_flight if facts.in_flight else None
    return RunAnalysis(
        module=run.module,
        summary=_summary(facts, overlap),
        group=run.group,
        missing_ranks=run.missing,
        steps=sum(plan.steps for plan in run.plans),
        detailed_steps=_detailed_steps(whole),
        first_detailed_step=_first_step(whole),
        figures_from_step=_first_step(run),
        lost_steps=whole.steps_of_kind(StepKind.LOST),
        steps_done_again=len(whole.done_again),
        steps_without_inputs=whole.steps_of_kind(StepKind.NO_INPUTS),
        step_ms=_in_ms(step_ns),
        mean_step_ms=statistics.fmean(each.mean_step_ms for each in figures),
        parts={str(part): spent for part, spent in _average_parts(figures).items()},
        communication_ms=facts.in_flight,
        overlap=overlap,
        units_per_second=_units_per_second(run),
        unit=str(run.description["unit"]),
        ranks=figures,
        delays=rank_delays(run, step_ns[1], stragglers),
        stragglers=stragglers,
        buckets=buckets,
        suggestions=suggestions(facts),
        clock_uncertainty_us=None if run.clock_uncertainty is None else run.clock_uncertainty / 1e3,
        run=_run_facts(run),
        plans=run.plans,
        history=history,
    )


def _facts(
    whole: WrapperRun,
    run: WrapperRun,
    figures: Sequence[RankFigures],
    buckets: Sequence[BucketWait],
    stragglers: Sequence[Straggler],
) -> RunFacts:
    """What suggestions are made from."""
    parts = _average_parts(figures)
    # In these parts ranks also wait for a straggler, which has its own suggestion. What the parts cost by
    # themselves is what they cost the rank that spends least in them.
    least = {part: min(each.parts[part] for each in figures) for part in (StepPart.BUFFERS, StepPart.DATA)}
    return RunFacts(
        # The sum of the parts instead of the median step, so that a part is never more than the whole.
        step=sum(parts.values()),
        parts=parts | least,
        in_flight=statistics.fmean(each.communication_ms for each in figures),
        first_ready=_first_ready(buckets, parts[StepPart.BACKWARD]),
        buckets=[each.nbytes for each in buckets],
        cap=int(run.description["cap"]),
        ranks=len(run.group),
        hosts=_hosts(run),
        transport=str(run.description["transport"]),
        device=str(run.description["device"]),
        exchange=str(run.description["exchange"]),
        stragglers=stragglers,
        lost=(whole.steps_of_kind(StepKind.LOST) - len(whole.done_again)) / _detailed_steps(whole),
        without_inputs=whole.steps_of_kind(StepKind.NO_INPUTS) / _detailed_steps(whole),
    )


def _average_parts(figures: Sequence[RankFigures]) -> dict[StepPart, float]:
    return {part: statistics.fmean(each.parts[part] for each in figures) for part in StepPart}


def _detailed_steps(run: WrapperRun) -> int:
    return max(map(len, run.timelines))


def _step_times(run: WrapperRun) -> list[int]:
    """Of all steps on all ranks; without each rank's last step, whose time is not complete."""
    return [time for timeline in run.timelines for time in timeline.step_times[: max(1, len(timeline) - 1)]]


def _first_step(run: WrapperRun) -> int:
    return min(timeline[StepColumn.STEP][0] for timeline in run.timelines)


def _since_last_straggler(run: WrapperRun, stragglers: Sequence[Straggler]) -> WrapperRun:
    """The steps since the last straggler became one, if there are enough of them."""
    since = max(
        (each.first_step for each in stragglers if each.last_step is None and not each.first_step_error),
        default=0,
    )
    recent = run.from_step(since)
    return recent if min(map(len, recent.timelines)) >= _FEWEST_STEPS else run


def _figures(run: WrapperRun, timeline: RankTimeline, parts: PartTimes) -> RankFigures:
    rows = typical_rows(timeline.step_times)
    in_flight, overlap = communication(run, timeline)
    steps = max(1, sum(each[SumColumn.STEPS] for each in timeline.sums))
    return RankFigures(
        rank=timeline.rank,
        host=timeline.host,
        step_ms=_in_ms(quartiles(timeline.step_times[: max(1, len(timeline) - 1)])),
        parts={str(part): spent / 1e6 for part, spent in mean_parts(parts, rows).items()},
        communication_ms=in_flight / 1e6,
        overlap_ms=overlap / 1e6,
        mean_step_ms=sum(each[SumColumn.STEP] for each in timeline.sums) / steps / 1e6,
        longest_step_ms=max((each[SumColumn.LONGEST] for each in timeline.sums), default=0) / 1e6,
    )


def _in_ms(quartiles_ns: tuple[float, float, float]) -> tuple[float, float, float]:
    low, middle, high = quartiles_ns
    return low / 1e6, middle / 1e6, high / 1e6


def _first_ready(buckets: Sequence[BucketWait], backward: float) -> float:
    ready = median([times.ready for times in buckets[0].ranks]) if buckets else 0.0
    return min(1.0, max(0.0, ready / backward)) if backward else 0.0


def _hosts(run: WrapperRun) -> int:
    """How many machines: by their boots, or as the ranks have found, whichever is more."""
    boots = {each["boot"] for timeline in run.timelines for each in timeline.descriptions}
    return max(1, int(run.description["hosts"]), len(boots))


def _units_per_second(run: WrapperRun) -> float | None:
    """Of all ranks together; ranks run at the same pace, so the time is that of one rank."""
    counted = sum(each[SumColumn.COUNT] for timeline in run.timelines for each in timeline.sums)
    longest = max(sum(each[SumColumn.STEP] for each in timeline.sums) for timeline in run.timelines)
    return counted / (longest / 1e9) if counted and longest else None


def _run_facts(run: WrapperRun) -> dict[str, str | int]:
    description = run.description
    known = ("world", "backend", "transport", "exchange", "device", "cap", "first_cap", "plan", "version")
    return {
        **{key: description[key] for key in known},
        "hosts": _hosts(run),
        "parameters": len(description["slots"]),
        "nbytes": sum(description["nbytes"]),
        "buckets": len(run.buckets),
    }


def _summary(facts: RunFacts, overlap: float | None) -> str:
    step = f"A step takes {milliseconds(facts.step)}"
    if facts.stragglers and facts.stragglers[0].last_step is None:
        return _straggler_summary(step, [each for each in facts.stragglers if each.last_step is None])
    if facts.ranks > 1 and facts.is_worth(facts.exposed):
        exposed = f"{milliseconds(facts.exposed)} ({facts.exposed / facts.step:.0%})"
        return f"{step}, of which {exposed} is exposed communication: it does not overlap with backward."
    part = max(facts.parts, key=lambda each: facts.parts[each])
    if part is StepPart.DATA and facts.is_worth(facts.parts[part]):
        between = milliseconds(facts.parts[part])
        return f"{step}, most of it between the optimizer and the next forward: {between}."
    if facts.ranks == 1:
        return f"{step}, most of it in {part}. There is only one rank, so nothing is averaged."
    overlaps = f"; {overlap:.0%} of the communication overlaps with backward" if overlap is not None else ""
    return f"{step}, most of it in {part}{overlaps}. No rank is a straggler."


def _straggler_summary(step: str, stragglers: Sequence[Straggler]) -> str:
    worst, *others = stragglers
    before = "" if worst.other_step_ms is None else f" ({milliseconds(worst.other_step_ms)} before)"
    where = f"; it is slow in {worst.slow_part}" if worst.slow_part else ""
    also = f" Other stragglers: {rank_list(each.rank for each in others)}." if others else ""
    return (
        f"{step}{before}. Rank {worst.rank} has been a straggler since step {worst.first_step:,}: "
        f"{milliseconds(worst.late_ms)} behind the other ranks, which wait for it{where}.{also}"
    )
