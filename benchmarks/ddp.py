"""What a training step costs under torch's DistributedDataParallel and under paceline's, on two ranks.

python benchmarks/ddp.py [--models NAME ...] [--sides NAME ...] [--parts steps memory]
                         [--rounds N] [--memory-runs N] [--quick] [--json FILE]

The sides, which take turns on the same ranks in one run, beside the module alone:
  torch              torch's wrapper on a gloo group
  torch-on-paceline  torch's wrapper on a group of the backend "paceline"
  paceline           paceline's wrapper, in shared memory where the ranks have it
  paceline-c10d      paceline's wrapper with transport="c10d": all goes through the gloo group
  meeting            no wrapper, and no gradient goes anywhere, but the ranks wait for each other in backward:
                     what any synchronisation adds at the least, because ranks are not equally fast
and each wrapper with -views behind its name: with gradient_as_bucket_view=True. "paceline / torch: 0.5" says
that paceline takes half of what torch does. A target is a promise; a figure without one is for information.

A step is zero_grad, forward, backward and plain SGD. Each rank has one thread and holds every side's copy
of the model; the sides take turns in the same order on both ranks, which meet before each turn. A turn lasts
until the slower rank is done. What synchronisation adds is the step less the step of the module alone, taken
in each round; its ratio is nan, and no target met, where what torch adds is lost in the noise.

Memory is the peak over five steps of what all ranks hold together, less what they held before the module was
wrapped; each figure is from fresh ranks. It is Linux's proportional set size (PSS), in which a page that n
processes share counts 1/n in each, so the sum over ranks counts it once; file pages, which are the code of
libraries, are left out, since what they count depends on who else runs. The kernel keeps no peak of the PSS,
so it is read at points: after forward, at some of backward's gradients, before the wrapper sees them, after
backward, and after the optimizer's step. At each point the ranks meet, read and meet again, so that the sum
is of one moment. What comes and goes between two points, such as messages on their way, may be missed.
"""

import argparse
import ctypes
import gc
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from aims import Row, report

from paceline.testing import run_ranks
from paceline.tools.bench.measure import Size, ratio, size, timing
from paceline.tools.bench.models import MODELS, TINY_PARAMETERS
from paceline.tools.bench.sides import ALONE, MEETING, SIDES, Side
from paceline.tools.bench.steps import Pace, Seconds, time_steps
from paceline.tools.bench.training import Training

WORLD = 2
MEMORY_MODELS = ("mlp", "transformer")
MEMORY_STEPS = 5
# At so many gradients of a backward, evenly spread: reading takes 15 ms.
MEMORY_GRADIENTS = 8
# paceline's step, in torch's.
STEP_TARGET = 1.0
# What paceline adds to a step, in what torch adds on gloo.
ADDED_TARGETS = {"tiny-layers": 1 / 8, "transformer": 1 / 5, "conv": 1 / 5, "mlp": 1 / 4}
# paceline's peak of memory, in that of torch with views.
MEMORY_TARGET = 1.0
TIMEOUT_SECONDS = 3600.0
# torch in both modes, and the others as they come.
DEFAULT_SIDES = ("torch", "torch-views", "torch-on-paceline", "paceline", "paceline-c10d", "meeting")


def time_model(name: str, sides: Sequence[Side], pace: Pace) -> Seconds:
    measured = time_steps(MODELS[name], sides, pace, world=WORLD, timeout=TIMEOUT_SECONDS)
    assert measured.wrong is None, measured.wrong
    return measured.seconds


def peak_memory(name: str, sides: Sequence[Side], runs: int) -> dict[Side, Size]:
    """Each side's peak. It depends on what happens to overlap, so it is taken in several runs."""
    peaks = [[peak(name, side) for side in sides] for _ in range(runs)]
    return {side: size(values) for side, values in zip(sides, zip(*peaks, strict=True), strict=True)}


def peak(name: str, side: Side) -> int:
    """The most that the ranks held together at a point, over what they held before."""
    ranks = run_ranks(held_on_rank, WORLD, args=(name, side), timeout=TIMEOUT_SECONDS)
    points: list[int] = [sum(point) for point in zip(*ranks, strict=True)]
    return max(points) - points[0]


def held_on_rank(rank: int, name: str, side: Side) -> list[int]:
    """What this rank holds before its module is wrapped, and at each point of the steps after that."""
    training = MODELS[name].make(rank)
    module = training.module
    load_code(training)
    held: list[int] = []

    def point() -> None:
        # On a group of its own, so that it is never in between a wrapper's collectives.
        dist.barrier(meeting)
        held.append(held_bytes())
        dist.barrier(meeting)

    meeting = dist.new_group(backend="gloo")
    point()
    wrapped = replace(training, module=side.wrap(module))
    parameters = list(module.parameters())
    for parameter in parameters[:: math.ceil(len(parameters) / MEMORY_GRADIENTS)]:
        parameter.register_hook(lambda _: point())
    step = wrapped.step(point)
    for _ in range(MEMORY_STEPS):
        step()
    # torch's wrapper can hang if it outlives the group.
    del wrapped, step
    gc.collect()
    return held


