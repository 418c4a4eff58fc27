"""From a recording to findings: plain values, for the page, the terminal and scripts."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.recording.rows import Column, Kind, Sum
from paceline.tools.report.advice import Facts, Suggestion, suggestions
from paceline.tools.report.lateness import Arrivals, Late, arrivals, late_ranks
from paceline.tools.report.parts import (
    Durations,
    Part,
    communication,
    durations,
    median,
    quartiles,
    shares,
    typical,
)
from paceline.tools.report.runs import PlanNote, Section, Track
from paceline.tools.report.waits import Waits, bucket_waits
from paceline.tools.report.words import milliseconds, ranks

_FEWEST = 8


@dataclass(frozen=True)
class RankFigures:
    """One rank's typical step, in milliseconds.

    Attributes:
        rank: which.
        host: where it runs.
        step: how long a step is: first quartile, median, third.
        parts: where it goes, on average over the middle half of its steps.
        under_way: how long some bucket was under way.
        hidden: how much of that was during backward.
        mean: how long a step was on average over the whole run.
        longest: the longest step of the run.
    """

    rank: int
    host: str
    step: tuple[float, float, float]
    parts: Mapping[str, float]
    under_way: float
    hidden: float
    mean: float
    longest: float


@dataclass(frozen=True)
class Findings:
    """What is known of one wrapper.

    Attributes:
        module: the class of what is wrapped.
        verdict: the most important in a sentence or two.
        group: the ranks that it averages over.
        missing: those of them that recorded nothing.
        steps: how many steps there were, with all plans.
        recorded: how many are recorded whole.
        first: the first of those.
        since: the first of those that the figures below are of: what was before a rank became late is no
            longer so.
        lost: how many of those were given up.
        shadowed: in how many some rank had no inputs.
        step_ms: how long a step is: first quartile, median, third, over all ranks.
        mean_ms: on average over the whole run.
        parts: where it goes, on the average rank.
        under_way_ms: how long some bucket is under way.
        hidden: the share of that which is during backward; None if there was none.
        rate: how many samples a second all ranks had together, in the run; None if they were not counted.
        unit: or what else was counted.
        ranks: each rank's figures.
        arrivals: how each comes to where ranks meet.
        late: who is late.
        buckets: what each waits for.
        suggestions: what to change.
        clock_us: by how much times of different hosts may be wrong; None if nobody can say.
        run: what else is known of it, in words.
        plans: all plans.
    """

    module: str
    verdict: str
    group: Sequence[int]
    missing: Sequence[int]
    steps: int
    recorded: int
    first: int
    since: int
    lost: int
    shadowed: int
    step_ms: tuple[float, float, float]
    mean_ms: float
    parts: Mapping[str, float]
    under_way_ms: float
    hidden: float | None
    rate: float | None
    unit: str
    ranks: Sequence[RankFigures]
    arrivals: Sequence[Arrivals]
    late: Sequence[Late]
    buckets: Sequence[Waits]
    suggestions: Sequence[Suggestion]
    clock_us: float | None
    run: Mapping[str, str | int]
    plans: Sequence[PlanNote]


def analyse(whole: Section) -> Findings:
    """What a section's rows and sums say."""
    everything = _spent(whole)
    late = late_ranks(whole, everything, quartiles(_lengths(whole))[1])
    section = _now(whole, late)
    spent = everything if section is whole else _spent(section)
    figures = [_figures(section, track, own) for track, own in zip(section.tracks, spent, strict=True)]
    low, middle, high = quartiles(_lengths(section))
    hidden = statistics.fmean(each.hidden for each in figures)
    buckets = bucket_waits(section)
    facts = _facts(whole, section, figures, buckets, late)
    share = hidden / facts.under_way if facts.under_way else None
    return Findings(
        module=section.module,
        verdict=_verdict(facts, share),
        group=section.group,
        missing=section.missing,
        steps=sum(plan.steps for plan in section.plans),
        recorded=_recorded(whole),
        first=_first(whole),
        since=_first(section),
        lost=whole.kinds(Kind.LOST),
        shadowed=whole.kinds(Kind.SHADOW),
        step_ms=(low / 1e6, middle / 1e6, high / 1e6),
        mean_ms=statistics.fmean(each.mean for each in figures),
        parts={str(part): spent for part, spent in _parts(figures).items()},
        under_way_ms=facts.under_way,
        hidden=share,
        rate=_rate(section),
        unit=str(section.about["unit"]),
        ranks=figures,
        arrivals=arrivals(section, middle, late),
        late=late,
        buckets=buckets,
        suggestions=suggestions(facts),
        clock_us=None if section.clock_uncertainty is None else section.clock_uncertainty / 1e3,
        run=_run(section),
        plans=section.plans,
    )


