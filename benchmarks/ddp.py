"""What a training step costs under torch's DistributedDataParallel and under paceline's, on two ranks.

python benchmarks/ddp.py [--models NAME ...] [--sides NAME ...] [--parts steps memory]
                         [--rounds N] [--memory-runs N] [--quick] [--json FILE] [--figures FILE]

The sides, which take turns on the same ranks in one run, beside the module alone:
  torch              torch's wrapper on a gloo group
  torch-on-paceline  torch's wrapper on a group of the backend "paceline"
  paceline           paceline's wrapper, in shared memory if the ranks have it
  paceline-c10d      paceline's wrapper with transport="c10d": everything goes through the gloo group
  barrier-only       no wrapper, and no gradient is sent, but the ranks wait for each other in backward: the
                     least that any synchronisation adds, because ranks are not equally fast
and each wrapper with -views behind its name: with gradient_as_bucket_view=True. "paceline / torch: 0.5" means
that paceline takes half of torch's time. A figure without a target is for information.

A step is zero_grad, forward, backward and plain SGD. Each rank has one thread and holds a copy of the model
for every side. The sides take turns in the same order on both ranks, which wait for each other before each
turn. A turn is over when the slower rank is done. What synchronisation adds is the step minus the step of the
module alone, in each round. Its ratio is NaN, which meets no target, if what torch adds is lost in the noise.

Memory is the peak over five steps of what all ranks hold together, minus what they held before the module was
wrapped; each figure is from fresh ranks. It is Linux's proportional set size (PSS), in which a page that n
processes share counts 1/n in each, so that the sum over ranks counts it once. File pages, which are the code
of libraries, are left out, because their count depends on what else runs. The kernel keeps no peak of the
PSS, so it is read at some points: after forward, at some of backward's gradients before the wrapper sees
them, after backward, and after the optimizer's step. At each point the ranks wait for each other before and
after reading, so that the sum is of one moment. What is allocated and freed between two points is missed.
"""

import argparse
import ctypes
import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from targets import Row, add_output_options, report, save_figures

from paceline.testing import run_ranks
from paceline.tools.bench.measure import Size, ratio, size, timing
from paceline.tools.bench.models import MODELS, TINY_PARAMETERS, BenchModel, Training
from paceline.tools.bench.step_times import (
    ALONE,
    BARRIER_ONLY,
    STEP_SIDES,
    Repeats,
    Side,
    StepTimes,
    time_steps,
)

WORLD = 2
MEMORY_MODELS = ("mlp", "transformer")
MEMORY_STEPS = 5
# How many gradients of a backward are reading points, evenly spread: reading takes 15 ms.
MEMORY_GRADIENTS = 8
# paceline's step, divided by torch's.
STEP_TARGET = 1.0
# What paceline adds to a step, divided by what torch adds on gloo.
ADDED_TARGETS = {"tiny-layers": 1 / 8, "transformer": 1 / 5, "conv": 1 / 5, "mlp": 1 / 4}
# paceline's peak memory, divided by that of torch with views.
MEMORY_TARGET = 1.0
TIMEOUT_SECONDS = 3600.0
# torch with and without views, and the others with their defaults.
DEFAULT_SIDES = ("torch", "torch-views", "torch-on-paceline", "paceline", "paceline-c10d", "barrier-only")


def time_model(name: str, sides: Sequence[Side], repeats: Repeats) -> StepTimes:
    result = time_steps(MODELS[name], sides, repeats, world=WORLD, timeout=TIMEOUT_SECONDS)
    assert result.warning is None, result.warning
    return result.times


def peak_memory(model: BenchModel, sides: Sequence[Side], runs: int) -> dict[Side, Size]:
    """Each side's peak, in several runs: it depends on what happens to overlap."""
    peaks = [[max(held_memory(model, side)) for side in sides] for _ in range(runs)]
    return {side: size(values) for side, values in zip(sides, zip(*peaks, strict=True), strict=True)}


def held_memory(
    model: BenchModel, side: Side, on_rank: Callable[[int, BenchModel, Side], list[int]] | None = None
) -> list[int]:
    """What the ranks hold together at each point of the steps, minus what they held before.

    ``on_rank`` is what a rank calls to find out; ``held_on_rank`` by default.
    """
    ranks = run_ranks(on_rank or held_on_rank, WORLD, args=(model, side), timeout=TIMEOUT_SECONDS)
    before, *points = [sum(point) for point in zip(*ranks, strict=True)]
    return [held - before for held in points]


def held_on_rank(rank: int, model: BenchModel, side: Side) -> list[int]:
    """What this rank holds before its module is wrapped, and at each point of the steps after that."""
    training = model.make(rank)
    module = training.module
    load_code(training)
    held: list[int] = []

    def point() -> None:
        # On a separate group, so that barriers do not mix with the wrapper's collectives.
        dist.barrier(group)
        held.append(held_bytes())
        dist.barrier(group)

    group = dist.new_group(backend="gloo")
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
    """Load the libraries that a step needs into memory, and free everything else that it leaves behind."""
    training.step()()
    training.module.zero_grad(set_to_none=True)
    dist.all_reduce(torch.zeros(1))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def held_bytes() -> int:
    """This rank's proportional set size, without file pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    parts = [line.split()[1] for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    return sum(map(int, parts)) * 1024


def comparisons(sides: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Each side with each of torch's on gloo, or with the module alone if there is none of those."""
    bases = [side for side in sides if side.is_baseline]
    others = [side for side in sides if not side.is_baseline]
    return [(side, base) for side in others or bases for base in (bases if others and bases else [ALONE])]


