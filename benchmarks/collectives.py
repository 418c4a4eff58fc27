"""What a collective costs on gloo and on paceline, and what copying the same bytes costs.

python benchmarks/collectives.py [--collectives NAME ...] [--worlds N ...] [--sizes SIZE ...]
                                 [--sides NAME ...] [--rounds N] [--quick] [--json FILE] [--plot FILE]

The sides, which take turns on the same ranks in one run:
  gloo     torch.distributed on a gloo group
  backend  torch.distributed on a group of the backend "paceline", with ordinary tensors
  shared   paceline's own all-reduce, of tensors that live in shared memory, as DistributedDataParallel's
           buckets do; there is none for the other collectives
  floor    copy_ between two tensors of a rank's own, on all ranks at once, of as many bytes as a rank has to
           read and write at least: for an all-reduce of N bytes it reads N (its slice of every rank's tensor)
           and writes N (the result, in place of those)
"gloo / shared: 20" says that gloo takes 20 times as long. A target is the issue's, for the sizes and worlds
that it names; a figure without one is for information.

A size is what one rank holds of the larger of a collective's two tensors, of float32; a KB has 1,024 bytes.
Each rank has one thread. A turn is many calls in a row, fewer of larger tensors; the ranks meet before it, by
a call that is not timed, and it is over when the slowest rank is done. Figures are seconds a call: medians
and quartiles over rounds; those of a ratio are of the rounds' ratios. With more ranks than cores, all sides
wait for cores.

The machine's bandwidth is that of a copy_ of 100 MB, larger than caches are, by one rank while the others
sleep and by all at once; bytes read and bytes written both count, 10^9 of them a GB.

Results are checked before and after a case is timed: equal to those of the first side to rounding, and
paceline's equal on all ranks, and before and after, to the bit.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plot
import torch
import torch.distributed as dist
from measure import Row, machine, ratio, report, samples, slowest, timing
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.pending import WorkPending
from paceline.testing import RankPool

SIDES = ("gloo", "backend", "shared", "floor")
OURS = ("backend", "shared")
WORLDS = (2, 4, 8)
KB, MB = 1024, 1024**2
SIZES = (4 * KB, 64 * KB, 256 * KB, MB, 25 * MB, 100 * MB)
BANDWIDTH_BYTES = 100 * MB
ITEM_BYTES = 4
# gloo's time in ours, of an all-reduce of two ranks.
TARGETS = {4 * KB: 20.0, MB: 15.0, 25 * MB: 7.0, 100 * MB: 7.0}
# The same for more ranks, of any size.
CROWDED_TARGET = 4.0
# Our time in that of copying, of an all-reduce of two ranks.
FLOOR_TARGET = 1.5
QUICK_ROUNDS, QUICK_CALLS = 3, 2
TIMEOUT_SECONDS = 3600.0

Seconds = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Collective:
    """How torch.distributed is asked for it, with an output, an input and a group.

    ``inputs`` and ``outputs``: what part of the size the tensors have, given the world; no output where the
    input becomes it. ``alike``: whether it is the same on all ranks.
    """

    call: Callable[[Tensor, Tensor, Any], object]
    inputs: Callable[[int], int]
    outputs: Callable[[int], int] | None
    alike: bool

    def tensors(self, count: int, world: int) -> tuple[Tensor, Tensor]:
        """Its output and its input, zeros, of so many elements; they may be one."""
        # Written to, since pages that never were would all be the same one.
        data = torch.empty(count // self.inputs(world)).zero_()
        if self.outputs is None:
            return data, data
        return torch.empty(count // self.outputs(world)).zero_(), data

    def moved(self, size: int, world: int) -> int:
        """How many bytes have to be copied so that as many are read and written as each rank must."""
        read, written = size, size // (self.outputs or whole)(world)
        return (read + written) // 2


def whole(_: int) -> int:
    return 1


def one_of(world: int) -> int:
    return world


COLLECTIVES = {
    "all_reduce": Collective(
        lambda out, _, group: dist.all_reduce(out, group=group), whole, None, alike=True
    ),
    "broadcast": Collective(lambda out, _, group: dist.broadcast(out, 0, group), whole, None, alike=True),
    "all_gather": Collective(
        lambda out, data, group: dist.all_gather_single(out, data, group), one_of, whole, alike=True
    ),
    "reduce_scatter": Collective(
        lambda out, data, group: dist.reduce_scatter_single(out, data, group=group),
        whole,
        one_of,
        alike=False,
    ),
    "all_to_all": Collective(
        lambda out, data, group: dist.all_to_all_single(out, data, group=group), whole, whole, alike=False
    ),
}


@dataclass(frozen=True)
class Case:
    """What is measured at a time."""

    collective: str
    world: int
    size: int

    def __str__(self) -> str:
        return f"{self.collective} of {shown_size(self.size)}, {self.world} ranks"

    @property
    def calls(self) -> int:
        """How many calls are a turn: many of a short one, but none that takes seconds."""
        return max(2, min(400 // self.world, 200 * MB // (self.size * self.world)))

    @property
    def speed_target(self) -> float | None:
        """How often our time goes into gloo's."""
        if self.collective != "all_reduce":
            return None
        return TARGETS.get(self.size) if self.world == 2 else CROWDED_TARGET

    def floor_target(self, side: str) -> float | None:
        """A side's time in that of copying. Ordinary tensors have to be copied more often than that."""
        return FLOOR_TARGET if (self.collective, self.world, side) == ("all_reduce", 2, "shared") else None


