"""Times training steps under several wrappers, which take turns on the same ranks.

Each rank holds a copy of the model for every side. The sides take turns in the same order on all ranks. Ranks
wait for each other before each turn, and a turn is over when the slowest rank is done.

What synchronisation adds is the step of a side minus the step of the module alone on the slower rank, in each
round. The slower rank is looked for in each step by itself: ranks that synchronise wait for each other in
each step, and cannot be faster than that. CPU time is that of all threads of all ranks together.
"""

import gc
import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import BenchError
from paceline.testing import run_ranks
from paceline.tools.bench.floor import Floor
from paceline.tools.bench.gradient_check import compare_gradients
from paceline.tools.bench.measure import Turn, samples, take_turns
from paceline.tools.bench.models import BenchModel, Step, Training
from paceline.torch_private import broadcast_coalesced

# torch rebuilds its buckets after the first step.
WARMUPS = 3
# In this many steps the module alone is checked for parameters without a gradient.
UNUSED_STEPS = 3
# A copy of the model needs at least this many times its parameters: parameters, gradients and buckets.
MEMORY_FACTOR = 3
# How many bytes of values are broadcast by one message.
BROADCAST_BYTES = 2**25
# A turn lasts this long or has this many steps: right after another side's turn, caches are cold.
TURN_SECONDS, TURN_STEPS = 0.02, 8
FEWEST_ROUNDS, MOST_ROUNDS = 4, 40


@dataclass(frozen=True)
class Side:
    """One of those that are compared: a wrapper, what it reduces through, how it keeps its buckets."""

    wrapper: str
    through: str | None = None
    views: bool = False
    lazy: bool = False

    def __str__(self) -> str:
        through = {None: "", "backend": "-on-paceline", "c10d": "-c10d"}[self.through]
        return f"{self.wrapper}{through}{'-views' if self.views else ''}{'-lazy' if self.lazy else ''}"

    @property
    def is_baseline(self) -> bool:
        """Whether others are compared with it: torch's wrapper on gloo."""
        return self.wrapper == "torch" and self.through is None

    @property
    def is_synchronised(self) -> bool:
        """Whether its gradients are averages, the same as those of the other synchronised sides."""
        return self not in (ALONE, BARRIER_ONLY)

    def wrap(self, module: nn.Module, *, has_unused: bool = False) -> nn.Module:
        """Wrap the module; ``has_unused`` if some of its parameters may get no gradient."""
        if self == ALONE:
            return module
        if self == BARRIER_ONLY:
            group = dist.new_group(backend="paceline")
            first = next(module.parameters())  # its gradient comes last
            first.register_post_accumulate_grad_hook(lambda _: dist.barrier(group))
            return module
        if self == FLOOR:
            Floor(module)
            return module
        options: dict[str, Any] = {"gradient_as_bucket_view": self.views}
        if self.lazy:  # which not every version of torch knows
            options["lazy_bucket_allocation"] = True
        if self.through == "backend":
            options["process_group"] = dist.new_group(backend="paceline")
        elif self.through == "c10d":
            options["transport"] = "c10d"
        if has_unused and self.wrapper == "torch":
            options["find_unused_parameters"] = True
        # By name, so that either wrapper can be measured without the other.
        wrapper = importlib.import_module(f"{self.wrapper}.nn.parallel").DistributedDataParallel
        wrapped: nn.Module = wrapper(module, **options)
        return wrapped


ALONE = Side("the module alone")
BARRIER_ONLY, FLOOR = Side("barrier-only"), Side("floor")
_PLAIN = [Side("torch"), Side("torch", "backend"), Side("paceline"), Side("paceline", "c10d")]
STEP_SIDES = {
    str(side): side for plain in _PLAIN for side in (plain, Side(plain.wrapper, plain.through, views=True))
} | {str(side): side for side in (BARRIER_ONLY, FLOOR)}


@dataclass(frozen=True)
class Repeats:
    """How many turns each side has, and how many steps a turn has."""

    rounds: int
    calls: int


