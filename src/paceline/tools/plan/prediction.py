"""Predicts steps for each number of hosts and each hook, and says which hook to take (pure, but for costs).

Stragglers are drawn: every rank of the cluster does a recorded step's own work. Ranks that recorded together
are drawn together, because what slows down one of them often slows down the others too.
"""

import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.tools.plan.cluster import HOOKS, Cluster
from paceline.tools.plan.recorded_steps import RankStep, RecordedSteps
from paceline.tools.plan.simulation import BucketWork, HostLink, MessageRounds, SlowestTimes, simulate_step

_DRAWS = 31
_SEED = 0
# A coarser hook is taken only if a step gets shorter by this share.
_WORTH = 0.05
# Of this many draws per recorded step, every step is among those drawn.
_DRAWS_OF_ALL = 30
# Of paceline.OuterLoop: hosts exchange their parameters once in this many steps.
OUTER_PERIOD = 64


class ExchangeCost(Protocol):
    """What an exchange costs."""

    @property
    def seconds(self) -> float:
        """Of the thread that does it."""

    @property
    def nbytes(self) -> int:
        """What is exchanged."""


class Costs(Protocol):
    """What hooks cost; see ``Calibration``."""

    def work(self, hook: str, hosts: int) -> list[BucketWork]:
        """What each bucket takes."""

    def report(self, hosts: int) -> ExchangeCost:
        """What the step report takes more than when it was recorded; its bytes.

        With the hook "none" they are in the last bucket's work.
        """

    def outer(self, hosts: int) -> ExchangeCost:
        """What an outer exchange takes; the bytes for each other host."""


@dataclass(frozen=True)
class Prediction:
    """A step on some hosts with a hook; times are milliseconds.

    Attributes:
        hosts: the number of hosts.
        hook: the hook.
        step_ms: the median step.
        low_ms: its first quartile over what was drawn.
        high_ms: its third quartile.
        own_ms: what a rank's own work takes.
        straggler_ms: how much later than that the slowest rank ends its backward.
        exposed_ms: communication, and work for it, after the slowest rank's backward or in its way.
        sent_bytes: what each host sends per step.
        hook_ms: how long a rank's thread works on summing, compressing, spreading and the report, per step.
        efficiency: the share of a step that is a rank's own work.
    """

    hosts: int
    hook: str
    step_ms: float
    low_ms: float
    high_ms: float
    own_ms: float
    straggler_ms: float
    exposed_ms: float
    sent_bytes: float
    hook_ms: float
    efficiency: float


@dataclass(frozen=True)
class HookToTake:
    """The hook to take on some hosts, and why."""

    hosts: int
    hook: str
    why: str


def predict(
    recorded: RecordedSteps, cluster: Cluster, hooks: Sequence[str], costs: Costs
) -> list[Prediction]:
    """A prediction for each number of hosts and each hook."""
    return [
        _predict_outer(recorded, cluster, hosts, costs)
        if hook == "outer"
        else _predict(recorded, cluster, hosts, hook, costs)
        for hosts in cluster.hosts
        for hook in hooks
    ]


def choose(predictions: Sequence[Prediction]) -> list[HookToTake]:
    """The hook to take for each number of hosts: the most exact of those that are about the fastest."""
    by_hosts: dict[int, list[Prediction]] = {}
    for each in predictions:
        by_hosts.setdefault(each.hosts, []).append(each)
    return [_choose(own) for own in by_hosts.values()]


def _choose(own: Sequence[Prediction]) -> HookToTake:
    best = min(own, key=lambda each: each.step_ms)
    enough = [each for each in own if each.step_ms <= best.step_ms * (1 + _WORTH)]
    taken = min(enough, key=lambda each: HOOKS.index(each.hook))
    others = [each for each in own if each is not taken]
    if not others:
        return HookToTake(taken.hosts, taken.hook, "it is the only hook of this plan")
    if taken.hosts == 1:
        why = "on one host, hooks change nothing"
    elif taken is not best:
        why = f"{best.hook} is less than {_WORTH:.0%} faster, and coarser"
    else:
        next_best = min(others, key=lambda each: each.step_ms)
        why = f"a step takes {taken.step_ms / next_best.step_ms:.0%} of the next best ({next_best.hook})"
    return HookToTake(taken.hosts, taken.hook, why)


