"""What a collective costs on gloo and on paceline, and what copying the same bytes costs.

python benchmarks/collectives.py [--collectives NAME ...] [--worlds N ...] [--sizes SIZE ...]
                                 [--sides NAME ...] [--rounds N] [--quick]
                                 [--mpi [NAME ...]] [--json FILE] [--figures FILE] [--plot FILE]

paceline.tools.bench.collective_times describes the sides, and how they are timed and checked. "gloo / shared:
20" means that gloo takes 20 times as long. A figure without a target is for information.

Each rank has one thread. Figures are seconds per call: medians and quartiles over rounds. The quartiles of a
ratio are those of the ratios of each round. With more ranks than cores, all sides wait for cores.

The machine's bandwidth is that of a copy_ of 100 MB, which is larger than the caches, by one rank while the
others sleep, and by all ranks at once. Bytes read and bytes written both count; a GB has 10^9 bytes.

With --mpi, all-reduces of Open MPI, MPICH and Intel MPI are timed too, in turns with the other sides, and CPU
times are shown. mpi_peers.py describes how, and installs them; what is not installed is left out.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from mpi_peers import MPI_LIBRARIES, installed, started, time_beside_mpi
from targets import Row, add_output_options, report, save_figures

from paceline.errors import PacelineError
from paceline.testing import RankPool
from paceline.tools.bench.collective_times import (
    COLLECTIVE_SIDES,
    COLLECTIVES,
    ITEM_BYTES,
    KB,
    MB,
    PACELINE_SIDES,
    CollectiveCase,
    SecondsBySide,
    format_size,
    sides_of,
    time_case,
)
from paceline.tools.bench.measure import machine, ratio, samples, slowest, timing
from paceline.tools.bench.plots import check_plot_file, save_plot

WORLDS = (2, 4, 8)
SIZES = (4 * KB, 64 * KB, 256 * KB, MB, 25 * MB, 100 * MB)
BANDWIDTH_BYTES = 100 * MB
# Two ranks: how many times as fast as gloo's our all-reduce should be.
TARGETS = {4 * KB: 20.0, MB: 15.0, 25 * MB: 7.0, 100 * MB: 7.0}
# The same for more ranks, at any size.
MANY_RANKS_TARGET = 4.0
# Two ranks: how many times as long as copying our all-reduce may take.
MEMCPY_TARGET = 1.5
QUICK_ROUNDS, QUICK_CALLS = 3, 2
TIMEOUT_SECONDS = 3600.0


def speed_target(case: CollectiveCase, other: str) -> float | None:
    """How many times as fast as the other side, which is gloo, a side of ours should be."""
    if case.collective != "all_reduce" or other != "gloo":
        return None
    return TARGETS.get(case.size) if case.world == 2 else MANY_RANKS_TARGET


def memcpy_target(case: CollectiveCase, side: str) -> float | None:
    """How many times as long as copying a side may take. Ordinary tensors must be copied more often."""
    return MEMCPY_TARGET if (case.collective, case.world, side) == ("all_reduce", 2, "shared") else None


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
    what = f"copy_ of {format_size(BANDWIDTH_BYTES)}, {world} ranks"
    copying = {"one rank alone": 1, "all at once": world}
    return [
        Row(what, timings, f"GB/s, {name}", 2 * BANDWIDTH_BYTES * ranks / timings[name].median / 1e9, None)
        for name, ranks in copying.items()
    ]


def cpu_rows(case: CollectiveCase, cpu: SecondsBySide) -> list[Row]:
    """CPU times of all ranks together, which have no targets."""
    timings = {side: timing(values) for side, values in cpu.items()}
    of_case = {**asdict(case), "quantity": "cpu"}
    rows = []
    for other, ours in mpi_comparisons(list(cpu)):
        value, spread = ratio(cpu[other], cpu[ours])
        rows.append(
            Row(f"CPU time of {case}", timings, f"{other} / {ours}", value, None, spread=spread, case=of_case)
        )
    return rows


def case_rows(case: CollectiveCase, seconds: SecondsBySide) -> list[Row]:
    timings = {side: timing(values) for side, values in seconds.items()}
    rows = []
    for slow, fast in (*comparisons(list(seconds)), *mpi_comparisons(list(seconds))):
        value, spread = ratio(seconds[slow], seconds[fast])
        against_memcpy = fast == "memcpy"
        target = memcpy_target(case, slow) if against_memcpy else speed_target(case, slow)
        rows.append(
            Row(
                str(case),
                timings,
                f"{slow} / {fast}",
                value,
                target,
                at_most=against_memcpy,
                spread=spread,
                case=asdict(case),
            )
        )
    return rows


def comparisons(sides: Sequence[str]) -> list[tuple[str, str]]:
    """Which ratios are shown: gloo to ours and ours to copying; without ours, gloo to copying."""
    ours = [side for side in sides if side in PACELINE_SIDES]
    pairs = [("gloo", side) for side in ours] + [(side, "memcpy") for side in ours or ["gloo"]]
    return [pair for pair in pairs if set(pair) <= set(sides)]


def mpi_comparisons(sides: Sequence[str]) -> list[tuple[str, str]]:
    """Each MPI library to each side of ours."""
    return [(mpi, ours) for mpi in MPI_LIBRARIES for ours in PACELINE_SIDES if {mpi, ours} <= set(sides)]


@dataclass(frozen=True)
class Measured:
    """What a run has measured.

    Attributes:
        rows: what is shown.
        seconds: the times of each case.
        mpi: by its side's name, the title and version of each MPI library.
    """

    rows: list[Row] = field(default_factory=list)
    seconds: dict[CollectiveCase, SecondsBySide] = field(default_factory=dict)
    mpi: dict[str, str] = field(default_factory=dict)


def measure(arguments: argparse.Namespace) -> Measured:
    measured = Measured()
    rows = measured.rows
    for world in arguments.worlds:
        with RankPool(world, timeout=TIMEOUT_SECONDS) as pool, started(arguments.mpi, world) as peers:
            measured.mpi.update({name: ranks.title for name, ranks in peers.items()})
            rows += bandwidth_rows(pool, world, arguments.rounds, QUICK_CALLS)
            for case in (
                CollectiveCase(name, world, size)
                for name in arguments.collectives
                for size in arguments.sizes
            ):
                print(f"timing {case}", file=sys.stderr)
                calls = QUICK_CALLS if arguments.quick else case.calls
                repeats = {"rounds": arguments.rounds, "calls": calls}
                if peers:
                    times = time_beside_mpi(pool, peers, case, arguments.sides, **repeats)
                    measured.seconds[case] = times.seconds
                    rows += case_rows(case, times.seconds) + cpu_rows(case, times.cpu)
                else:
                    measured.seconds[case] = time_case(pool, case, arguments.sides, **repeats)
                    rows += case_rows(case, measured.seconds[case])
    return measured


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+) ?(KB|MB)", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"a size is a number of KB or MB, such as 4KB (given: {text})")
    size = int(match[1]) * (KB if match[2].upper() == "KB" else MB)
    if size == 0:
        raise argparse.ArgumentTypeError(f"a size must be positive (given: {text})")
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
    parser.add_argument(
        "--sides", nargs="+", choices=COLLECTIVE_SIDES, default=COLLECTIVE_SIDES, help="default: all"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="turns of each side that are timed (default: 20)"
    )
    parser.add_argument(
        "--mpi",
        nargs="*",
        choices=MPI_LIBRARIES,
        metavar="NAME",
        help=f"time MPI libraries too, if they are installed (default: {', '.join(MPI_LIBRARIES)})",
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds of 2 calls, to see that all works")
    add_output_options(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the times: .svg, .png and so on")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = QUICK_ROUNDS
    arguments.sides = [side for side in COLLECTIVE_SIDES if side in arguments.sides]
    if arguments.rounds < 3:
        parser.error("quartiles need three rounds or more")
    if min(arguments.worlds) < 2:
        parser.error("a collective needs two ranks or more")
    if arguments.mpi is not None and (arguments.collectives != ["all_reduce"] or arguments.plot is not None):
        parser.error("MPI libraries are timed for all_reduce alone, and not plotted")
    arguments.mpi = [] if arguments.mpi is None else installed(arguments.mpi or [*MPI_LIBRARIES])
    compared = [comparisons(sides_of(collective, arguments.sides)) for collective in arguments.collectives]
    if not all(compared) and not mpi_comparisons([*arguments.sides, *arguments.mpi]):
        parser.error(f"these sides cannot be compared: add gloo or memcpy (sides: {arguments.sides})")
    if any(size % (world * ITEM_BYTES) for size in arguments.sizes for world in arguments.worlds):
        parser.error("a size must be whole float32 numbers for each rank")
    try:
        if arguments.plot is not None:
            check_plot_file(arguments.plot)
    except PacelineError as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    arguments = parse()
    measured = measure(arguments)
    report("Collectives of ranks of one host, one thread per rank", measured.rows, arguments.json)
    if measured.mpi:
        save_figures(arguments.figures, "collectives_mpi", measured.rows, mpi=measured.mpi)
    else:
        save_figures(arguments.figures, "collectives", measured.rows)
    if arguments.plot is not None:
        save_plot(
            arguments.plot,
            title="Time of a collective: gloo, paceline, and copying the same bytes",
            note=machine(),
            collectives=measured.seconds,
            columns=len(arguments.worlds),
        )


if __name__ == "__main__":
    main()