def _facts(
    whole: Section,
    section: Section,
    figures: Sequence[RankFigures],
    buckets: Sequence[Waits],
    late: Sequence[Late],
) -> Facts:
    """What suggestions are made from."""
    parts = _parts(figures)
    # A rank that comes early waits for the others at its buffers, and one that is late by its data is told of
    # by itself: what these cost everyone is what they cost the rank with the least.
    least = {part: min(each.parts[part] for each in figures) for part in (Part.BUFFERS, Part.BETWEEN)}
    return Facts(
        # Of the steps that the parts are of, so that a part is never more than the whole.
        step=sum(parts.values()),
        parts=parts | least,
        under_way=statistics.fmean(each.under_way for each in figures),
        first_ready=_first_ready(buckets, parts[Part.BACKWARD]),
        buckets=[each.nbytes for each in buckets],
        cap=int(section.about["cap"]),
        ranks=len(section.group),
        hosts=_hosts(section),
        transport=str(section.about["transport"]),
        device=str(section.about["device"]),
        exchange=str(section.about["exchange"]),
        late=late,
        lost=whole.kinds(Kind.LOST) / _recorded(whole),
        shadowed=whole.kinds(Kind.SHADOW) / _recorded(whole),
    )


def _parts(figures: Sequence[RankFigures]) -> dict[Part, float]:
    """Where a step goes on the average rank."""
    return {part: statistics.fmean(each.parts[part] for each in figures) for part in Part}


def _recorded(section: Section) -> int:
    return max(map(len, section.tracks))


def _spent(section: Section) -> list[Durations]:
    return [durations(track, section.last_arrivals) for track in section.tracks]


def _lengths(section: Section) -> list[int]:
    """Of all steps on all ranks, but for the last, which has no next one."""
    return [length for track in section.tracks for length in track.lengths[: max(1, len(track) - 1)]]


def _first(section: Section) -> int:
    return min(track[Column.STEP][0] for track in section.tracks)


def _now(section: Section, late: Sequence[Late]) -> Section:
    """The steps since the last rank has become late, if they are enough to speak of."""
    since = max((each.since for each in late if each.until is None and not each.give), default=0)
    recent = section.since(since)
    return recent if min(map(len, recent.tracks)) >= _FEWEST else section


def _figures(section: Section, track: Track, spent: Durations) -> RankFigures:
    places = typical(track.lengths)
    under_way, hidden = communication(section, track)
    steps = max(1, sum(each[Sum.STEPS] for each in track.sums))
    low, middle, high = quartiles(track.lengths[: max(1, len(track) - 1)])
    return RankFigures(
        rank=track.rank,
        host=str(track.about["host"]),
        step=(low / 1e6, middle / 1e6, high / 1e6),
        parts={str(part): each / 1e6 for part, each in shares(spent, places).items()},
        under_way=under_way / 1e6,
        hidden=hidden / 1e6,
        mean=sum(each[Sum.STEP] for each in track.sums) / steps / 1e6,
        longest=max((each[Sum.LONGEST] for each in track.sums), default=0) / 1e6,
    )


def _first_ready(buckets: Sequence[Waits], backward: float) -> float:
    ready = median([times.ready for times in buckets[0].ranks]) if buckets else 0.0
    return min(1.0, max(0.0, ready / backward)) if backward else 0.0


def _hosts(section: Section) -> int:
    """By whose clocks differ, or by what the ranks have found, which may be less than machines."""
    return max(1, int(section.about["hosts"]), len({track.about["boot"] for track in section.tracks}))


def _rate(section: Section) -> float | None:
    """Of all ranks together; they run in step, so the time is that of one."""
    counted = sum(each[Sum.COUNT] for track in section.tracks for each in track.sums)
    longest = max(sum(each[Sum.STEP] for each in track.sums) for track in section.tracks)
    return counted / (longest / 1e9) if counted and longest else None


def _run(section: Section) -> dict[str, str | int]:
    about = section.about
    known = ("world", "backend", "transport", "exchange", "device", "cap", "first_cap", "plan", "version")
    return {
        **{key: about[key] for key in known},
        "hosts": _hosts(section),
        "parameters": len(about["slots"]),
        "nbytes": sum(about["nbytes"]),
        "buckets": len(section.buckets),
    }


def _verdict(facts: Facts, hidden: float | None) -> str:
    step = f"A step takes {milliseconds(facts.step)}"
    if facts.late and facts.late[0].until is None:
        late = facts.late[0]
        others = [each.rank for each in facts.late[1:] if each.until is None]
        also = f", and so {'have' if len(others) > 1 else 'has'} {ranks(others)}" if others else ""
        before = "" if late.other_ms is None else f" ({milliseconds(late.other_ms)} before)"
        return (
            f"{step}{before}. Rank {late.rank} has been late by {milliseconds(late.late_ms)} since step "
            f"{late.since:,}{also}; the others wait."
        )
    if facts.ranks > 1 and facts.is_worth(facts.exposed):
        exposed = f"{milliseconds(facts.exposed)} ({facts.exposed / facts.step:.0%})"
        return f"{step}, of which {exposed} is communication that nothing hides."
    part = max(facts.parts, key=lambda each: facts.parts[each])
    if part is Part.BETWEEN and facts.is_worth(facts.parts[part]):
        between = milliseconds(facts.parts[part])
        return f"{step}, most of it between the optimizer and the next forward: {between}."
    if facts.ranks == 1:
        return f"{step}, most of it in {part}. There is one rank, and nothing to average."
    under = f"; {hidden:.0%} of the communication is hidden under backward" if hidden is not None else ""
    return f"{step}, most of it in {part}{under}. No rank is late."
