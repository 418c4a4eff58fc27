"""Recordings of runs that never were: plausible steps of ranks, written as the recorder does."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.recording.chapter import About, Bucket, Chapter, Plan
from paceline.recording.rows import BucketColumn, Column, Kind, sums_of, width

MS = 1_000_000
MIB = 1 << 20


@dataclass(frozen=True)
class Slow:
    """A rank that needs longer for something, from some step on."""

    rank: int
    ms: float
    since: int = 0
    until: int = 1 << 60
    part: str = "backward"


@dataclass(frozen=True)
class Run:
    """What to make up; times in milliseconds."""

    ranks: int = 4
    steps: int = 40
    buckets: int = 4
    parameters: int = 16
    bucket_bytes: int = 4 * MIB
    forward: float = 8.0
    buffers: float = 0.0
    backward: float = 20.0
    optimizer: float = 3.0
    data: float = 2.0
    transfer: float = 2.0
    jitter: float = 0.0
    count: int = 32
    slow: Sequence[Slow] = ()
    # By rank: which host, and what its monotonic clock is ahead.
    hosts: Sequence[int] = ()
    skews: Sequence[int] = (0,)
    drift: float = 0.0
    kinds: Mapping[tuple[int, int], Kind] = field(default_factory=dict)
    module: str = "Net"
    names: Sequence[str] = ()
    wrapper: int = 0
    group: Sequence[int] = ()
    transport: str = "shared memory"
    exchange: str = "average"
    # The bucket that is full only when backward ends, though later ones are full before.
    stuck: int | None = None
    seed: int = 0

    @property
    def slots(self) -> list[str]:
        return [*self.names, *(f"layers.{index}.weight" for index in range(len(self.names), self.parameters))]


def write(run: Run, folder: Path) -> Path:
    """A teaching step with one bucket, and the others with the plan."""
    ranks = list(run.group) or list(range(run.ranks))
    per = -(-run.parameters // run.buckets)
    # Gradients come from the last layer to the first.
    slots = list(reversed(range(run.parameters)))
    parts = [slots[start : start + per] for start in range(0, run.parameters, per)]
    plans = [
        Plan([Bucket(slots, run.bucket_bytes * len(parts))], run.exchange),
        Plan([Bucket(part, run.bucket_bytes) for part in parts], run.exchange),
    ]
    chapters = [
        [
            Chapter(_about(run, rank, ranks), plan, number, unit="samples", folder=folder)
            for number, plan in enumerate(plans)
        ]
        for rank in ranks
    ]
    simulation = _Simulation(run, ranks, plans)
    for step in range(run.steps):
        rows, begins = simulation.step(step)
        for own, row, begin in zip(chapters, rows, begins, strict=True):
            launches = [each for each in row[len(Column) + BucketColumn.LAUNCH :: len(BucketColumn)] if each]
            communication = max(0, row[Column.LANDED] - min(launches)) if launches else 0
            own[min(step, 1)].ring.append(row, sums_of(row, next_begin=begin, communication=communication))
    if run.hosts:
        _move(run, ranks, folder)
    return folder


def _about(run: Run, rank: int, group: Sequence[int]) -> About:
    return About(
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
    """Say that ranks were on other hosts; their wall clocks are wrong by a few milliseconds."""
    for place, rank in enumerate(ranks):
        for path in folder.glob(f"rank{rank}-wrapper{run.wrapper}-*.json"):
            about = json.loads(path.read_text())
            host = run.hosts[place]
            about |= {"host": f"node-{host}", "boot": f"boot-{host}"}
            about["epoch"] += -run.skews[host] + 3 * MS * host
            path.write_text(json.dumps(about))


class _Simulation:
    """The true times of all ranks; rows have them as each host's clock shows them."""

    def __init__(self, run: Run, ranks: Sequence[int], plans: Sequence[Plan]) -> None:
        self._run = run
        self._ranks = ranks
        self._plans = plans
        self._random = random.Random(run.seed)
        self._now = [1_000_000 * MS + place * 10_000 for place in range(len(ranks))]

    def step(self, step: int) -> tuple[list[list[int]], list[int]]:
        """Each rank's row, and when its next step begins."""
        plan = self._plans[min(step, 1)]
        rows = [self._compute(step, place, plan) for place in range(len(self._ranks))]
        self._communicate(rows, plan)
        for place, row in enumerate(rows):
            row[Column.END] = row[Column.LANDED] + MS // 5
            row[Column.OPTIMIZER_START] = row[Column.END] + MS // 10
            row[Column.OPTIMIZER_END] = row[Column.OPTIMIZER_START] + self._time("optimizer", step, place)
            self._now[place] = row[Column.OPTIMIZER_END] + self._time("data", step, place)
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

    def _compute(self, step: int, place: int, plan: Plan) -> list[int]:
        run, now = self._run, self._now[place]
        row = [0] * width(len(plan.buckets))
        row[Column.STEP], row[Column.COUNT], row[Column.FORWARDS] = step, run.count, 1
        row[Column.KIND] = run.kinds.get((step, self._ranks[place]), Kind.ORDINARY)
        row[Column.BEGIN] = row[Column.FORWARD_START] = now
        # Nobody has the first rank's buffers before everybody has come.
        row[Column.BUFFERS_END] = max(self._now) + self._time("buffers", step, place) if run.buffers else 0
        row[Column.FORWARD_END] = max(now, row[Column.BUFFERS_END]) + self._time("forward", step, place)
        row[Column.BACKWARD_START] = start = row[Column.FORWARD_END] + MS // 2
        length = self._time("backward", step, place)
        row[Column.BACKWARD_END] = start + length
        for index, bucket in enumerate(plan.buckets):
            share = 1 if index == run.stuck else (index + 1) / len(plan.buckets)
            cells = [start + int(length * share) - 1000 * (len(plan.buckets) - index), bucket.slots[-1], 0, 0]
            row[len(Column) + index * 4 : len(Column) + index * 4 + 4] = cells
        return row

    def _communicate(self, rows: list[list[int]], plan: Plan) -> None:
        """Buckets leave in order, and are back when all ranks' have left and the link has carried them."""
        back = 0
        for index in range(len(plan.buckets)):
            ready, launch = (
                len(Column) + index * len(BucketColumn) + each
                for each in (BucketColumn.READY, BucketColumn.LAUNCH)
            )
            for row in rows:
                before = row[launch - len(BucketColumn)] if index else 0
                row[launch] = max(row[ready], before) + 10_000
            transfer = self._run.transfer * plan.buckets[index].nbytes / self._run.bucket_bytes
            if self._run.jitter:
                transfer *= 1 + self._run.jitter * self._random.random()
            back = max(back, *(row[launch] for row in rows)) + int(transfer * MS)
            for place, row in enumerate(rows):
                row[launch + 1] = back + place * 1000
        for place, row in enumerate(rows):
            row[Column.LANDED] = max(row[Column.BACKWARD_END], back + place * 1000)

    def _ahead(self, place: int, step: int) -> int:
        run = self._run
        host = run.hosts[place] if run.hosts else 0
        return run.skews[host] + int(run.drift * host * step) if run.hosts else 0

    def _skewed(self, row: list[int], place: int, step: int) -> list[int]:
        ahead = self._ahead(place, step)
        last = {len(Column) + index * 4 + BucketColumn.LAST for index in range((len(row) - len(Column)) // 4)}
        fixed = {Column.STEP, Column.KIND, Column.FORWARDS, Column.COUNT} | last
        if not ahead:
            return row
        return [each + ahead if each and index not in fixed else each for index, each in enumerate(row)]
