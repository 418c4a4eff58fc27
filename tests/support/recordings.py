"""Made-up recordings: plausible steps of several ranks, written as the recorder writes them."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.recording.healings import Healing, write_healing
from paceline.recording.recorder import PLANS_PER_GENERATION
from paceline.recording.rows import (
    NOT_TIMES,
    BucketColumn,
    StepColumn,
    StepKind,
    row_sums,
    row_width,
)
from paceline.recording.writer import PlanDescription, PlanWriter, WrapperDescription

MS = 1_000_000
MIB = 1 << 20
_OPTIMIZER = (StepColumn.OPTIMIZER_START, StepColumn.OPTIMIZER_END, StepColumn.OPTIMIZER)


@dataclass(frozen=True)
class Slow:
    """A rank that needs longer for something, from some step on."""

    rank: int
    ms: float
    since: int = 0
    until: int = 1 << 60
    part: str = "backward"


@dataclass(frozen=True)
class PauseEvery:
    """A rank that pauses after every few steps; the column gets the time, and says what the pause was for."""

    rank: int
    ms: float
    steps: int
    column: StepColumn | None = None


@dataclass(frozen=True)
class Run:
    """What to make up; times are milliseconds."""

    ranks: int = 4
    steps: int = 40
    buckets: int = 4
    parameters: int = 16
    bucket_bytes: int = 4 * MIB
    forward: float = 8.0
    loss: float = 0.5
    buffers: float = 0.0
    join: float = 0.0
    backward: float = 20.0
    clipping: float = 0.1
    optimizer: float = 3.0
    optimizer_every: int = 1  # steps
    # With a ``DataLoader``: what comes before it, and itself.
    logging: float = 0.0
    loader: float = 0.0
    data: float = 2.0
    transfer: float = 2.0
    jitter: float = 0.0
    count: int = 32
    slow: Sequence[Slow] = ()
    pauses: Sequence[PauseEvery] = ()
    # The host of each rank, and by how much each host's monotonic clock is ahead.
    hosts: Sequence[int] = ()
    skews: Sequence[int] = (0,)
    drift: float = 0.0
    kinds: Mapping[tuple[int, int], StepKind] = field(default_factory=dict)
    module: str = "Net"
    names: Sequence[str] = ()
    wrapper: int = 0
    group: Sequence[int] = ()
    transport: str = "shared memory"
    exchange: str = "the average"
    # A bucket that is ready only when backward ends, after later ones.
    stuck: int | None = None
    seed: int = 0
    # A generation of a run that is healed; some ranks are killed in its last step.
    generation: int = 0
    first_step: int = 0
    start: int = 1_000_000 * MS
    killed: Sequence[int] = ()
    # From this step on, all gradients are in two buckets.
    other_plan_from: int = 1 << 60

    def plan_of(self, step: int) -> int:
        """The place of a step's plan."""
        return 2 if step >= self.other_plan_from else min(step - self.first_step, 1)

    @property
    def slots(self) -> list[str]:
        return [*self.names, *(f"layers.{index}.weight" for index in range(len(self.names), self.parameters))]


def write(run: Run, folder: Path) -> Path:
    """A first step with one bucket, and the other steps with all buckets."""
    _write(run, folder)
    return folder


def write_healed(run: Run, folder: Path, losses: Sequence[tuple[int, int]], *, pause: float = 700.0) -> Path:
    """A run in which ranks are killed, each with the step; after a pause, another process takes its place."""
    for generation, (step, rank) in enumerate(losses):
        steps = step - run.first_step + 1
        end = _write(replace(run, generation=generation, steps=steps, killed=[rank]), folder)
        at = end + _epoch(folder)
        lost = [(rank, "SIGKILL")]
        write_healing(folder, Healing(generation + 1, step, run.ranks, lost, at, pause / 1e3))
        left = run.steps - steps + 1
        run = replace(run, first_step=step, steps=left, start=end + int(pause * MS))
    return write(replace(run, generation=len(losses)), folder)


def _epoch(folder: Path) -> int:
    return int(json.loads((folder / "rank0-wrapper0-plan1.json").read_text())["epoch"])


