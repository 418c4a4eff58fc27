"""What a training step costs under torch's DistributedDataParallel and under paceline's, on two gloo ranks.

python benchmarks/ddp.py [--models NAME ...] [--wrappers torch paceline] [--parts steps memory]
                         [--rounds N] [--memory-runs N] [--quick] [--json FILE]

A step is zero_grad, forward, backward and plain SGD. Each rank has one thread and holds every side's copy
of the model; the sides take turns in the same order on both ranks, which meet before each turn. A turn lasts
until the slower rank is done.

Memory is the peak of a rank's resident set over five steps, less what was resident before the module was
wrapped; each figure is from fresh ranks. It is Linux's VmHWM, which can be set back. The peak that getrusage
gives cannot, and would show how the module was made.
"""

import argparse
import ctypes
import gc
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from measure import Row, Size, Timing, report, samples, size, timing
from models import MODELS, TINY_PARAMETERS
from torch import nn

from paceline.testing import run_ranks

WORLD = 2
WRAPPERS = ("torch", "paceline")
MODES = {"default": False, "gradient_as_bucket_view": True}
MEMORY_MODELS = ("mlp", "transformer")
MEMORY_STEPS = 5
# paceline's step, in torch's.
TARGET = 1.0
# torch settles its buckets after the first step.
WARMUPS = 3
TIMEOUT_SECONDS = 3600.0
# Steps must cost what they cost in training, but no model may run off in hundreds of them.
LEARNING_RATE = 1e-6
GRADIENT_TOLERANCE = 1e-3

Step = Callable[[], None]


@dataclass(frozen=True)
class Side:
    """One of those that are compared: a wrapper in a mode, or the module alone."""

    wrapper: str
    mode: str

    def __str__(self) -> str:
        return f"{self.wrapper}, {self.mode}"

    def wrap(self, module: nn.Module) -> nn.Module:
        """Put the wrapper around the module."""
        if self == ALONE:
            return module
        # By name, so that either wrapper can be measured without the other.
        wrapper = importlib.import_module(f"{self.wrapper}.nn.parallel").DistributedDataParallel
        wrapped: nn.Module = wrapper(module, gradient_as_bucket_view=MODES[self.mode])
        return wrapped


ALONE = Side("the module alone", "no sync")


def all_sides(wrappers: Sequence[str]) -> list[Side]:
    return [ALONE, *(Side(wrapper, mode) for mode in MODES for wrapper in wrappers)]


@dataclass(frozen=True)
class Seconds:
    """A model's step on each side, a value a round."""

    of: Mapping[str, Sequence[float]]

    def step(self, side: Side) -> Timing:
        return timing(self.of[str(side)])

    def added(self, side: Side, *, parts: int = 1) -> Timing:
        """What the wrapper adds to the module's own step, as a share of so many parts."""
        pairs = zip(self.of[str(side)], self.of[str(ALONE)], strict=True)
        return timing([(ours - alone) / parts for ours, alone in pairs])

    def ratio(self, side: Side, base: Side) -> tuple[float, tuple[float, float]]:
        """How the medians stand to each other, and the quartiles of the ratio over the rounds."""
        pairs = zip(self.of[str(side)], self.of[str(base)], strict=True)
        spread = timing([ours / theirs for ours, theirs in pairs])
        return self.step(side).median / self.step(base).median, (spread.low, spread.high)


def time_steps(name: str, wrappers: Sequence[str], rounds: int) -> Seconds:
    sides = all_sides(wrappers)
    ranks = run_ranks(steps_on_rank, WORLD, args=(name, sides, rounds), timeout=TIMEOUT_SECONDS)
    # The ranks start a turn together, so it is over when the slowest of them is done.
    return Seconds(
        {side: [max(turn) for turn in zip(*(rank[side] for rank in ranks), strict=True)] for side in ranks[0]}
    )


def steps_on_rank(rank: int, name: str, sides: Sequence[Side], rounds: int) -> dict[str, list[float]]:
    batch = make_batch(rank, name)
    modules = {str(side): side.wrap(make_module(name)) for side in sides}
    steps = {side: stepper(module, batch) for side, module in modules.items()}
    seconds = samples(steps, rounds=rounds, calls=MODELS[name].steps, warmups=WARMUPS, before=dist.barrier)
    check_same_gradients([module for side, module in modules.items() if side != str(ALONE)])
    # torch's wrapper can hang if it outlives the group.
    del modules, steps
    gc.collect()
    return seconds


def make_batch(rank: int, name: str) -> torch.Tensor:
    torch.manual_seed(rank)
    return torch.randn(MODELS[name].shape)


def make_module(name: str) -> nn.Module:
    """The same module each time, on each rank."""
    torch.manual_seed(0)
    return MODELS[name].make()


def stepper(module: nn.Module, batch: torch.Tensor) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, foreach=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        module(batch).square().mean().backward()
        optimizer.step()

    return step


def check_same_gradients(modules: Sequence[nn.Module]) -> None:
    """Make sure that the wrappers did the same work: each has taken the same steps from the same start."""
    first, *others = modules
    for other in others:
        for (name, theirs), ours in zip(first.named_parameters(), other.parameters(), strict=True):
            assert theirs.grad is not None
            assert ours.grad is not None
            # By the norm: ranks have other batches, so gradients that were not averaged are far off.
            off = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
            assert off < GRADIENT_TOLERANCE, f"gradients differ (parameter: {name}, by: {off:.3g})"