@dataclass(frozen=True)
class TimeBudget:
    """How many seconds a model may be measured."""

    seconds: float

    def repeats(self, step_seconds: float, round_seconds: float) -> Repeats:
        """What fits into it, if the module alone takes ``step_seconds`` and all sides ``round_seconds``."""
        calls = max(1, min(TURN_STEPS, math.ceil(TURN_SECONDS / step_seconds)))
        rounds = int(self.seconds / (round_seconds * calls))
        return Repeats(max(FEWEST_ROUNDS, min(MOST_ROUNDS, rounds)), calls)


@dataclass(frozen=True)
class StepTimes:
    """What a step of each side costs, one value per round.

    Attributes:
        of: seconds per step; of the module alone, those of the slower rank in each step.
        cpu: CPU seconds per step, of all ranks together.
        waiting: seconds per step that a rank would wait on average for the slower rank if the module alone
            waited after each step, and nothing else were added.
    """

    of: Mapping[str, Sequence[float]]
    cpu: Mapping[str, Sequence[float]]
    waiting: Sequence[float]

    @classmethod
    def of_ranks(cls, ranks: Sequence[Mapping[str, Sequence[Turn]]]) -> Self:
        """Merge the turns of all ranks, which started each turn together."""
        # By side: for each round, every rank's turn.
        turns = {side: list(zip(*(rank[side] for rank in ranks), strict=True)) for side in ranks[0]}
        of = {side: [max(turn.mean_seconds for turn in round_) for round_ in turns[side]] for side in turns}
        alone = turns[str(ALONE)]
        of[str(ALONE)] = [
            fmean(map(max, zip(*(turn.seconds for turn in round_), strict=True))) for round_ in alone
        ]
        own = [fmean(turn.mean_seconds for turn in round_) for round_ in alone]
        cpu = {side: [sum(turn.mean_cpu for turn in round_) for round_ in turns[side]] for side in turns}
        return cls(of, cpu, [slower - each for slower, each in zip(of[str(ALONE)], own, strict=True)])

    def added(self, side: Side, *, parts: int = 1) -> list[float]:
        """What the wrapper adds to the step of the module alone, divided by ``parts``."""
        return _difference(self.of, side, parts)

    def cpu_added(self, side: Side, *, parts: int = 1) -> list[float]:
        """The same for CPU time."""
        return _difference(self.cpu, side, parts)


def _difference(of: Mapping[str, Sequence[float]], side: Side, parts: int) -> list[float]:
    return [(ours - alone) / parts for ours, alone in zip(of[str(side)], of[str(ALONE)], strict=True)]


@dataclass(frozen=True)
class StepResult:
    """A model's steps, as all ranks measured them.

    ``tensors`` and ``elements`` count trained parameters; ``unused`` names those that got no gradient in some
    step on some rank; ``warning`` says why the sides did not do the same work.
    """

    what: str
    times: StepTimes
    repeats: Repeats
    tensors: int
    elements: int
    unused: Sequence[str]
    warning: str | None


def time_steps(
    model: BenchModel,
    sides: Sequence[Side],
    repeats: Repeats | TimeBudget,
    *,
    world: int,
    threads: int = 1,
    timeout: float,
) -> StepResult:
    """Time the module alone and the sides on fresh ranks, each with that many threads."""
    args = (model, [ALONE, *sides], repeats, threads)
    return run_ranks(steps_on_rank, world, args=args, timeout=timeout)[0]


