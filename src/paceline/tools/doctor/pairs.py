"""Latency and bandwidth between two ranks, by transport: how long an all-reduce of the two takes."""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.comm.rendezvous import pair_group
from paceline.tools.doctor.finding import Finding, notice, ok

CHECK = "speed"
GLOO, SHARED = "gloo", "shared memory"
# Up to so many ranks every pair is measured, which takes tens of milliseconds each.
MOST_FOR_ALL = 8
REPEATS = 20
SIZES = (2**18, 2**20, 2**22)
# Sizes go up while one all-reduce takes less than this, so that a slow link is not kept busy for long.
LONG_SECONDS = 0.05
# A pair that has less than this part of what its like have is told of.
SLOW_PART = 1 / 4

Measured = Mapping[str, Any]


def chosen(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs to measure: all; of many ranks each with its successor, and first ranks of hosts."""
    ranks = range(len(hosts))
    if len(hosts) <= MOST_FOR_ALL:
        return list(itertools.combinations(ranks, 2))
    first = sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    return sorted({*itertools.pairwise(ranks), *itertools.combinations(first[:MOST_FOR_ALL], 2)})


def measure(rank: int, hosts: Sequence[str], *, seconds: float) -> list[Measured]:
    """Measure the chosen pairs one after another, on every rank at once; what the lower rank of each saw.

    Args:
        rank: this rank.
        hosts: what ranks that share memory have in common, by rank.
        seconds: so long ranks wait for each other.
    """
    seen: list[Measured] = []
    for pair in chosen(hosts):
        with pair_group(pair, seconds=seconds) as group:
            if group is not None:
                found = _measure(group, is_near=hosts[pair[0]] == hosts[pair[1]])
                seen += [{"ranks": list(pair), **each} for each in found if rank == pair[0]]
    return seen


def _measure(group: Group, *, is_near: bool) -> list[Measured]:
    found: list[Measured] = [{"transport": GLOO, **_speed(group)}]
    if is_near:
        group.share_memory(nbytes=2 * SIZES[-1])
        if group.shared is not None:
            found.append({"transport": SHARED, **_speed(group)})
    return found


def _speed(group: Group) -> Measured:
    small = group.empty(1, dtype=torch.float64, device=torch.device("cpu")).zero_()
    _seconds(group, small)
    latency = statistics.median(_seconds(group, small) for _ in range(REPEATS))
    for size in SIZES:
        large = group.empty(size // 4, dtype=torch.float32, device=torch.device("cpu")).zero_()
        _seconds(group, large)
        took = min(_seconds(group, large) for _ in range(3))
        # Both must stop at the same size, and they measure different times.
        if _slower(group, took) > LONG_SECONDS:
            break
    return {"latency_us": round(1e6 * latency, 1), "mb_per_s": round(size / took / 1e6, 1), "bytes": size}


def _seconds(group: Group, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    group.all_reduce(tensor).wait(_go_on_waiting)
    return time.perf_counter() - began


def _go_on_waiting() -> None:
    """The group's timeout is the deadline."""


def _slower(group: Group, took: float) -> float:
    both: list[float] = group.gather_objects(took)
    return max(both)


def judge(measured: Sequence[Measured], hosts: Sequence[str]) -> list[Finding]:
    """Tell each transport's speed, and pairs that are much slower than their like."""
    kinds: dict[str, list[Measured]] = {}
    for each in measured:
        a, b = each["ranks"]
        where = "inside hosts" if hosts[a] == hosts[b] else "between hosts"
        kinds.setdefault(f"{each['transport']} {where}", []).append(each)
    return [finding for kind, alike in kinds.items() for finding in _judge(kind, alike)]


def _judge(kind: str, alike: Sequence[Measured]) -> list[Finding]:
    usual = statistics.median(each["mb_per_s"] for each in alike)
    latencies = [each["latency_us"] for each in alike]
    speeds = [each["mb_per_s"] for each in alike]
    words = (
        f"{kind}: {_span(latencies)} us, {_span(speeds)} MB/s (all-reduces of two ranks, {len(alike)} pairs)"
    )
    found = [ok(CHECK, words, kind=kind, pairs=list(alike))]
    slow = [each for each in alike if each["mb_per_s"] < SLOW_PART * usual]
    for each in slow:
        a, b = each["ranks"]
        words = f"ranks {a} and {b} are slow by {kind} ({each['mb_per_s']} MB/s; others: {usual} MB/s)"
        found.append(notice(CHECK, words, pair=dict(each)))
    return found


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
