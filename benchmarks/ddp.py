"""What a training step costs under torch's DistributedDataParallel and under paceline's, on one host.

python benchmarks/ddp.py [--models NAME ...] [--sides NAME ...] [--parts steps memory parameters]
                         [--optimizer sgd | adamw] [--world N] [--busy N] [--rounds N] [--runs N] [--quick]
                         [--json FILE] [--figures FILE]

The sides, which take turns on the same ranks in one run, beside the module alone:
  torch              torch's wrapper on a gloo group
  torch-on-paceline  torch's wrapper on a group of the backend "paceline"
  paceline           paceline's wrapper, in shared memory if the ranks have it
  paceline-c10d      paceline's wrapper with transport="c10d": everything goes through the gloo group
  barrier-only       no wrapper, and no gradient is sent, but the ranks wait for each other in backward
  floor              no wrapper: gradients are copied into shared memory, reduced and waited for, and nothing
                     else is done (paceline.tools.bench.floor)
and each wrapper with -views behind its name: with gradient_as_bucket_view=True. "paceline / torch: 0.5" means
that paceline takes half of torch's time. A figure without a target is for information.

steps: a step is zero_grad, forward, backward and plain SGD. Each rank has one thread and holds a copy of the
model for every side. The sides take turns in the same order on all ranks, which wait for each other before
each turn. A turn is over when the slowest rank is done. What synchronisation adds is the step minus the step
of the module alone on the slower rank, in each round; the slower rank is looked for in each step, because no
synchronisation can be faster. "Waiting for the slower rank" is what a rank would wait for it on average; no
side can avoid it, and it is not in what the sides add. CPU time is that of all threads of all ranks together.
A ratio is NaN, which meets no target, if what the base adds is lost in the noise. The learning rate is zero.
After the timing, gradients of all sides are compared, and one step with another rate must change all
parameters.

With --optimizer adamw, the step has torch's AdamW in its default implementation, and the sides are:
  torch                          torch's wrapper on a gloo group
  torch-ZeroRedundancyOptimizer  the same, and each rank steps some of the parameters
  paceline                       paceline's wrapper
  paceline-ShardedOptimizer      the same, and each rank steps some of the parameters
  paceline-HostOptimizer         the same, with parameters and optimizer state once per host: each rank steps
                                 its part
The module alone has a plain AdamW too. Only whole steps are measured then: what a side adds is less than
nothing if ranks share the optimizer's work.

memory: the peak over five steps, minus what was held before wrapping, see paceline.tools.bench.held_memory.
benchmarks/memory.py has that of AdamW.

parameters: what sides add per parameter, as the number of tiny parameters grows (CPU time: per rank), and the
time to wrap the model that has the most. torch's wrapper is left out above 5,000 parameters.

--busy starts processes that use the cores during the whole measurement. Then, and with more than two ranks,
only whole steps have a target.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist
from step_targets import (
    WORLD,
    Conditions,
    build_rows,
    memory_rows,
    optimizer_rows,
    parameter_rows,
    step_rows,
)
from targets import Row, add_output_options, report, save_figures

from paceline.testing import run_ranks
from paceline.tools.bench.held_memory import MemoryCase, held_memory
from paceline.tools.bench.measure import Size, Timing, busy_processes, size, timing
from paceline.tools.bench.models import ADAMW, MODELS, SGD, TINY_PARAMETERS, BenchModel
from paceline.tools.bench.sides import ALONE, BARRIER_ONLY, FLOOR, OPTIMIZER_SIDES, STEP_SIDES, Side
from paceline.tools.bench.step_times import Repeats, StepTimes, time_steps

STEP_MODELS = ("tiny-layers", "parameters-5000", "transformer", "mlp", "conv")
MEMORY_MODELS = ("mlp", "transformer")
PARTS = ("steps", "memory", "parameters")
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}
TIMEOUT_SECONDS = 3600.0
# With more parameters than these, torch's wrapper is not measured.
MOST_TORCH_PARAMETERS = 5_000
# torch with and without views, and the others with their defaults.
DEFAULT_SIDES = (
    "torch", "torch-views", "torch-on-paceline", "paceline", "paceline-c10d", "barrier-only", "floor",
)  # fmt: skip


def is_wrapper(side: Side) -> bool:
    return side not in (BARRIER_ONLY, FLOOR)


def peak_memory(model: BenchModel, sides: Sequence[Side], *, world: int, runs: int) -> dict[Side, Size]:
    """Each side's peak, in several runs: it depends on what happens to overlap."""
    peaks = [
        [
            max(held_memory(MemoryCase(model, side), world=world, timeout=TIMEOUT_SECONDS).since_wrapping)
            for side in sides
        ]
        for _ in range(runs)
    ]
    return {side: size(values) for side, values in zip(sides, zip(*peaks, strict=True), strict=True)}


def build_times(model: BenchModel, sides: Sequence[Side], *, world: int, runs: int) -> dict[Side, Timing]:
    """Seconds until the slowest of fresh ranks has wrapped its module."""
    seconds = [
        [max(run_ranks(build_on_rank, world, args=(model, side), timeout=TIMEOUT_SECONDS)) for side in sides]
        for _ in range(runs)
    ]
    return {side: timing(values) for side, values in zip(sides, zip(*seconds, strict=True), strict=True)}


def build_on_rank(rank: int, model: BenchModel, side: Side) -> float:
    module = model.make(rank).module
    dist.barrier()
    start = time.perf_counter()
    wrapped = side.wrap(module)
    seconds = time.perf_counter() - start
    # torch's wrapper can hang if it outlives the group.
    del wrapped
    gc.collect()
    return seconds