def steps_on_rank(
    rank: int, model: BenchModel, sides: Sequence[Side], repeats: Repeats | TimeBudget, threads: int
) -> StepResult:
    """Time the sides, of which the first is the module alone; the result is the same on all ranks."""
    os.dup2(2, 1)  # stdout is for the tables: what a user's model prints goes to stderr
    torch.set_num_threads(threads)
    alone = model.make(rank)
    check_memory(alone.module, copies=len(sides))
    broadcast_values(alone.module)
    unused = find_unused(rank, alone)
    trainings = {str(sides[0]): alone} | {
        str(side): wrapped(side, with_same_values(alone, model.make(rank)), has_unused=bool(unused))
        for side in sides[1:]
    }
    steps = {side: naming_side(side)(training.step()) for side, training in trainings.items()}
    warm_up(steps)
    chosen = repeats if isinstance(repeats, Repeats) else choose_repeats(repeats, steps)
    turns = take_turns(steps, rounds=chosen.rounds, calls=chosen.calls, before=dist.barrier)
    compared = {str(side): trainings[str(side)] for side in sides if side.is_synchronised}
    warning = compare_gradients(rank, alone, compared)
    # torch's wrapper can hang if it outlives the group.
    del trainings, steps, compared
    gc.collect()
    trained = [parameter for parameter in alone.module.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in trained)
    return StepResult(model.what, merged(turns), chosen, len(trained), elements, unused, warning)


def merged(turns: Mapping[str, Sequence[Turn]]) -> StepTimes:
    """What all ranks have measured."""
    ranks: list[Mapping[str, Sequence[Turn]]] = [turns for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, turns)
    return StepTimes.of_ranks(ranks)


def broadcast_values(module: nn.Module) -> None:
    """Give all ranks the first rank's values, as wrappers do."""
    tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
    broadcast_coalesced(dist.group.WORLD, tensors, BROADCAST_BYTES, 0)


def wrapped(side: Side, training: Training, *, has_unused: bool) -> Training:
    """The same training with the side's wrapper around the module."""
    with naming_side(str(side)):
        return replace(training, module=side.wrap(training.module, has_unused=has_unused))


@contextmanager
def naming_side(side: str) -> Iterator[None]:
    """Add the side to an error's notes: the model may work well with the other sides."""
    try:
        yield
    except Exception as error:
        error.add_note(f"this was raised under: {side}")
        raise


def with_same_values(first: Training, other: Training) -> Training:
    """The other training with the first one's values and inputs, in case the user's function made others."""
    other.module.load_state_dict(first.module.state_dict())
    return replace(other, args=first.args, kwargs=first.kwargs)


def find_unused(rank: int, training: Training) -> list[str]:
    """Parameters without a gradient in some step, on some rank; torch's wrapper needs a flag for them."""
    found: set[str] = set()
    for number in range(UNUSED_STEPS):
        training.backward(rank + number)
        found |= {
            name
            for name, parameter in training.module.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        }
    everyone: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    return sorted(set().union(*everyone))


def warm_up(steps: Mapping[str, Step]) -> None:
    """Take the first steps of each side, which are slower than later ones."""
    for step in steps.values():
        for _ in range(WARMUPS):
            step()


def choose_repeats(budget: TimeBudget, steps: Mapping[str, Step]) -> Repeats:
    """Measure a few steps, and divide the budget by the slowest rank's; the same on all ranks."""
    seconds = samples(steps, rounds=2, warmups=0, before=dist.barrier)
    least = {side: min(values) for side, values in seconds.items()}
    slow = torch.tensor([least[str(ALONE)], sum(least.values())], dtype=torch.float64)
    dist.all_reduce(slow, dist.ReduceOp.MAX)
    return budget.repeats(*slow.tolist())


def check_memory(module: nn.Module, *, copies: int) -> None:
    """Refuse a model whose copies do not fit into memory: the kernel would kill some process."""
    one = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    world = dist.get_world_size()
    wanted, available = one * MEMORY_FACTOR * copies * world, available_bytes()
    if wanted > available:
        raise BenchError(
            f"the model does not fit: {world} ranks with {copies} copies each, with gradients and buckets, "
            f"need {wanted / 1e9:.1f} GB or more (available: {available / 1e9:.1f} GB, "
            f"parameters and buffers: {one / 1e9:.2f} GB)"
        )


def available_bytes() -> int:
    """Memory that is available without swapping, or the container's limit if that is less."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        return min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group, or no limit
        return free
