"""How long a training stood still after a kill, and whether a run ended as it should. Pure: no processes."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heal_notes import End, Phase
from heal_plan import KINDS

Ends = Mapping[int, Sequence[End]]


@dataclass(frozen=True)
class Kill:
    """A process that was killed.

    Attributes:
        kind: the kind of its strike.
        at: when, in seconds since the epoch.
        rank: whose place it had.
        phase: what it was doing.
    """

    kind: str
    at: float
    rank: int
    phase: Phase


@dataclass(frozen=True)
class Stall:
    """What a kill has cost.

    Attributes:
        kill: the kill.
        seconds: from the kill until all ranks had ended a step that none had ended before it; None if they
            never have.
        pause: the longest time until then in which no step ended on any rank.
        again: how many steps were done again that had ended.
    """

    kill: Kill
    seconds: float | None
    pause: float | None
    again: int


@dataclass(frozen=True)
class Ran:
    """What was seen of one run.

    Attributes:
        side: which launcher.
        world: the number of ranks.
        code: the exit code; None if the run hung.
        strikes: how many of the planned strikes were done.
        kills: in the order of time.
        ends: the steps that ended on each rank.
        results: what each rank said at the end.
        ledger: why samples did not count once; empty if they did, or if nobody has asked.
        left: processes and files that were left.
    """

    side: str
    world: int
    code: int | None
    strikes: int
    kills: Sequence[Kill]
    ends: Ends
    results: Mapping[int, Mapping[str, str]]
    ledger: str = ""
    left: Sequence[str] = ()


def stall(kill: Kill, ends: Ends, world: int) -> Stall:
    """What a kill has cost, by the notes of all ranks."""
    before = {rank: {end.step for end in own if end.at <= kill.at} for rank, own in ends.items()}
    furthest = max((step for steps in before.values() for step in steps), default=-1)
    after = {rank: [end for end in own if end.at > kill.at] for rank, own in ends.items()}
    times = _new_steps(after, furthest)
    whole = [max(each) for each in times if len(each) == world]
    healed = min(whole, default=None)
    again = {end.step for rank, own in after.items() for end in own if end.step in before[rank]}
    return Stall(
        kill,
        seconds=None if healed is None else healed - kill.at,
        pause=None if healed is None else _longest_pause(kill.at, healed, ends),
        again=len(again),
    )


def _new_steps(after: Ends, furthest: int) -> list[list[float]]:
    """For each further step, when it ended first on each rank that has ended it."""
    times: dict[int, dict[int, float]] = {}
    for rank, own in after.items():
        for end in own:
            if end.step > furthest:
                times.setdefault(end.step, {}).setdefault(rank, end.at)
    return [list(of_ranks.values()) for of_ranks in times.values()]


def _longest_pause(after: float, until: float, ends: Ends) -> float:
    """The longest time without the end of a step that lies between two moments, at least in part."""
    times = sorted(end.at for own in ends.values() for end in own)
    begins = max((at for at in times if at <= after), default=after)
    inside = [begins, *(at for at in times if after < at <= until)]
    return max(second - first for first, second in itertools.pairwise(inside))


def step_seconds(ends: Ends) -> float:
    """The median time from the end of a step to the end of the next."""
    times = [
        after.at - before.at
        for own in ends.values()
        for before, after in itertools.pairwise(own)
        if after.step == before.step + 1
    ]
    return statistics.median(times) if times else math.nan


def lost_share(ends: Ends, world: int) -> float:
    """Which share of the samples did not count, because ranks were missing in steps that did."""
    ranks: dict[int, int] = {}
    for own in ends.values():
        for end in own:
            ranks[end.step] = max(end.ranks, ranks.get(end.step, 0))
    return sum(world - each for each in ranks.values()) / (world * len(ranks)) if ranks else math.nan


def problems(ran: Ran, quiet: Mapping[str, str] | None) -> list[str]:
    """What is wrong with a run.

    Args:
        ran: the run.
        quiet: what the run without kills said at its end; None if ranks need only agree with each other.
    """
    return [*_wrong_end(ran), *_wrong_bits(ran, quiet), *([ran.ledger] if ran.ledger else []), *ran.left]


def _wrong_end(ran: Ran) -> Iterator[str]:
    if ran.code is None:
        yield "it hung"
    elif ran.code:
        yield f"exit code {ran.code}"
    if ran.code is not None and len(ran.results) < ran.world:
        yield f"{len(ran.results)} of {ran.world} ranks came to the end"


def _wrong_bits(ran: Ran, quiet: Mapping[str, str] | None) -> Iterator[str]:
    states = {rank: result["state"] for rank, result in ran.results.items()}
    if quiet is None:
        if len({*states.values()}) > 1:
            yield "ranks ended with different bits"
        return
    if other := [rank for rank, state in states.items() if state != quiet["state"]]:
        yield f"other bits on ranks {other}"
    if ran.results.get(0, quiet)["buffers"] != quiet["buffers"]:
        yield "other module buffers on rank 0"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not less than this share of the values; NaN if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


@dataclass
class Side:
    """What was seen of all runs with one launcher.

    Attributes:
        stalls: of all kills, by number of ranks.
        steps: median time of a step in each run, by number of ranks.
        lost: share of samples that did not count in each run.
        runs: how many there were.
        right: how many of them ended as they should.
        wrong: what was wrong with how many runs.
    """

    stalls: dict[int, list[Stall]] = field(default_factory=dict)
    steps: dict[int, list[float]] = field(default_factory=dict)
    lost: list[float] = field(default_factory=list)
    runs: int = 0
    right: int = 0
    wrong: Counter[str] = field(default_factory=Counter)

    def add(self, ran: Ran, wrong: Sequence[str]) -> None:
        """Add a run."""
        self.runs += 1
        self.right += not wrong
        self.wrong.update(wrong)
        self.stalls.setdefault(ran.world, []).extend(stall(each, ran.ends, ran.world) for each in ran.kills)
        self.steps.setdefault(ran.world, []).append(step_seconds(ran.ends))
        self.lost.append(lost_share(ran.ends, ran.world))

    def figures(self) -> dict[str, Any]:
        """What the docs need."""
        every = [each for world in self.stalls for each in self._with_steps(world)]
        phases = Counter(stall.kill.phase for stall, _ in every)
        rows = [self._row(world, kind) for world in sorted(self.stalls) for kind in KINDS]
        return {
            "runs": self.runs,
            "right": self.right,
            "wrong": dict(self.wrong),
            "lost": _rounded(_mean(self.lost)),
            "phases": {phase.words: phases[phase] for phase in Phase if phases[phase]},
            "rows": [row for row in rows if row["kills"]],
            "all": _summary(every),
        }

    def _row(self, world: int, kind: str) -> dict[str, Any]:
        chosen = [each for each in self._with_steps(world) if each[0].kill.kind == kind]
        return {"world": world, "kind": kind, **_summary(chosen)}

    def _with_steps(self, world: int) -> list[tuple[Stall, float]]:
        """Each stall, and how long a step takes with as many ranks."""
        step = statistics.median(self.steps[world])
        return [(each, step) for each in self.stalls[world]]


def _summary(stalls: Sequence[tuple[Stall, float]]) -> dict[str, Any]:
    healed = [(each.seconds, step) for each, step in stalls if each.seconds is not None]
    seconds = [own for own, _ in healed]
    pauses = [each.pause for each, _ in stalls if each.pause is not None]
    return {
        "kills": len(stalls),
        "healed": len(healed),
        "step": _rounded(quantile([step for _, step in stalls], 0.5)),
        "median": _rounded(quantile(seconds, 0.5)),
        "p95": _rounded(quantile(seconds, 0.95)),
        "most": _rounded(max(seconds, default=math.nan)),
        "median less a step": _rounded(quantile([own - step for own, step in healed], 0.5)),
        "pause": _rounded(quantile(pauses, 0.5)),
        "again": _rounded(_mean([each.again for each, _ in stalls])),
    }


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)
