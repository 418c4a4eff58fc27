"""Analyses recordings: the results are plain values, for the page, the terminal and ``--json``."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.recording.reader import read_recording
from paceline.recording.rows import StepColumn, StepKind, SumColumn
from paceline.tools.formatting import milliseconds, percent, rank_list
from paceline.tools.report.bucket_waits import BucketWait, bucket_waits
from paceline.tools.report.figure_steps import FigureSteps, detailed_steps, figure_steps, first_step
from paceline.tools.report.generations import PlanSummary
from paceline.tools.report.run_history import RunHistory, read_history
from paceline.tools.report.step_parts import (
    NEXT_TO_NOTHING,
    StepPart,
    communication,
    median,
    place,
    quartiles,
)
from paceline.tools.report.stragglers import RankDelay, Straggler, rank_delays
from paceline.tools.report.suggestions import RunFacts, Suggestion, suggestions
from paceline.tools.report.wall_time import (
    PauseSummary,
    RankWallTime,
    pause_summaries,
)
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun, wrapper_runs

_NO_HISTORY = RunHistory()
# In these parts ranks also wait for a straggler, or a straggler is slow; it has its own suggestion. What the
# parts cost by themselves, and a change can save, is what they cost the rank that spends least in them.
_LEAST_OF_RANKS = (
    StepPart.JOIN, StepPart.BUFFERS, StepPart.LOSS, StepPart.BEFORE_OPTIMIZER, StepPart.AFTER_OPTIMIZER,
    StepPart.LOADER, StepPart.DATA,
)  # fmt: skip
# Pauses of less than this share of the wall time do not change the rates.
_PAUSES_MATTER = 0.005


@dataclass(frozen=True)
class RankFigures:
    """One rank's wall time; times are milliseconds.

    Attributes:
        rank: the rank.
        host: the name of its host; if a process on another host took its place, the names of both.
        step_ms: first quartile of its steps without pauses, their mean, and third quartile.
        parts: where the wall time goes, as the mean per step; pauses are the last of them.
        communication_ms: how long a bucket was in flight, per step.
        overlap_ms: how much of that was during backward.
        mean_step_ms: the wall time of a step: the sum of the parts.
        wall_ms: from the begin of its first step to the end of its last one.
        longest_step_ms: the longest step of the whole run.
    """

    rank: int
    host: str
    step_ms: tuple[float, float, float]
    parts: Mapping[str, float]
    communication_ms: float
    overlap_ms: float
    mean_step_ms: float
    wall_ms: float
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
        figures_to_step: the last step that they are taken from.
        figures_steps: how many steps they are taken from.
        lost_steps: how many detailed steps were lost: they ended without averages.
        steps_done_again: how many of these were done again, after ranks had been replaced or left out.
        steps_without_inputs: in how many detailed steps a rank had no inputs left.
        step_ms: first quartile of the steps of all ranks without pauses, their mean, and third quartile.
        mean_step_ms: the wall time of a step, with pauses: the sum of the parts.
        wall_ms: the wall time, on the average rank.
        steps_per_second: how many steps there were in a second of wall time.
        parts: where the wall time goes, as the mean of the steps of all ranks, in milliseconds.
        pauses: the pauses by cause, those that took most time first.
        communication_ms: how long a bucket is in flight, per step.
        overlap: the share of that which is during backward; None if there is no communication.
        why_no_overlap: why that is next to nothing; empty if it is not.
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
    figures_to_step: int
    figures_steps: int
    lost_steps: int
    steps_done_again: int
    steps_without_inputs: int
    step_ms: tuple[float, float, float]
    mean_step_ms: float
    wall_ms: float
    steps_per_second: float
    parts: Mapping[str, float]
    pauses: Sequence[PauseSummary]
    communication_ms: float
    overlap: float | None
    why_no_overlap: str
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

    @property
    def figures_of(self) -> str:
        """Of which steps the figures are; empty if they are of all."""
        if self.figures_steps >= self.steps:
            return ""
        return f"figures of steps {self.figures_from_step:,} to {self.figures_to_step:,}"


def analyse_recording(folder: Path) -> list[tuple[WrapperRun, RunAnalysis]]:
    """The runs that were recorded in a folder, one per wrapper, each with its analysis.

    Raises:
        RecordingError: there is no recording, or it cannot be read.
    """
    recordings = read_recording(folder)
    history = read_history(folder, recordings)
    runs = wrapper_runs(recordings)
    return [(run, analyse(run, history, _other_modules(run, runs))) for run in runs]


def _other_modules(run: WrapperRun, runs: Sequence[WrapperRun]) -> list[str]:
    """The modules of other wrappers on the same ranks; the same module with fewer ranks is no other one."""
    return [
        each.module for each in runs if each.module != run.module and not {*run.group}.isdisjoint(each.group)
    ]


def analyse(
    whole: WrapperRun, history: RunHistory = _NO_HISTORY, other_modules: Sequence[str] = ()
) -> RunAnalysis:
    """The analysis of one wrapper's run.

    Args:
        whole: the run.
        history: what happened to its ranks.
        other_modules: the modules of other wrappers on the same ranks.
    """
    chosen = figure_steps(whole)
    run, walls, stragglers = chosen.run, chosen.walls, chosen.stragglers
    figures = [_figures(run, timeline, own) for timeline, own in zip(run.timelines, walls, strict=True)]
    step_ns = quartiles([step for wall in walls for step in wall.usual_steps()])
    buckets = bucket_waits(run)
    pauses = pause_summaries(run, walls)
    facts = _facts(whole, chosen, figures, buckets, pauses)
    overlap_ms = statistics.fmean(each.overlap_ms for each in figures)
    overlap = overlap_ms / facts.in_flight if facts.in_flight else None
    why_no_overlap = _why_no_overlap(facts, overlap)
    return RunAnalysis(
        module=run.module,
        summary=_summary(
            facts,
            overlap,
            why_no_overlap,
            _largest_part(chosen.parts, other_modules, facts),
        ),
        group=run.group,
        missing_ranks=run.missing,
        steps=sum(plan.steps for plan in run.plans),
        detailed_steps=detailed_steps(whole),
        first_detailed_step=first_step(whole),
        figures_from_step=first_step(run),
        figures_to_step=max(timeline[StepColumn.STEP][-1] for timeline in run.timelines),
        figures_steps=chosen.steps,
        lost_steps=whole.steps_of_kind(StepKind.LOST),
        steps_done_again=len(whole.done_again),
        steps_without_inputs=whole.steps_of_kind(StepKind.NO_INPUTS),
        step_ms=_spread(step_ns, facts.step),
        mean_step_ms=chosen.mean_step_ms,
        wall_ms=chosen.wall_ms,
        steps_per_second=chosen.steps_per_second,
        parts={str(part): spent for part, spent in chosen.parts.items()},
        pauses=pauses,
        communication_ms=facts.in_flight,
        overlap=overlap,
        why_no_overlap=why_no_overlap,
        units_per_second=chosen.units_per_second,
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
    chosen: FigureSteps,
    figures: Sequence[RankFigures],
    buckets: Sequence[BucketWait],
    pauses: Sequence[PauseSummary],
) -> RunFacts:
    """What suggestions are made from."""
    run, parts = chosen.run, chosen.parts
    least = {part: min(each.parts[part] for each in figures) for part in _LEAST_OF_RANKS}
    return RunFacts(
        step=sum(parts.values()) - parts[StepPart.PAUSE],
        pauses=pauses,
        parts=parts,
        least=least,
        in_flight=statistics.fmean(each.communication_ms for each in figures),
        first_ready=_first_ready(buckets, parts[StepPart.BACKWARD]),
        buckets=[each.nbytes for each in buckets],
        cap=int(run.description["cap"]),
        ranks=len(run.group),
        hosts=_hosts(run),
        transport=str(run.description["transport"]),
        device=str(run.description["device"]),
        exchange=str(run.description["exchange"]),
        stragglers=chosen.stragglers,
        lost=(whole.steps_of_kind(StepKind.LOST) - len(whole.done_again)) / detailed_steps(whole),
        without_inputs=whole.steps_of_kind(StepKind.NO_INPUTS) / detailed_steps(whole),
        without_optimizer=_without_optimizer(run),
    )


def _without_optimizer(run: WrapperRun) -> float:
    """The share of ordinary steps after which no optimizer stepped; the last step is not complete."""
    starts = [
        timeline[StepColumn.OPTIMIZER_START][row]
        for timeline, rows in zip(run.timelines, run.common_rows, strict=True)
        for row in rows[:-1]
    ]
    return starts.count(0) / len(starts) if starts else 0.0


def _figures(run: WrapperRun, timeline: RankTimeline, wall: RankWallTime) -> RankFigures:
    parts = {str(part): spent / 1e6 for part, spent in wall.per_step().items()}
    in_flight, overlap = communication(run, timeline, wall.times[StepPart.PAUSE])
    usual = sum(parts.values()) - parts[StepPart.PAUSE]
    return RankFigures(
        rank=timeline.rank,
        host=timeline.host,
        step_ms=_spread(quartiles(wall.usual_steps()), usual),
        parts=parts,
        communication_ms=in_flight / 1e6,
        overlap_ms=overlap / 1e6,
        mean_step_ms=sum(parts.values()),
        wall_ms=wall.wall / 1e6,
        longest_step_ms=max((each[SumColumn.LONGEST] for each in timeline.sums), default=0) / 1e6,
    )


def _spread(quartiles_ns: tuple[float, float, float], step: float) -> tuple[float, float, float]:
    """The mean step without pauses between the quartiles. All texts have this one; parts are shares of it."""
    low, _, high = quartiles_ns
    return low / 1e6, step, high / 1e6


def _first_ready(buckets: Sequence[BucketWait], backward: float) -> float:
    ready = median([times.ready for times in buckets[0].ranks]) if buckets else 0.0
    return min(1.0, max(0.0, ready / backward)) if backward else 0.0


def _hosts(run: WrapperRun) -> int:
    """How many machines: by their boots, or as the ranks have found, whichever is more."""
    boots = {each["boot"] for timeline in run.timelines for each in timeline.descriptions}
    return max(1, int(run.description["hosts"]), len(boots))


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


def _summary(facts: RunFacts, overlap: float | None, why_no_overlap: str, largest_part: str) -> str:
    why = f", because {why_no_overlap}" if why_no_overlap else ""
    step = _step_summary(facts, overlap, why, largest_part)
    causes = ", ".join(map(str, facts.large_pauses))
    return (
        f"Pauses take {percent(facts.paused_share)} of the wall time ({causes}). {step}" if causes else step
    )


def _step_summary(facts: RunFacts, overlap: float | None, why: str, largest_part: str) -> str:
    step = f"A step takes {milliseconds(facts.step)}{_without_pauses(facts)}"
    if facts.stragglers and facts.stragglers[0].last_step is None:
        return _straggler_summary(step, [each for each in facts.stragglers if each.last_step is None])
    joining = facts.parts[StepPart.JOIN]
    if facts.is_join_worth and facts.least[StepPart.JOIN] > facts.exposed:
        return (
            f"{step}, of which {milliseconds(joining)} ({percent(joining / facts.step)}) is waiting in join."
        )
    if facts.ranks > 1 and facts.is_worth(facts.exposed):
        exposed = f"{milliseconds(facts.exposed)} ({percent(facts.exposed / facts.step)})"
        return f"{step}, of which {exposed} is exposed communication: it does not overlap with backward{why}."
    where = f"{step}, {largest_part}"
    if facts.ranks == 1:
        return f"{where}. There is only one rank, so nothing is averaged."
    if overlap is None:
        return f"{where}. No rank is a straggler."
    overlaps = f"{percent(overlap)} of the communication overlaps with backward{why}"
    return f"{where}; {overlaps}. No rank is a straggler."


def _without_pauses(facts: RunFacts) -> str:
    """Why a step is shorter than the rates say; empty if it is not."""
    if facts.large_pauses:  # they have been told
        return " without them"
    return " without pauses" if facts.paused_share > _PAUSES_MATTER else ""


def _largest_part(parts: Mapping[StepPart, float], other_modules: Sequence[str], facts: RunFacts) -> str:
    """Where most of a step goes, or the largest part of it."""
    usual = {part: spent for part, spent in parts.items() if part is not StepPart.PAUSE}
    part = max(usual, key=lambda each: usual[each])
    share = usual[part] / (sum(usual.values()) or 1.0)
    before = "the optimizer" if facts.sees_optimizer else "backward"
    # What is between them with a DataLoader has several parts; a suggestion has their sum.
    is_all_between = part is StepPart.DATA and not usual[StepPart.LOADER] + usual[StepPart.AFTER_OPTIMIZER]
    where = f"between {before} and the next forward" if is_all_between else place(part)
    of = " of the usual step" if facts.paused_share > _PAUSES_MATTER else ""
    named = f", {', '.join(other_modules)}" if part is StepPart.OTHER_WRAPPERS and other_modules else ""
    return f"{'most of it' if share > 0.5 else 'the largest part'} {where} ({percent(share)}{of}{named})"


def _why_no_overlap(facts: RunFacts, overlap: float | None) -> str:
    """Why next to no communication is hidden behind backward; empty if some is, or there is none."""
    if overlap is None or overlap >= NEXT_TO_NOTHING or facts.ranks == 1:
        return ""
    if len(facts.buckets) == 1:
        return "all gradients are in one bucket, which is full only when backward ends"
    if facts.first_ready > 1 - NEXT_TO_NOTHING:
        return "the first bucket is full only when backward ends"
    return "buckets are launched only when backward ends"


def _straggler_summary(step: str, stragglers: Sequence[Straggler]) -> str:
    worst, *others = stragglers
    before = "" if worst.other_step_ms is None else f" ({milliseconds(worst.other_step_ms)} before)"
    where = f"; it is slow {place(worst.slow_part)}" if worst.slow_part else ""
    also = f" Other stragglers: {rank_list(each.rank for each in others)}." if others else ""
    return (
        f"{step}{before}. Rank {worst.rank} has been a straggler since step {worst.first_step:,}: "
        f"{milliseconds(worst.late_ms)} behind the other ranks, which wait for it{where}.{also}"
    )
