"""Times training steps under several wrappers, which take turns on the same ranks.

Each rank holds a copy of the model for every side. The sides take turns in the same order on all ranks. Ranks
wait for each other before each turn, and a turn is over when the slowest rank is done.

What synchronisation adds is the step of a side minus the step of the module alone on the slower rank, in each
round. The slower rank is looked for in each step by itself: ranks that synchronise wait for each other in
each step, and cannot be faster than that. CPU time is that of all threads of all ranks together.
"""

import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import BenchError, StepError, UnsupportedError
from paceline.testing import run_ranks
from paceline.tools.bench.gradient_check import compare_gradients
from paceline.tools.bench.measure import Turn, samples, take_turns
from paceline.tools.bench.models import SGD, BenchModel, OptimizerKind, Training, TrainingStep
from paceline.tools.bench.sides import ALONE, Side
from paceline.torch_private import broadcast_coalesced

# torch rebuilds its buckets after the first step.
WARMUPS = 3
# In this many steps the module alone is checked for parameters without a gradient.
UNUSED_STEPS = 3
# A copy of the model needs at least this many times its parameters, and the optimizer's state: parameters,
# gradients and buckets.
MEMORY_FACTOR = 3
# How many bytes of values are broadcast by one message.
BROADCAST_BYTES = 2**25
# A turn lasts this long or has this many steps: right after another side's turn, caches are cold.
TURN_SECONDS, TURN_STEPS = 0.02, 8
FEWEST_ROUNDS, MOST_ROUNDS = 4, 40


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
    step on some rank; ``warning`` says why the sides did not do the same work; ``refused`` has the sides
    whose optimizer refused the model, with its words.
    """

    what: str
    times: StepTimes
    repeats: Repeats
    tensors: int
    elements: int
    unused: Sequence[str]
    warning: str | None
    refused: Mapping[str, str] = field(default_factory=dict)


def time_steps(
    model: BenchModel,
    sides: Sequence[Side],
    repeats: Repeats | TimeBudget,
    *,
    world: int,
    threads: int = 1,
    timeout: float,
    kind: OptimizerKind = SGD,
) -> StepResult:
    """Time the module alone and the sides on fresh ranks, each with that many threads."""
    args = (model, sides, repeats, threads, kind)
    return run_ranks(steps_on_rank, world, args=args, timeout=timeout)[0]


def steps_on_rank(
    rank: int,
    model: BenchModel,
    sides: Sequence[Side],
    repeats: Repeats | TimeBudget,
    threads: int,
    kind: OptimizerKind,
) -> StepResult:
    """Time the module alone and the sides; the result is the same on all ranks."""
    os.dup2(2, 1)  # stdout is for the tables: what a user's model prints goes to stderr
    torch.set_num_threads(threads)
    alone = replace(model.make(rank), make_optimizer=kind.make)
    check_memory(alone.module, copies=1 + len(sides), factor=MEMORY_FACTOR + kind.state_copies)
    broadcast_values(alone.module)
    unused = find_unused(rank, alone)
    steps, refused = make_steps(rank, model, alone, sides, kind, has_unused=bool(unused))
    calls = {side: naming_side(side)(step) for side, step in steps.items()}
    warm_up(calls)
    chosen = repeats if isinstance(repeats, Repeats) else choose_repeats(repeats, calls)
    turns = take_turns(calls, rounds=chosen.rounds, calls=chosen.calls, before=dist.barrier)
    compared = {str(side): steps[str(side)] for side in sides if side.is_synchronised and str(side) in steps}
    warning = compare_gradients(rank, alone, compared)
    # torch's wrapper can hang if it outlives the group.
    del steps, calls, compared
    gc.collect()
    trained = [parameter for parameter in alone.module.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in trained)
    return StepResult(model.what, merged(turns), chosen, len(trained), elements, unused, warning, refused)


def make_steps(
    rank: int,
    model: BenchModel,
    alone: Training,
    sides: Sequence[Side],
    kind: OptimizerKind,
    *,
    has_unused: bool,
) -> tuple[dict[str, TrainingStep], dict[str, str]]:
    """The steps of the module alone and of the sides, and why optimizers of other sides refused the model."""
    steps, refused = {str(ALONE): alone.step()}, {}
    for side in sides:
        training = wrapped(side, with_same_values(alone, model.make(rank)), kind, has_unused=has_unused)
        words = None
        try:
            with naming_side(str(side)):
                step = steps[str(side)] = training.step()
                if side.optimizer is not None:  # it may refuse what the model does in a step
                    step()
        except (UnsupportedError, StepError) as error:
            words = str(error)
        if (words := first_words(words)) is not None:
            steps.pop(str(side), None)
            refused[str(side)] = words
    return steps, refused


def first_words(own: str | None) -> str | None:
    """What the first rank says that says anything; the same on all ranks."""
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return next((words for words in everyone if words is not None), None)


def merged(turns: Mapping[str, Sequence[Turn]]) -> StepTimes:
    """What all ranks have measured."""
    ranks: list[Mapping[str, Sequence[Turn]]] = [turns for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, turns)
    return StepTimes.of_ranks(ranks)


def broadcast_values(module: nn.Module) -> None:
    """Give all ranks the first rank's values, as wrappers do."""
    tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
    broadcast_coalesced(dist.group.WORLD, tensors, BROADCAST_BYTES, 0)


def wrapped(side: Side, training: Training, kind: OptimizerKind, *, has_unused: bool = False) -> Training:
    """The same training with the side's wrapper around the module, and the side's optimizer."""
    with naming_side(str(side)):
        module = side.wrap(training.module, has_unused=has_unused)
    return replace(training, module=module, make_optimizer=partial(side.make_optimizer, kind=kind))


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


def warm_up(steps: Mapping[str, Callable[[], object]]) -> None:
    """Take the first steps of each side, which are slower than later ones."""
    for step in steps.values():
        for _ in range(WARMUPS):
            step()


def choose_repeats(budget: TimeBudget, steps: Mapping[str, Callable[[], object]]) -> Repeats:
    """Measure a few steps, and divide the budget by the slowest rank's; the same on all ranks."""
    seconds = samples(steps, rounds=2, warmups=0, before=dist.barrier)
    least = {side: min(values) for side, values in seconds.items()}
    slow = torch.tensor([least[str(ALONE)], sum(least.values())], dtype=torch.float64)
    dist.all_reduce(slow, dist.ReduceOp.MAX)
    return budget.repeats(*slow.tolist())


def check_memory(module: nn.Module, *, copies: int, factor: int) -> None:
    """Refuse a model whose copies do not fit into memory: the kernel would kill some process.

    Args:
        module: one copy.
        copies: how many copies a rank has.
        factor: how many times its parameters a copy needs.
    """
    one = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    world = dist.get_world_size()
    wanted, available = one * factor * copies * world, available_bytes()
    if wanted > available:
        raise BenchError(
            f"the model does not fit: {world} ranks with {copies} copies each, with gradients, buckets and "
            f"optimizer state, need {wanted / 1e9:.1f} GB or more (available: {available / 1e9:.1f} GB, "
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