def case_of(name: str, quantity: str) -> dict[str, str | int]:
    return {"quantity": quantity, "model": name, "label": MODELS[name].what}


def step_rows(name: str, times: StepTimes, sides: Sequence[Side]) -> list[Row]:
    what, timings = f"step of {MODELS[name].what}", {side: timing(of) for side, of in times.of.items()}
    case = case_of(name, "step")
    rows = []
    for side, base in comparisons(sides):
        value, spread = ratio(times.of[str(side)], times.of[str(base)])
        target = STEP_TARGET if side.wrapper == "paceline" and base.is_baseline else None
        rows.append(Row(what, timings, f"{side} / {base}", value, target, spread=spread, case=case))
    return rows


def added_rows(name: str, times: StepTimes, sides: Sequence[Side]) -> list[Row]:
    what = f"what synchronisation adds to a step of {MODELS[name].what}"
    case = case_of(name, "added")
    added = {side: times.added(side) for side in sides}
    timings = {str(side): timing(values) for side, values in added.items()}
    rows = []
    for side, base in comparisons(sides):
        if base.is_baseline:
            value, spread = added_ratio(added[side], added[base])
            target = ADDED_TARGETS.get(name) if (side.wrapper, side.through) == ("paceline", None) else None
            rows.append(Row(what, timings, f"{side} / {base}", value, target, spread=spread, case=case))
    return rows


def added_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """The ratio of the medians, and our quartiles divided by their median; NaN if theirs is noise."""
    own, base = timing(ours), timing(theirs).median
    if base <= 0:
        return math.nan, None
    return own.median / base, (own.low / base, own.high / base)


def parameter_rows(measured: Mapping[str, StepTimes], sides: Sequence[Side]) -> list[Row]:
    """What synchronisation adds per parameter, as their number grows."""
    counts = {name: count for name, count in TINY_PARAMETERS.items() if name in measured}
    if len(counts) < 2:
        return []
    return [parameter_row(measured, counts, side) for side in sides]


def parameter_row(measured: Mapping[str, StepTimes], counts: Mapping[str, int], side: Side) -> Row:
    timings = {
        f"at {count:,}": timing(measured[name].added(side, parts=count)) for name, count in counts.items()
    }
    fewest, *_, most = timings.values()
    return Row(
        f"what {side} adds per parameter",
        timings,
        "with the most parameters / with the fewest",
        most.median / fewest.median,
        None,
        case={"quantity": "added per parameter", "side": str(side)},
    )


def memory_rows(name: str, sides: Sequence[Side], runs: int) -> list[Row]:
    peaks = peak_memory(MODELS[name], [ALONE, *sides], runs)
    what, shown = f"peak memory of {MODELS[name].what}", {str(side): held for side, held in peaks.items()}
    rows = []
    for side, base in comparisons(sides):
        target = MEMORY_TARGET if side.wrapper == "paceline" and base == STEP_SIDES["torch-views"] else None
        value = peaks[side].median / peaks[base].median
        rows.append(Row(what, shown, f"{side} / {base}", value, target, case=case_of(name, "memory")))
    return rows


def measure(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    measured: dict[str, StepTimes] = {}
    if "steps" in arguments.parts:
        for name in arguments.models:
            print(f"timing {MODELS[name].what}", file=sys.stderr)
            calls = 1 if arguments.quick else MODELS[name].steps
            measured[name] = time_model(name, arguments.sides, Repeats(arguments.rounds, calls))
            rows += step_rows(name, measured[name], arguments.sides)
            rows += added_rows(name, measured[name], arguments.sides)
        rows += parameter_rows(measured, arguments.sides)
    if "memory" in arguments.parts:
        for name in (name for name in MEMORY_MODELS if name in arguments.models):
            print(f"peak memory of {MODELS[name].what}", file=sys.stderr)
            wrappers = [side for side in arguments.sides if side != BARRIER_ONLY]
            rows += memory_rows(name, wrappers, arguments.memory_runs)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time training steps under DistributedDataParallel.")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=STEP_SIDES,
        default=DEFAULT_SIDES,
        metavar="NAME",
        help=", ".join(STEP_SIDES),
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("steps", "memory"), default=("steps", "memory"), help="default: both"
    )
    parser.add_argument("--rounds", type=int, default=40, help="timed turns of each side (default: 40)")
    parser.add_argument(
        "--quick", action="store_true", help="4 rounds of a step and 3 memory runs, to see that all works"
    )
    add_output_options(parser)
    parser.add_argument("--memory-runs", type=int, default=5, help="fresh starts of each side (default: 5)")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.memory_runs) < 3:
        parser.error("quartiles need three rounds, and three memory runs, or more")
    arguments.sides = [side for name, side in STEP_SIDES.items() if name in arguments.sides]
    if arguments.quick:
        arguments.rounds, arguments.memory_runs = 4, 3
    return arguments


def main() -> None:
    arguments = parse()
    rows = measure(arguments)
    report(f"DistributedDataParallel on {WORLD} ranks with one thread each", rows, arguments.json)
    save_figures(arguments.figures, "ddp", rows)


if __name__ == "__main__":
    main()
