"""What a collective costs on gloo and on paceline, and what copying the same bytes costs.

python benchmarks/collectives.py [--collectives NAME ...] [--worlds N ...] [--sizes SIZE ...]
                                 [--sides NAME ...] [--rounds N] [--quick] [--json FILE] [--plot FILE]

The sides, and how they are timed and checked, are told in paceline.tools.bench.collectives. "gloo / shared:
20" says that gloo takes 20 times as long. A target is for the sizes and worlds that it names; a
figure without one is for information.

Each rank has one thread. Figures are seconds a call: medians and quartiles over rounds; those of a ratio are
of the rounds' ratios. With more ranks than cores, all sides wait for cores.

The machine's bandwidth is that of a copy_ of 100 MB, larger than caches are, by one rank while the others
sleep and by all at once; bytes read and bytes written both count, 10^9 of them a GB.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from aims import Row, report

from paceline.testing import RankPool
from paceline.tools.bench import svg
from paceline.tools.bench.collectives import (
    COLLECTIVES,
    ITEM_BYTES,
    KB,
    MB,
    OURS,
    SIDES,
    Case,
    Seconds,
    shown_size,
    sides_of,
    time_case,
)
from paceline.tools.bench.drawing import of_collectives
from paceline.tools.bench.measure import machine, ratio, samples, slowest, timing

WORLDS = (2, 4, 8)
SIZES = (4 * KB, 64 * KB, 256 * KB, MB, 25 * MB, 100 * MB)
BANDWIDTH_BYTES = 100 * MB
# gloo's time in ours, of an all-reduce of two ranks.
TARGETS = {4 * KB: 20.0, MB: 15.0, 25 * MB: 7.0, 100 * MB: 7.0}
# The same for more ranks, of any size.
CROWDED_TARGET = 4.0
# Our time in that of copying, of an all-reduce of two ranks.
FLOOR_TARGET = 1.5
QUICK_ROUNDS, QUICK_CALLS = 3, 2
TIMEOUT_SECONDS = 3600.0


def speed_target(case: Case) -> float | None:
    """How often our time goes into gloo's."""
    if case.collective != "all_reduce":
        return None
    return TARGETS.get(case.size) if case.world == 2 else CROWDED_TARGET


def floor_target(case: Case, side: str) -> float | None:
    """A side's time in that of copying. Ordinary tensors have to be copied more often than that."""
    return FLOOR_TARGET if (case.collective, case.world, side) == ("all_reduce", 2, "shared") else None


def bandwidth_on_rank(rank: int, rounds: int, calls: int) -> dict[str, list[float]]:
    to, data = torch.empty(BANDWIDTH_BYTES // ITEM_BYTES).zero_(), torch.ones(BANDWIDTH_BYTES // ITEM_BYTES)
    turns = {
        "one rank alone": lambda: to.copy_(data) if rank == 0 else None,
        "all at once": lambda: to.copy_(data),
    }
    return samples(turns, rounds=rounds, calls=calls, before=dist.barrier)


def bandwidth_rows(pool: RankPool, world: int, rounds: int, calls: int) -> list[Row]:
    seconds = slowest(pool.run(bandwidth_on_rank, rounds, calls))
    timings = {name: timing(values) for name, values in seconds.items()}
    what = f"copy_ of {shown_size(BANDWIDTH_BYTES)}, {world} ranks"
    copying = {"one rank alone": 1, "all at once": world}
    return [
        Row(what, timings, f"GB/s, {name}", 2 * BANDWIDTH_BYTES * ranks / timings[name].median / 1e9, None)
        for name, ranks in copying.items()
    ]


def case_rows(case: Case, seconds: Seconds) -> list[Row]:
    timings = {side: timing(values) for side, values in seconds.items()}
    rows = []
    for slow, fast in comparisons(list(seconds)):
        value, spread = ratio(seconds[slow], seconds[fast])
        against_floor = fast == "floor"
        target = floor_target(case, slow) if against_floor else speed_target(case)
        rows.append(
            Row(str(case), timings, f"{slow} / {fast}", value, target, at_most=against_floor, spread=spread)
        )
    return rows


def comparisons(sides: Sequence[str]) -> list[tuple[str, str]]:
    """Which sides are put in relation: gloo to ours and ours to copying; without ours, gloo to copying."""
    ours = [side for side in sides if side in OURS]
    pairs = [("gloo", side) for side in ours] + [(side, "floor") for side in ours or ["gloo"]]
    return [pair for pair in pairs if set(pair) <= set(sides)]


def measure(arguments: argparse.Namespace) -> tuple[list[Row], dict[Case, Seconds]]:
    rows: list[Row] = []
    measured: dict[Case, Seconds] = {}
    for world in arguments.worlds:
        with RankPool(world, timeout=TIMEOUT_SECONDS) as pool:
            rows += bandwidth_rows(pool, world, arguments.rounds, QUICK_CALLS)
            for case in (
                Case(name, world, size) for name in arguments.collectives for size in arguments.sizes
            ):
                print(f"timing {case}", file=sys.stderr)
                calls = QUICK_CALLS if arguments.quick else case.calls
                measured[case] = time_case(pool, case, arguments.sides, rounds=arguments.rounds, calls=calls)
                rows += case_rows(case, measured[case])
    return rows, measured


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+) ?(KB|MB)", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"a size is a number of KB or MB, such as 4KB (given: {text})")
    size = int(match[1]) * (KB if match[2].upper() == "KB" else MB)
    if size == 0:
        raise argparse.ArgumentTypeError("nothing is to be sent")
    return size


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time collectives.")
    parser.add_argument(
        "--collectives", nargs="+", choices=COLLECTIVES, default=["all_reduce"], help="default: all_reduce"
    )
    parser.add_argument(
        "--worlds", nargs="+", type=int, default=WORLDS, metavar="N", help=f"default: {WORLDS}"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=parse_size,
        default=SIZES,
        metavar="SIZE",
        help="such as 4KB; default: to 100MB",
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="default: all")
    parser.add_argument(
        "--rounds", type=int, default=20, help="turns of each side that are timed (default: 20)"
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds of 2 calls, to see that all works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the times here, as SVG")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = QUICK_ROUNDS
    arguments.sides = [side for side in SIDES if side in arguments.sides]
    if arguments.rounds < 3:
        parser.error("quartiles need three rounds or more")
    if min(arguments.worlds) < 2:
        parser.error("a collective needs two ranks or more")
    if not all(comparisons(sides_of(collective, arguments.sides)) for collective in arguments.collectives):
        parser.error(f"these sides cannot be compared: add gloo or floor (sides: {arguments.sides})")
    if any(size % (world * ITEM_BYTES) for size in arguments.sizes for world in arguments.worlds):
        parser.error("a size must be whole float32 numbers for each rank")
    return arguments


def main() -> None:
    arguments = parse()
    rows, measured = measure(arguments)
    report("Collectives of ranks of one host, of one thread each", rows, arguments.json)
    if arguments.plot is not None:
        svg.write(
            arguments.plot,
            [of_collectives(measured, columns=len(arguments.worlds))],
            title="Time of a collective: gloo, paceline, and copying the same bytes",
            note=f"medians; {machine()}",
        )


if __name__ == "__main__":
    main()