def peak_memory(name: str, sides: Sequence[Side], runs: int) -> dict[Side, Size]:
    """Each side's peak. It depends on what happens to overlap, so it is taken in several runs."""
    peaks = [[_peak(name, side) for side in sides] for _ in range(runs)]
    return {side: size(values) for side, values in zip(sides, zip(*peaks, strict=True), strict=True)}


def _peak(name: str, side: Side) -> int:
    return max(run_ranks(peak_on_rank, WORLD, args=(name, side), timeout=TIMEOUT_SECONDS))


def peak_on_rank(rank: int, name: str, side: Side) -> int:
    batch, module = make_batch(rank, name), make_module(name)
    load_code(module, batch)
    before = reset_peak()
    wrapped = side.wrap(module)
    step = stepper(wrapped, batch)
    for _ in range(MEMORY_STEPS):
        step()
    peak = status_bytes("VmHWM") - before
    # As in steps_on_rank.
    del wrapped, step
    gc.collect()
    return peak


def load_code(module: nn.Module, batch: torch.Tensor) -> None:
    """Have the libraries that a step needs in memory, and nothing else that it leaves behind."""
    stepper(module, batch)()
    module.zero_grad(set_to_none=True)
    dist.all_reduce(torch.zeros(1))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> int:
    """Have VmHWM start again from what is resident now; returns that."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def step_rows(name: str, seconds: Seconds, wrappers: Sequence[str]) -> list[Row]:
    return [step_row(name, mode, seconds, wrappers) for mode in MODES]


def step_row(name: str, mode: str, seconds: Seconds, wrappers: Sequence[str]) -> Row:
    sides = [ALONE, *(Side(wrapper, mode) for wrapper in wrappers)]
    steps = {side.wrapper: seconds.step(side) for side in sides}
    added = {f"{side.wrapper} adds": seconds.added(side) for side in sides[1:]}
    what = f"step of {MODELS[name].what}, {mode}"
    base, ours = sides[-2:]
    value, spread = seconds.ratio(ours, base)
    if base == ALONE:
        return Row(what, steps | added, f"times {ALONE.wrapper}", value, None, spread=spread)
    return Row(what, steps | added, "times torch's step", value, TARGET, spread=spread)


def parameter_rows(measured: Mapping[str, Seconds], wrappers: Sequence[str]) -> list[Row]:
    """What a parameter costs, as their number grows."""
    counts = {name: count for name, count in TINY_PARAMETERS.items() if name in measured}
    if len(counts) < 2:
        return []
    return [parameter_row(measured, counts, Side(wrapper, mode)) for mode in MODES for wrapper in wrappers]


def parameter_row(measured: Mapping[str, Seconds], counts: Mapping[str, int], side: Side) -> Row:
    timings = {f"at {count:,}": measured[name].added(side, parts=count) for name, count in counts.items()}
    fewest, *_, most = timings.values()
    return Row(
        f"what {side.wrapper} adds for each parameter, {side.mode}",
        timings,
        "at most parameters, times that at fewest",
        most.median / fewest.median,
        None,
    )


def memory_rows(name: str, wrappers: Sequence[str], runs: int) -> list[Row]:
    peaks = peak_memory(name, all_sides(wrappers), runs)
    return [memory_row(name, mode, peaks, wrappers) for mode in MODES]


def memory_row(name: str, mode: str, peaks: Mapping[Side, Size], wrappers: Sequence[str]) -> Row:
    sides = [ALONE, *(Side(wrapper, mode) for wrapper in wrappers)]
    base, ours = (peaks[side].median for side in sides[-2:])
    return Row(
        f"peak memory of {MODELS[name].what}, {mode}",
        {side.wrapper: peaks[side] for side in sides},
        "times torch's peak" if len(wrappers) == 2 else f"times {ALONE.wrapper}",
        ours / base,
        None,
    )


def measure(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    measured: dict[str, Seconds] = {}
    if "steps" in arguments.parts:
        for name in arguments.models:
            print(f"timing {MODELS[name].what}", file=sys.stderr)
            measured[name] = time_steps(name, arguments.wrappers, arguments.rounds)
            rows += step_rows(name, measured[name], arguments.wrappers)
        rows += parameter_rows(measured, arguments.wrappers)
    if "memory" in arguments.parts:
        for name in (name for name in MEMORY_MODELS if name in arguments.models):
            print(f"peak memory of {MODELS[name].what}", file=sys.stderr)
            rows += memory_rows(name, arguments.wrappers, arguments.memory_runs)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time training steps under DistributedDataParallel.")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--wrappers", nargs="+", choices=WRAPPERS, default=WRAPPERS, help="default: both")
    parser.add_argument(
        "--parts", nargs="+", choices=("steps", "memory"), default=("steps", "memory"), help="default: both"
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="turns of each side that are timed (default: 40)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="4 rounds and 2 memory runs, to see that all works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--memory-runs", type=int, default=5, help="fresh starts of each side (default: 5)")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.memory_runs) < 2:
        parser.error("quartiles need two rounds, and two memory runs, or more")
    arguments.wrappers = [wrapper for wrapper in WRAPPERS if wrapper in arguments.wrappers]
    if arguments.quick:
        arguments.rounds, arguments.memory_runs = 4, 2
    return arguments


def main() -> None:
    arguments = parse()
    rows = measure(arguments)
    report(f"DistributedDataParallel on {WORLD} gloo ranks of one thread each", rows, arguments.json)


if __name__ == "__main__":
    main()
