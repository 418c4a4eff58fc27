"""What the audit of replicas costs a training step, on two ranks, with Adam.

python benchmarks/audit.py [--models NAME ...] [--rounds N] [--quick] [--json FILE]

Steps with the audit and without it take turns, and both wall time and CPU time are measured. On a noisy
machine these vary by more than the audit costs. So a third figure is the time that the audit itself took
inside those steps, by the clock that only counts what its own thread runs, divided by the median CPU time of
a step. The last rows are what hashing costs per MB, on one thread, for tensors that are in no cache.
"""

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from targets import Row, report

import paceline
from paceline.ddp.audit.hashes import hash_piece
from paceline.ddp.audit.rotation import PARTS
from paceline.testing import run_ranks
from paceline.tools.bench.measure import ratio, slowest, timing
from paceline.tools.bench.models import LEARNING_RATE, MODELS

WORLD = 2
TIMEOUT_SECONDS = 3600.0
TARGET = 0.01
SIDES = {"audited": "warn", "not audited": "off"}
FIVE = ("tiny-layers", "transformer", "mlp", "conv", "parameters-5000")
MIB = 2**20
HASHED_MIB = 256


class Stopwatch:
    """Adds up the CPU time of calls in this thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, method: str) -> None:
        """Time each call of an object's method from now on."""
        call = getattr(owner, method)

        @functools.wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.thread_time() - start

        setattr(owner, method, timed)


def make_step(
    name: str, rank: int, audit: str
) -> tuple[Callable[[], None], paceline.DistributedDataParallel]:
    """A training step of a model with Adam."""
    training = MODELS[name].make(rank)
    ddp = paceline.DistributedDataParallel(training.module, audit=audit)  # type: ignore[arg-type]
    training = replace(training, module=ddp)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=LEARNING_RATE, foreach=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        training.forward().backward()
        optimizer.step()

    return step, ddp


def measure_on_rank(rank: int, name: str, rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per step of each side, by the wall and of CPU, and those of the audit alone; one per round."""
    made = {side: make_step(name, rank, audit) for side, audit in SIDES.items()}
    watch = Stopwatch()
    audit = made["audited"][1]._reducer.context.audit
    assert audit is not None
    for owner, method in ((audit, "digest"), (audit, "compare"), (audit.watch, "end")):
        watch.watch(owner, method)
    found: dict[str, list[float]] = {f"{side}{what}": [] for side in SIDES for what in ("", ", CPU")}
    found["the audit alone"] = []
    for number in range(-PARTS, rounds):  # the first look at a tensor costs more, so each is looked at before
        # Each side is first in every second round.
        for side in sorted(SIDES, reverse=number % 2 == 0):
            wall, cpu = _time(
                made[side][0], calls, watch if side == "audited" else Stopwatch(), found, number
            )
            if number >= 0:
                found[side].append(wall)
                found[f"{side}, CPU"].append(cpu)
    del made, audit
    gc.collect()
    return found


def _time(
    step: Callable[[], None], calls: int, watch: Stopwatch, found: dict[str, list[float]], number: int
) -> tuple[float, float]:
    dist.barrier()
    watch.seconds = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        step()
    spent = (time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls
    if watch.seconds and number >= 0:
        found["the audit alone"].append(watch.seconds / calls)
    return spent


def rows(name: str, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    what = f"step of {MODELS[name].what}, with Adam"
    timings = {side: timing(values) for side, values in seconds.items()}
    found = []
    for kind, label in (("", "wall time"), (", CPU", "CPU time")):
        value, (low, high) = ratio(seconds[f"audited{kind}"], seconds[f"not audited{kind}"])
        figure = f"audited / not, less 1, {label}"
        found.append(Row(what, timings, figure, value - 1, None, spread=(low - 1, high - 1)))
    # The mean, because the steps of a round cost more or less: a small model has nothing to do in some.
    alone = statistics.fmean(seconds["the audit alone"]) / timings["not audited, CPU"].median
    return [*found, Row(what, timings, "the audit's own CPU time / step", alone, TARGET)]


def hashing_rows(rounds: int) -> list[Row]:
    """What it costs to hash a MiB: of a large tensor, and of many small ones."""
    torch.set_num_threads(1)
    large = torch.randn(HASHED_MIB * MIB // 4)
    seconds = []
    for number in range(rounds + 1):
        start = time.thread_time()
        hash_piece(large, 0, large.nbytes)
        if number:
            seconds.append((time.thread_time() - start) / HASHED_MIB)
    return [
        Row(
            "hashing 1 MiB of a large tensor, on one thread",
            {"CPU": timing(seconds)},
            "GB/s",
            MIB / statistics.median(seconds) / 1e9,
            None,
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the audit of replicas.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=FIVE, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=4 * PARTS)
    parser.add_argument("--quick", action="store_true", help="one look at everything, to see that all works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    found: list[Row] = []
    for name in arguments.models:
        print(f"timing {MODELS[name].what}", file=sys.stderr)
        rounds, calls = (PARTS, 1) if arguments.quick else (arguments.rounds, MODELS[name].steps)
        ranks = run_ranks(measure_on_rank, WORLD, args=(name, rounds, calls), timeout=TIMEOUT_SECONDS)
        found += rows(name, slowest(ranks))
    found += hashing_rows(4 if arguments.quick else 20)
    report(f"What the audit of replicas costs, {WORLD} ranks of one thread each", found, arguments.json)


if __name__ == "__main__":
    main()
