"""What ranks measure together: how far the hosts' clocks are apart, and how fast pairs of ranks are.

Note [Clock bounds]: each rank reads its clock before an all-gather and again after it. Whatever the network
did meanwhile, every rank's first reading was before every other rank's second reading. That bounds the
difference of two clocks from both sides; what lies between the bounds is all that is unknown.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.comm.rendezvous import pair_group
from paceline.tools.doctor.findings import Finding, fault, notice, ok
from paceline.tools.formatting import plain_number, plural

CLOCKS_CHECK, SPEED_CHECK = "clocks", "speed"
CLOCK_ROUNDS = 8
# With more seconds between clocks, the logs of hosts cannot be read side by side;
NOTABLE_OFFSET = 0.05
# with more than this, certificates, caches and timeouts go wrong.
WRONG_OFFSET = 1.0

GLOO, SHARED = "gloo", "shared memory"
# Up to this many ranks every pair is measured, which takes tens of milliseconds per pair.
MOST_FOR_ALL_PAIRS = 8
REPEATS = 20
SIZES = (2**18, 2**20, 2**22)
# Sizes grow while one all-reduce takes less than this, so that a slow link is not kept busy for long.
LONG_SECONDS = 0.05
# A pair with less than this part of the usual bandwidth is reported.
SLOW_PART = 1 / 4

# One rank's clock readings, in seconds: before and after each all-gather.
ClockReadings = Sequence[tuple[float, float]]
# One pair's speed by one transport.
PairSpeed = Mapping[str, Any]


@dataclass(frozen=True)
class OffsetBounds:
    """By how many seconds one clock is ahead of another, at least and at most. See Note [Clock bounds]."""

    least: float
    most: float

    @property
    def certain(self) -> float:
        """How far the clocks are apart at least."""
        return max(self.least, -self.most, 0.0)

    @property
    def possible(self) -> float:
        """How far the clocks are apart at most."""
        return max(abs(self.least), abs(self.most))


def read_clocks(group: Group, *, clock: Callable[[], float] = time.time) -> list[tuple[float, float]]:
    """Read this rank's clock around some all-gathers, which every rank makes at the same time."""
    group.gather_objects(None)
    return [_read_around_gather(group, clock) for _ in range(CLOCK_ROUNDS)]


def _read_around_gather(group: Group, clock: Callable[[], float]) -> tuple[float, float]:
    before = clock()
    group.gather_objects(None)
    return before, clock()


def offset_bounds(own: ClockReadings, theirs: ClockReadings) -> OffsetBounds:
    """By how much the first clock is ahead of the second."""
    rounds = list(zip(own, theirs, strict=True))
    least = max(own_before - their_after for (own_before, _), (_, their_after) in rounds)
    most = min(own_after - their_before for (_, own_after), (their_before, _) in rounds)
    return OffsetBounds(least, most)


def judge_clocks(readings: Sequence[ClockReadings | None], hosts: Sequence[str]) -> list[Finding]:
    """Whether the hosts' clocks agree, by the first rank of each host."""
    first = {host: rank for rank, host in reversed(list(enumerate(hosts))) if readings[rank] is not None}
    pairs = [
        (a, b, offset_bounds(readings[first[a]] or (), readings[first[b]] or ()))
        for a, b in itertools.combinations(sorted(first, key=first.__getitem__), 2)
    ]
    if not pairs:
        return []
    a, b, worst = max(pairs, key=lambda pair: pair[2].certain)
    data = {"hosts": [a, b], "least": worst.least, "most": worst.most}
    offset = f"{b} is {'behind' if worst.least > 0 else 'ahead of'} {a} by at least {worst.certain:.3f} s"
    fix = f"sudo timedatectl set-ntp true || sudo chronyc makestep    # on {a} and {b}"
    if worst.certain > WRONG_OFFSET:
        return [fault(CLOCKS_CHECK, f"clocks differ ({offset})", fix, **data)]
    if worst.certain > NOTABLE_OFFSET:
        return [notice(CLOCKS_CHECK, f"clocks differ a little ({offset})", fix, **data)]
    within = max(pair[2].possible for pair in pairs)
    return [ok(CLOCKS_CHECK, f"clocks agree within {1000 * within:.1f} ms", within=within)]


