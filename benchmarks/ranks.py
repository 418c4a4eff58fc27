"""What it costs to run a function on two ranks with a gloo group: fresh ranks, kept ranks, torch's own spawn.

python benchmarks/ranks.py [--json FILE] [--figures FILE]
"""

import argparse
import operator
import tempfile

import torch
import torch.distributed as dist
from targets import Row, add_output_options, report, save_figures
from torch.multiprocessing.spawn import spawn

from paceline.testing import RankPool, run_ranks
from paceline.tools.bench.measure import Timing, interleave

WORLD = 2
# Returns its own rank. It is a built-in, so that fresh ranks need not import this program.
trivial = operator.index


def fresh_ranks() -> Row:
    # The first round, which is not counted, starts the fork server.
    timings = interleave(
        {"torch.multiprocessing.spawn": spawn_ranks, "run_ranks": lambda: run_ranks(trivial, WORLD)},
        rounds=8,
    )
    return _milliseconds("two fresh ranks", timings, "run_ranks", 150.0)


def kept_ranks() -> Row:
    with RankPool(WORLD) as pool:
        timings = interleave({"RankPool.run": lambda: pool.run(trivial)}, rounds=300)
    return _milliseconds("a call on two kept ranks", timings, "RankPool.run", 10.0)


def spawn_ranks() -> None:
    with tempfile.TemporaryDirectory() as directory:
        spawn(spawned_rank, args=(f"{directory}/store",), nprocs=WORLD)


def spawned_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    trivial(rank)
    dist.destroy_process_group()


def _milliseconds(what: str, timings: dict[str, Timing], side: str, target: float) -> Row:
    return Row(what, timings, f"{side}, ms", timings[side].median * 1000, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time calls on two ranks.")
    add_output_options(parser)
    arguments = parser.parse_args()
    rows = [fresh_ranks(), kept_ranks()]
    report("Ranks", rows, arguments.json)
    save_figures(arguments.figures, "ranks", rows)


if __name__ == "__main__":
    main()