def _write(run: Run, folder: Path) -> int:
    """Write a run; returns when it ends."""
    ranks = list(run.group) or list(range(run.ranks))
    per = -(-run.parameters // run.buckets)
    # Gradients come from the last layer to the first.
    slots = list(reversed(range(run.parameters)))
    buckets = [slots[start : start + per] for start in range(0, run.parameters, per)]
    halves = [slots[: len(slots) // 2], slots[len(slots) // 2 :]]
    plans = [PlanDescription(each, run.exchange) for each in ([slots], buckets, halves)]
    plans = plans if run.other_plan_from < run.first_step + run.steps else plans[:2]
    writers = [
        [
            PlanWriter(_describe(run, rank, ranks), plan, number, unit="samples", folder=folder)
            for number, plan in enumerate(plans, start=run.generation * PLANS_PER_GENERATION)
        ]
        for rank in ranks
    ]
    simulation = _Simulation(run, ranks, plans)
    for index in range(run.steps):
        is_lost = bool(run.killed) and index == run.steps - 1
        rows, begins = simulation.step(run.first_step + index, is_lost=is_lost)
        for rank, own, row, begin in zip(ranks, writers, rows, begins, strict=True):
            sums = row_sums(row, next_begin=begin)
            if not is_lost or rank not in run.killed:
                own[run.plan_of(run.first_step + index)].ring.append(row, sums)
    if run.hosts:
        _move(run, ranks, folder)
    return simulation.end


def _describe(run: Run, rank: int, group: Sequence[int]) -> WrapperDescription:
    return WrapperDescription(
        rank=rank,
        world=run.ranks,
        group=group,
        module=run.module,
        slots=run.slots,
        nbytes=[run.bucket_bytes * run.buckets // run.parameters] * run.parameters,
        backend="gloo",
        transport=run.transport,
        hosts=len(set(run.hosts)) or 1,
        device="cpu",
        first_cap=MIB,
        cap=25 * MIB,
        wrapper=run.wrapper,
    )


def _move(run: Run, ranks: Sequence[int], folder: Path) -> None:
    """Put ranks on other hosts, whose wall clocks are wrong by a few milliseconds."""
    for place, rank in enumerate(ranks):
        for number in (0, 1):
            plan = run.generation * PLANS_PER_GENERATION + number
            path = folder / f"rank{rank}-wrapper{run.wrapper}-plan{plan}.json"
            description = json.loads(path.read_text())
            host = run.hosts[place]
            description |= {"host": f"node-{host}", "boot": f"boot-{host}"}
            description["epoch"] += -run.skews[host] + 3 * MS * host
            path.write_text(json.dumps(description))


class _Simulation:
    """The true times of all ranks; the rows have them as each host's clock shows them."""

    def __init__(self, run: Run, ranks: Sequence[int], plans: Sequence[PlanDescription]) -> None:
        self._run = run
        self._ranks = ranks
        self._plans = plans
        self._random = random.Random(run.seed)
        self._now = [run.start + place * 10_000 for place in range(len(ranks))]

    @property
    def end(self) -> int:
        return max(self._now)

    def step(self, step: int, *, is_lost: bool = False) -> tuple[list[list[int]], list[int]]:
        """Each rank's row, and when its next step begins."""
        plan = self._plans[self._run.plan_of(step)]
        rows = [self._compute(step, place, plan) for place in range(len(self._ranks))]
        self._communicate(rows, plan)
        for place, row in enumerate(rows):
            row[StepColumn.END] = row[StepColumn.ALL_REDUCED] + MS // 5
            end = row[StepColumn.END]
            if step % self._run.optimizer_every == 0:
                row[StepColumn.OPTIMIZER_START] = start = end + int(self._run.clipping * MS)
                row[StepColumn.OPTIMIZER] = self._time("optimizer", step, place)
                row[StepColumn.OPTIMIZER_END] = end = start + row[StepColumn.OPTIMIZER]
            if self._run.loader:
                row[StepColumn.LOADER_START] = end = end + self._time("logging", step, place)
                row[StepColumn.LOADER] = self._time("loader", step, place)
                end += row[StepColumn.LOADER]
            self._now[place] = end + self._time("data", step, place)
            if row[StepColumn.KIND] & StepKind.NO_INPUTS:
                row[StepColumn.WITHOUT_INPUTS] = self._now[place] - end
            for pause in self._run.pauses:
                if pause.rank == self._ranks[place] and step % pause.steps == pause.steps - 1:
                    self._now[place] += int(pause.ms * MS)
                    if pause.column is not None:
                        row[pause.column] += int(pause.ms * MS)
                    if pause.column is StepColumn.EVALUATION:
                        row[StepColumn.EVALUATIONS] += 1
            if is_lost:
                self._lose(row)
                self._now[place] = row[StepColumn.END]
        skewed = [self._skewed(row, place, step) for place, row in enumerate(rows)]
        ahead = [self._ahead(place, step) for place in range(len(rows))]
        return skewed, [now + more for now, more in zip(self._now, ahead, strict=True)]

    def _time(self, part: str, step: int, place: int) -> int:
        run = self._run
        ms: float = getattr(run, part)
        ms += sum(
            slow.ms
            for slow in run.slow
            if slow.rank == self._ranks[place] and slow.part == part and slow.since <= step < slow.until
        )
        if ms and run.jitter:
            ms *= 1 + run.jitter * self._random.random()
        return int(ms * MS)

    def _compute(self, step: int, place: int, plan: PlanDescription) -> list[int]:
        run, now = self._run, self._now[place]
        row = [0] * row_width(len(plan.buckets))
        row[StepColumn.STEP], row[StepColumn.COUNT], row[StepColumn.FORWARDS] = step, run.count, 1
        row[StepColumn.KIND] = run.kinds.get((step, self._ranks[place]), StepKind.ORDINARY)
        row[StepColumn.BEGIN] = row[StepColumn.FORWARD_START] = now
        # No rank has the others' words, or the first rank's buffers, before every rank has begun its forward.
        told = max(self._now) + int(run.join * MS)
        row[StepColumn.JOIN_END] = told if run.join else 0
        row[StepColumn.BUFFERS_END] = told + self._time("buffers", step, place) if run.buffers else 0
        row[StepColumn.FORWARD_END] = max(
            now, row[StepColumn.JOIN_END], row[StepColumn.BUFFERS_END]
        ) + self._time("forward", step, place)
        row[StepColumn.BACKWARD_START] = start = row[StepColumn.FORWARD_END] + self._time("loss", step, place)
        length = self._time("backward", step, place)
        row[StepColumn.BACKWARD_END] = start + length
        for index, slots in enumerate(plan.buckets):
            share = 1 if index == run.stuck else (index + 1) / len(plan.buckets)
            cells = [start + int(length * share) - 1000 * (len(plan.buckets) - index), slots[-1], 0, 0]
            row[len(StepColumn) + index * 4 : len(StepColumn) + index * 4 + 4] = cells
        return row

    def _communicate(self, rows: list[list[int]], plan: PlanDescription) -> None:
        """Buckets are launched in order, and are reduced after every rank's launch, one after the other."""
        reduced = 0
        for index in range(len(plan.buckets)):
            ready, launch = (
                len(StepColumn) + index * len(BucketColumn) + each
                for each in (BucketColumn.READY, BucketColumn.LAUNCH)
            )
            for row in rows:
                before = row[launch - len(BucketColumn)] if index else 0
                row[launch] = max(row[ready], before) + 10_000
            transfer = self._run.transfer * (1 if len(plan.buckets) > 1 else self._run.buckets)
            if self._run.jitter:
                transfer *= 1 + self._run.jitter * self._random.random()
            reduced = max(reduced, *(row[launch] for row in rows)) + int(transfer * MS)
            for place, row in enumerate(rows):
                row[launch + 1] = reduced + place * 1000
        for place, row in enumerate(rows):
            row[StepColumn.ALL_REDUCED] = max(row[StepColumn.BACKWARD_END], reduced + place * 1000)

    def _lose(self, row: list[int]) -> None:
        """Gradients were computed, but no bucket came back."""
        row[StepColumn.KIND] |= StepKind.LOST
        row[StepColumn.END] = row[StepColumn.BACKWARD_END] + MS
        for column in (*_OPTIMIZER, StepColumn.ALL_REDUCED):
            row[column] = 0
        reduced = len(StepColumn) + BucketColumn.REDUCED
        row[reduced :: len(BucketColumn)] = [0] * len(row[reduced :: len(BucketColumn)])

    def _ahead(self, place: int, step: int) -> int:
        run = self._run
        host = run.hosts[place] if run.hosts else 0
        return run.skews[host] + int(run.drift * host * step) if run.hosts else 0

    def _skewed(self, row: list[int], place: int, step: int) -> list[int]:
        ahead = self._ahead(place, step)
        last = {
            len(StepColumn) + index * 4 + BucketColumn.LAST_SLOT
            for index in range((len(row) - len(StepColumn)) // 4)
        }
        fixed = {*NOT_TIMES} | last
        if not ahead:
            return row
        return [each + ahead if each and index not in fixed else each for index, each in enumerate(row)]