def conditions_of(arguments: argparse.Namespace) -> Conditions:
    return Conditions(arguments.world, arguments.busy, arguments.optimizer)


class Benchmark:
    """Measures the parts that were asked for; a model is timed once, also if two parts need it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._conditions = conditions_of(arguments)
        self._measured: dict[str, StepTimes] = {}

    def steps(self) -> list[Row]:
        """Steps of the five models."""
        names, sides = self._chosen(STEP_MODELS), self._arguments.sides
        rows = step_rows if self._arguments.optimizer == "sgd" else optimizer_rows
        return [row for name in names for row in rows(name, self._time(name), sides, self._conditions)]

    def memory(self) -> list[Row]:
        """Peak memory of the large models."""
        rows: list[Row] = []
        sides = [side for side in self._arguments.sides if is_wrapper(side)]
        for name in self._chosen(MEMORY_MODELS):
            print(f"peak memory of {MODELS[name].what}", file=sys.stderr)
            peaks = peak_memory(
                MODELS[name], [ALONE, *sides], world=self._conditions.world, runs=self._arguments.runs
            )
            rows += memory_rows(name, peaks, self._conditions)
        return rows

    def parameters(self) -> list[Row]:
        """The cost per parameter, and of wrapping many."""
        names = self._chosen(list(TINY_PARAMETERS))
        measured = {name: self._time(name) for name in names}
        rows = parameter_rows(measured, self._arguments.sides, self._conditions)
        for name in names[-1:]:
            print(f"wrapping {MODELS[name].what}", file=sys.stderr)
            sides = [side for side in self._sides_for(name) if is_wrapper(side)]
            seconds = build_times(
                MODELS[name], sides, world=self._conditions.world, runs=self._arguments.runs
            )
            rows += build_rows(name, seconds, self._conditions)
        return rows

    def _chosen(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._arguments.models]

    def _sides_for(self, name: str) -> list[Side]:
        few = TINY_PARAMETERS.get(name, 0) <= MOST_TORCH_PARAMETERS
        return [side for side in self._arguments.sides if few or side.wrapper != "torch"]

    def _time(self, name: str) -> StepTimes:
        if name not in self._measured:
            print(f"timing {MODELS[name].what}", file=sys.stderr)
            repeats = Repeats(self._arguments.rounds, 1 if self._arguments.quick else MODELS[name].steps)
            result = time_steps(
                MODELS[name],
                self._sides_for(name),
                repeats,
                world=self._conditions.world,
                timeout=TIMEOUT_SECONDS,
                kind=OPTIMIZERS[self._arguments.optimizer],
            )
            assert result.warning is None, result.warning
            assert not result.refused, result.refused
            self._measured[name] = result.times
        return self._measured[name]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time training steps under DistributedDataParallel.")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=STEP_SIDES | OPTIMIZER_SIDES,
        metavar="NAME",
        help=f"{', '.join(STEP_SIDES)}; with AdamW: {', '.join(OPTIMIZER_SIDES)}",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, help="default: steps and memory; with AdamW steps alone"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="default: sgd")
    parser.add_argument("--world", type=int, default=WORLD, metavar="N", help=f"ranks (default: {WORLD})")
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="processes that keep cores busy (default: 0)"
    )
    parser.add_argument("--rounds", type=int, default=40, help="timed turns of each side (default: 40)")
    parser.add_argument(
        "--runs", type=int, default=5, help="fresh starts, for memory and wrapping (default: 5)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="4 rounds of a step and 3 runs, to see that all works"
    )
    add_output_options(parser)
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.runs) < 3:
        parser.error("quartiles need three rounds, and three runs, or more")
    if arguments.world < 2 or arguments.busy < 0:
        parser.error("there must be two ranks or more, and no negative number of busy processes")
    choose_sides_and_parts(parser, arguments)
    if arguments.quick:
        arguments.rounds, arguments.runs = 4, 3
    return arguments


def choose_sides_and_parts(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Put in the optimizer's own where none were given, and refuse those that are not measured with it."""
    is_sgd = arguments.optimizer == "sgd"
    known = STEP_SIDES if is_sgd else OPTIMIZER_SIDES
    arguments.parts = arguments.parts or (("steps", "memory") if is_sgd else ("steps",))
    if not is_sgd and set(arguments.parts) != {"steps"}:
        parser.error("with AdamW only steps are measured here; benchmarks/memory.py measures its memory")
    sides = arguments.sides or (DEFAULT_SIDES if is_sgd else [*OPTIMIZER_SIDES])
    if unknown := [name for name in sides if name not in known]:
        parser.error(f"these sides are not measured with {arguments.optimizer}: {', '.join(unknown)}")
    arguments.sides = [side for name, side in known.items() if name in sides]


def main() -> None:
    arguments = parse()
    benchmark, conditions = Benchmark(arguments), conditions_of(arguments)
    with busy_processes(arguments.busy):
        of_steps = [
            *(benchmark.steps() if "steps" in arguments.parts else []),
            *(benchmark.memory() if "memory" in arguments.parts else []),
        ]
        of_parameters = benchmark.parameters() if "parameters" in arguments.parts else []
    report(f"DistributedDataParallel on {conditions}", [*of_steps, *of_parameters], arguments.json)
    if of_steps:
        save_figures(arguments.figures, conditions.figures_name, of_steps)
    if of_parameters:
        save_figures(arguments.figures, f"{conditions.figures_name}_parameters", of_parameters)


if __name__ == "__main__":
    main()
