"""What steps in shards cost, on two ranks, beside the same steps without shards.

python benchmarks/shards.py [--models NAME ...] [--rounds N] [--quick] [--json FILE] [--figures FILE]

"one shard per rank" is ``DistributedDataParallel(net, shards=2)`` beside the plain wrapper. "four shards per
rank" is ``shards=8`` beside four backward passes per step, three of them under ``no_sync``. Both sides take
turns; wall time and CPU time are those of the slower rank. Memory is what a rank holds in gradients and sums
of shards at the end of its last forward, in copies of all parameters.
"""

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from targets import Row, add_output_options, report, save_figures

import paceline
from paceline.testing import run_ranks
from paceline.tools.bench.measure import ratio, slowest, timing
from paceline.tools.bench.models import LEARNING_RATE, MODELS

WORLD = 2
ROUNDS = 30
TIMEOUT_SECONDS = 3600.0
FIVE = ("tiny-layers", "parameters-5000", "transformer", "mlp", "conv")
# By the number of passes per rank: how much longer a step may take.
TARGETS = {1: 1.02, 4: 1.05}
NAMES = {1: "one shard per rank", 4: "four shards per rank"}


def passes(ddp: paceline.DistributedDataParallel, count: int, *, in_shards: bool) -> Iterator[None]:
    """The passes of one step."""
    if in_shards:
        for _ in ddp.shards(torch.zeros(count)):
            yield
        return
    with ddp.no_sync():
        for _ in range(count - 1):
            yield
    yield


def make_step(
    name: str, rank: int, count: int, *, in_shards: bool
) -> tuple[Callable[[], None], Callable[[], int]]:
    """A training step of a model, and what its rank holds in sums of shards and gradients, in bytes."""
    training = MODELS[name].make(rank)
    shards = WORLD * count if in_shards else None
    ddp = paceline.DistributedDataParallel(training.module, shards=shards)
    training = replace(training, module=ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE, foreach=True)
    held = 0

    def step() -> None:
        nonlocal held
        optimizer.zero_grad(set_to_none=True)
        for _ in passes(ddp, count, in_shards=in_shards):
            loss = training.forward()
            held = _held(ddp)
            loss.backward()
        optimizer.step()

    return step, lambda: held


def _held(ddp: Any) -> int:
    sums = ddp._reducer.context.shard_sums
    kept = [each for _, gradients in (sums._nodes if sums is not None else ()) for each in gradients]
    kept += [parameter.grad for parameter in ddp.parameters()]
    return sum(each.nbytes for each in kept if each is not None)


def measure_on_rank(rank: int, name: str, count: int, rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per step of each side, by the wall and of CPU; one per round."""
    warnings.simplefilter("ignore")
    sides = {"shards": True, "without": False}
    made = {side: make_step(name, rank, count, in_shards=in_shards) for side, in_shards in sides.items()}
    found: dict[str, list[float]] = {f"{side}{what}": [] for side in sides for what in ("", ", CPU")}
    for number in range(-3, rounds):
        for side in sorted(sides, reverse=number % 2 == 0):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                made[side][0]()
            if number >= 0:
                found[side].append((time.perf_counter() - wall) / calls)
                found[f"{side}, CPU"].append((time.process_time() - cpu) / calls)
    copies = sum(parameter.nbytes for parameter in MODELS[name].make(rank).module.parameters())
    for side in sides:
        found[f"{side}, memory"] = [made[side][1]() / copies]
    del made
    gc.collect()
    return found


def rows(name: str, count: int, found: Mapping[str, Sequence[float]]) -> list[Row]:
    what = f"step of {MODELS[name].what}, {NAMES[count]}"
    timings = {side: timing(found[side]) for side in found if not side.endswith("memory")}
    wall, spread = ratio(found["shards"], found["without"])
    cpu, cpu_spread = ratio(found["shards, CPU"], found["without, CPU"])
    held = "gradients held before the last backward, in copies of all parameters"
    return [
        Row(what, timings, "with shards / without, wall time", wall, TARGETS[count], spread=spread),
        Row(what, timings, "with shards / without, CPU time", cpu, None, spread=cpu_spread),
        Row(what, timings, f"{held}, with shards", found["shards, memory"][0], None),
        Row(what, timings, f"{held}, without", found["without, memory"][0], None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time steps in shards.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=FIVE, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one step per side, to see that all works")
    add_output_options(parser)
    arguments = parser.parse_args()
    found: list[Row] = []
    for name in arguments.models:
        for count in TARGETS:
            print(f"timing {MODELS[name].what}, {NAMES[count]}", file=sys.stderr)
            rounds, calls = (
                (2, 1) if arguments.quick else (arguments.rounds, max(1, MODELS[name].steps // count))
            )
            arguments_of_rank = (name, count, rounds, calls)
            ranks = run_ranks(measure_on_rank, WORLD, args=arguments_of_rank, timeout=TIMEOUT_SECONDS)
            found += rows(name, count, slowest(ranks))
    report(f"What shards cost, {WORLD} ranks of one thread each", found, arguments.json)
    save_figures(arguments.figures, "shards", found)


if __name__ == "__main__":
    main()