def _predict(recorded: RecordedSteps, cluster: Cluster, hosts: int, hook: str, costs: Costs) -> Prediction:
    work = costs.work(hook, hosts)
    has_hook = hook != "none" and hosts > 1
    cost = costs.report(hosts)
    report = MessageRounds(2 * (hosts - 1), cost.nbytes / hosts) if has_hook else None
    steps, delays = [], []
    for times in draw_steps(recorded, ranks=hosts * cluster.ranks_per_host):
        link = HostLink(cluster.bytes_per_second, cluster.latency)
        steps.append(simulate_step(times, work, link, has_hook=has_hook, report=report) + cost.seconds)
        delays.append(times.backward_end)
    slowest = statistics.median(delays)
    low, middle, high = (each * 1e3 for each in statistics.quantiles(steps, n=4))
    own = recorded.own_seconds * 1e3
    return Prediction(
        hosts=hosts,
        hook=hook,
        step_ms=middle,
        low_ms=low,
        high_ms=high,
        own_ms=own,
        straggler_ms=max(0.0, slowest * 1e3 - own),
        exposed_ms=max(0.0, middle - slowest * 1e3),
        sent_bytes=sum(bucket.sent for bucket in work) + (0.0 if report is None else report.sent),
        hook_ms=1e3 * (sum(map(_thread_seconds, work)) + cost.seconds),
        efficiency=min(1.0, own / middle),
    )


def _predict_outer(recorded: RecordedSteps, cluster: Cluster, hosts: int, costs: Costs) -> Prediction:
    """Hosts step by themselves; the exchange adds its work where no core is free, or what it lasts longer.

    One thread of a host encodes and decodes, while the network sends: an exchange takes as long as the slower
    of the two.
    """
    alone = _predict(recorded, cluster, 1, "none", costs)
    cost = costs.outer(hosts)
    sent = cost.nbytes * (hosts - 1)
    cores = cluster.cores_per_host or cluster.ranks_per_host
    # The thread's seconds are already longer where ranks share cores.
    work = cost.seconds / OUTER_PERIOD / cluster.ranks_per_core
    busy = work / cores if cluster.ranks_per_host >= cores else 0.0
    network = sent / cluster.bytes_per_second + cluster.latency * (hosts > 1)
    least = max(network, cost.seconds) / OUTER_PERIOD
    added = max(busy * 1e3, least * 1e3 - alone.step_ms) if hosts > 1 else 0.0
    step = alone.step_ms + added
    return Prediction(
        hosts=hosts,
        hook="outer",
        step_ms=step,
        low_ms=alone.low_ms + added,
        high_ms=alone.high_ms + added,
        own_ms=alone.own_ms,
        straggler_ms=alone.straggler_ms,
        exposed_ms=alone.exposed_ms + added,
        sent_bytes=sent / OUTER_PERIOD,
        hook_ms=alone.hook_ms + (cost.seconds / OUTER_PERIOD * 1e3 if hosts > 1 else 0.0),
        efficiency=min(1.0, alone.own_ms / step),
    )


def draw_steps(recorded: RecordedSteps, *, ranks: int) -> list[SlowestTimes]:
    """The slowest of all ranks' work, in some steps; the same at each call."""
    draw = random.Random(_SEED)  # noqa: S311  # no secret
    # Whole recorded steps, and one for the ranks that are left.
    whole = (ranks - 1) // recorded.ranks
    left = ranks - whole * recorded.ranks
    if whole > _DRAWS_OF_ALL * len(recorded.steps):
        return [_slowest(itertools.chain(*recorded.steps))] * _DRAWS
    numbers = range(len(recorded.steps))
    drawn = [draw.choices(numbers, k=whole + 1) for _ in range(_DRAWS)]
    return [_slowest(_ranks_of(recorded, each, left)) for each in drawn]


def _ranks_of(recorded: RecordedSteps, drawn: Sequence[int], left: int) -> Iterator[RankStep]:
    """All ranks of the drawn steps, but of the last one only as many as are left."""
    *whole, last = drawn
    for number in {*whole}:
        yield from recorded.steps[number]
    yield from recorded.steps[last][:left]


def _slowest(ranks: Iterable[RankStep]) -> SlowestTimes:
    own = list(ranks)
    ready = [max(times) for times in zip(*(each.ready for each in own), strict=True)]
    return SlowestTimes(ready, max(each.backward_end for each in own), max(each.averaged for each in own))


def _thread_seconds(bucket: BucketWork) -> float:
    stages = sum(stage.seconds for stage in bucket.stages)
    return bucket.sum_seconds + stages + bucket.last_seconds + bucket.spread_seconds