@dataclass(frozen=True)
class Exercise:
    """A side's call, ready to be made, with its tensors."""

    call: Callable[[], object]
    output: Tensor
    input: Tensor

    def result(self, data: Tensor) -> Tensor:
        """What the call makes of the data."""
        self.input.copy_(data)
        self.call()
        return self.output


@contextmanager
def backend_group() -> Iterator[Any]:
    """A group of the backend "paceline", of all ranks."""
    group = dist.new_group(backend="paceline")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def prepare(side: str, case: Case, stack: ExitStack) -> Exercise:
    match side:
        case "gloo":
            return through_torch(case, dist.group.WORLD)
        case "backend":
            return through_torch(case, stack.enter_context(backend_group()))
        case "shared":
            return in_shared_memory(case)
        case _:
            count = COLLECTIVES[case.collective].moved(case.size, case.world) // ITEM_BYTES
            to, data = torch.empty(count).zero_(), torch.empty(count).zero_()
            return Exercise(lambda: to.copy_(data), to, data)


def through_torch(case: Case, group: Any) -> Exercise:
    collective = COLLECTIVES[case.collective]
    output, data = collective.tensors(case.size // ITEM_BYTES, case.world)
    return Exercise(lambda: collective.call(output, data, group), output, data)


def in_shared_memory(case: Case) -> Exercise:
    group = Group(dist.group.WORLD)
    group.share_memory(room=case.size)
    storage = group.empty(case.size // ITEM_BYTES, dtype=torch.float32, device=torch.device("cpu")).zero_()
    first = group.all_reduce(storage)
    first.wait(lambda: None)
    assert not isinstance(first, WorkPending), "these ranks share no memory: leave the side out, with --sides"
    return Exercise(lambda: group.all_reduce(storage).wait(lambda: None), storage, storage)


def seconds_on_rank(
    rank: int, case: Case, sides: Sequence[str], rounds: int, calls: int
) -> dict[str, list[float]]:
    with ExitStack() as stack:
        exercises = {side: prepare(side, case, stack) for side in sides}
        collectives = {side: exercise for side, exercise in exercises.items() if side != "floor"}
        before = check(rank, case, collectives)
        turns = {side: exercise.call for side, exercise in exercises.items()}
        seconds = samples(turns, rounds=rounds, calls=calls, before=dist.barrier, untimed=1)
        assert check(rank, case, collectives) == before, f"a result differs from the same one before ({case})"
    return seconds


def check(rank: int, case: Case, exercises: Mapping[str, Exercise]) -> dict[str, bytes]:
    """Make sure that all sides have the same result; returns a digest of each of ours."""
    digests: dict[str, bytes] = {}
    expected: Tensor | None = None
    for side, exercise in exercises.items():
        torch.manual_seed(rank)
        result = exercise.result(torch.randn_like(exercise.input))
        expected = result.clone() if expected is None else expected
        torch.testing.assert_close(result, expected)
        if side in OURS:
            digests[side] = hashlib.sha256(result.numpy().data).digest()
        # Sums of sums would soon be infinite; zeros stay.
        exercise.input.zero_()
    if COLLECTIVES[case.collective].alike:
        everyone: list[dict[str, bytes]] = [{} for _ in range(case.world)]
        dist.all_gather_object(everyone, digests)
        assert everyone == [digests] * case.world, f"ranks have different results ({case})"
    return digests


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
        target = case.floor_target(slow) if against_floor else case.speed_target
        rows.append(
            Row(str(case), timings, f"{slow} / {fast}", value, target, at_most=against_floor, spread=spread)
        )
    return rows


def comparisons(sides: Sequence[str]) -> list[tuple[str, str]]:
    """Which sides are put in relation: gloo to ours and ours to copying; without ours, gloo to copying."""
    ours = [side for side in sides if side in OURS]
    pairs = [("gloo", side) for side in ours] + [(side, "floor") for side in ours or ["gloo"]]
    return [pair for pair in pairs if set(pair) <= set(sides)]


def sides_of(collective: str, sides: Sequence[str]) -> list[str]:
    return [side for side in sides if side != "shared" or collective == "all_reduce"]


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
                measured[case] = time_case(pool, case, arguments)
                rows += case_rows(case, measured[case])
    return rows, measured


def time_case(pool: RankPool, case: Case, arguments: argparse.Namespace) -> Seconds:
    sides, calls = sides_of(case.collective, arguments.sides), QUICK_CALLS if arguments.quick else case.calls
    return slowest(pool.run(seconds_on_rank, case, sides, arguments.rounds, calls))


def draw(path: Path, measured: Mapping[Case, Seconds], *, columns: int) -> None:
    """Plot each side's time against the size: a panel for each collective, one above another, and world."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    order = list(COLLECTIVES)
    for case, seconds in sorted(measured.items(), key=lambda item: order.index(item[0].collective)):
        lines = panels.setdefault(f"{case.collective}, {case.world} ranks", {})
        for side, values in seconds.items():
            lines.setdefault(side, []).append((case.size, timing(values).median))
    plot.write(
        path,
        [plot.Panel(title, lines) for title, lines in panels.items()],
        SIDES,
        title="Time of a collective: gloo, paceline, and copying the same bytes",
        note=f"medians; {machine()}",
        x=("size of a rank's tensor", lambda size: shown_size(int(size))),
        y=("time of a call", shown_seconds),
        columns=columns,
    )


def shown_size(size: int) -> str:
    return f"{size // MB} MB" if size % MB == 0 else f"{size / KB:g} KB"


def shown_seconds(seconds: float) -> str:
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999:
            return f"{seconds * scale:g} {unit}"
    return f"{seconds:g} s"


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
        draw(arguments.plot, measured, columns=len(arguments.worlds))


if __name__ == "__main__":
    main()