def pairs_to_measure(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """All pairs; of many ranks each with its successor, and the first ranks of hosts with each other."""
    ranks = range(len(hosts))
    if len(hosts) <= MOST_FOR_ALL_PAIRS:
        return list(itertools.combinations(ranks, 2))
    first = sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    return sorted({*itertools.pairwise(ranks), *itertools.combinations(first[:MOST_FOR_ALL_PAIRS], 2)})


def measure_pairs(rank: int, hosts: Sequence[str], *, seconds: float) -> list[PairSpeed]:
    """Measure pair after pair, on every rank at the same time; the lower rank of a pair has its result.

    Args:
        rank: this rank.
        hosts: by rank, an id that ranks have in common if they share memory.
        seconds: how long ranks wait for each other.
    """
    measured: list[PairSpeed] = []
    for pair in pairs_to_measure(hosts):
        with pair_group(pair, seconds=seconds) as group:
            if group is not None:
                speeds = _measure_pair(group, share_memory=hosts[pair[0]] == hosts[pair[1]])
                measured += [{"ranks": list(pair), **speed} for speed in speeds if rank == pair[0]]
    return measured


def _measure_pair(group: Group, *, share_memory: bool) -> list[PairSpeed]:
    speeds: list[PairSpeed] = [{"transport": GLOO, **_all_reduce_speed(group)}]
    if share_memory:
        group.share_memory(nbytes=2 * SIZES[-1])
        if group.shared is not None:
            speeds.append({"transport": SHARED, **_all_reduce_speed(group)})
    return speeds


def _all_reduce_speed(group: Group) -> PairSpeed:
    small = group.empty(1, dtype=torch.float64, device=torch.device("cpu")).zero_()
    _all_reduce_seconds(group, small)
    latency = statistics.median(_all_reduce_seconds(group, small) for _ in range(REPEATS))
    for size in SIZES:
        large = group.empty(size // 4, dtype=torch.float32, device=torch.device("cpu")).zero_()
        _all_reduce_seconds(group, large)
        took = min(_all_reduce_seconds(group, large) for _ in range(3))
        # Both ranks must stop at the same size, though they measure different times.
        if max(group.gather_objects(took)) > LONG_SECONDS:
            break
    return {"latency_us": round(1e6 * latency, 1), "mb_per_s": round(size / took / 1e6, 1), "bytes": size}


def _all_reduce_seconds(group: Group, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    # The group's timeout is the deadline.
    group.all_reduce(tensor).wait(lambda: None)
    return time.perf_counter() - began


def judge_pairs(measured: Sequence[PairSpeed], hosts: Sequence[str]) -> list[Finding]:
    """The speed of each transport, and pairs that are much slower than others of the same kind."""
    kinds: dict[str, list[PairSpeed]] = {}
    for pair in measured:
        a, b = pair["ranks"]
        where = "inside hosts" if hosts[a] == hosts[b] else "between hosts"
        kinds.setdefault(f"{pair['transport']} {where}", []).append(pair)
    return [finding for kind, pairs in kinds.items() for finding in _judge_kind(kind, pairs)]


def _judge_kind(kind: str, pairs: Sequence[PairSpeed]) -> list[Finding]:
    latencies = _range([pair["latency_us"] for pair in pairs])
    speeds = _range([pair["mb_per_s"] for pair in pairs])
    measured = plural(len(pairs), "pair")
    summary = f"{kind}: {latencies} us, {speeds} MB/s (all-reduce of two ranks, {measured})"
    findings = [ok(SPEED_CHECK, summary, kind=kind, pairs=list(pairs))]
    usual = statistics.median(pair["mb_per_s"] for pair in pairs)
    for pair in pairs:
        if pair["mb_per_s"] < SLOW_PART * usual:
            a, b = pair["ranks"]
            speed = f"{plain_number(pair['mb_per_s'])} MB/s; others: {plain_number(usual)} MB/s"
            found = f"ranks {a} and {b} are slow by {kind} ({speed})"
            findings.append(notice(SPEED_CHECK, found, pair=dict(pair)))
    return findings


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return plain_number(low) if low == high else f"{plain_number(low)} to {plain_number(high)}"