def load_code(training: Training) -> None:
    """Have the libraries that a step needs in memory, and nothing else that it leaves behind."""
    training.step()()
    training.module.zero_grad(set_to_none=True)
    dist.all_reduce(torch.zeros(1))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def held_bytes() -> int:
    """This rank's part of the memory that it has, without files' pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    parts = [line.split()[1] for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    return sum(map(int, parts)) * 1024


def comparisons(sides: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Each side with each of torch's on gloo, or with the module alone where none of those is there."""
    bases = [side for side in sides if side.is_base]
    others = [side for side in sides if not side.is_base]
    return [(side, base) for side in others or bases for base in (bases if others and bases else [ALONE])]


def step_rows(name: str, seconds: Seconds, sides: Sequence[Side]) -> list[Row]:
    what, timings = f"step of {MODELS[name].what}", {side: timing(of) for side, of in seconds.of.items()}
    rows = []
    for side, base in comparisons(sides):
        value, spread = ratio(seconds.of[str(side)], seconds.of[str(base)])
        target = STEP_TARGET if side.wrapper == "paceline" and base.is_base else None
        rows.append(Row(what, timings, f"{side} / {base}", value, target, spread=spread))
    return rows


def added_rows(name: str, seconds: Seconds, sides: Sequence[Side]) -> list[Row]:
    what = f"what synchronisation adds to a step of {MODELS[name].what}"
    added = {side: seconds.added(side) for side in sides}
    timings = {str(side): timing(values) for side, values in added.items()}
    rows = []
    for side, base in comparisons(sides):
        if base.is_base:
            value, spread = added_ratio(added[side], added[base])
            target = ADDED_TARGETS.get(name) if (side.wrapper, side.through) == ("paceline", None) else None
            rows.append(Row(what, timings, f"{side} / {base}", value, target, spread=spread))
    return rows


def added_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """How the medians stand to each other, and our quartiles to their median; no number if they are noise."""
    own, base = timing(ours), timing(theirs).median
    if base <= 0:
        return math.nan, None
    return own.median / base, (own.low / base, own.high / base)


def parameter_rows(measured: Mapping[str, Seconds], sides: Sequence[Side]) -> list[Row]:
    """What a parameter costs, as their number grows."""
    counts = {name: count for name, count in TINY_PARAMETERS.items() if name in measured}
    if len(counts) < 2:
        return []
    return [parameter_row(measured, counts, side) for side in sides]


def parameter_row(measured: Mapping[str, Seconds], counts: Mapping[str, int], side: Side) -> Row:
    timings = {
        f"at {count:,}": timing(measured[name].added(side, parts=count)) for name, count in counts.items()
    }
    fewest, *_, most = timings.values()
    return Row(
        f"what {side} adds for each parameter",
        timings,
        "at most parameters, times that at fewest",
        most.median / fewest.median,
        None,
    )


def memory_rows(name: str, sides: Sequence[Side], runs: int) -> list[Row]:
    peaks = peak_memory(name, [ALONE, *sides], runs)
    what, shown = f"peak memory of {MODELS[name].what}", {str(side): held for side, held in peaks.items()}
    rows = []
    for side, base in comparisons(sides):
        target = MEMORY_TARGET if side.wrapper == "paceline" and base == SIDES["torch-views"] else None
        value = peaks[side].median / peaks[base].median
        rows.append(Row(what, shown, f"{side} / {base}", value, target))
    return rows


def measure(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    measured: dict[str, Seconds] = {}
    if "steps" in arguments.parts:
        for name in arguments.models:
            print(f"timing {MODELS[name].what}", file=sys.stderr)
            calls = 1 if arguments.quick else MODELS[name].steps
            measured[name] = time_model(name, arguments.sides, Pace(arguments.rounds, calls))
            rows += step_rows(name, measured[name], arguments.sides)
            rows += added_rows(name, measured[name], arguments.sides)
        rows += parameter_rows(measured, arguments.sides)
    if "memory" in arguments.parts:
        for name in (name for name in MEMORY_MODELS if name in arguments.models):
            print(f"peak memory of {MODELS[name].what}", file=sys.stderr)
            wrappers = [side for side in arguments.sides if side != MEETING]
            rows += memory_rows(name, wrappers, arguments.memory_runs)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time training steps under DistributedDataParallel.")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=DEFAULT_SIDES, metavar="NAME", help=", ".join(SIDES)
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("steps", "memory"), default=("steps", "memory"), help="default: both"
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="turns of each side that are timed (default: 40)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="4 rounds of a step and 3 memory runs, to see that all works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--memory-runs", type=int, default=5, help="fresh starts of each side (default: 5)")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.memory_runs) < 3:
        parser.error("quartiles need three rounds, and three memory runs, or more")
    arguments.sides = [side for name, side in SIDES.items() if name in arguments.sides]
    if arguments.quick:
        arguments.rounds, arguments.memory_runs = 4, 3
    return arguments


def main() -> None:
    arguments = parse()
    rows = measure(arguments)
    report(f"DistributedDataParallel on {WORLD} ranks of one thread each", rows, arguments.json)


if __name__ == "__main__":
    main()
