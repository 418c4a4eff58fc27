"""Training steps under several wrappers, taking turns on the same ranks.

Each rank holds every side's copy of the model. The sides take turns in the same order on all ranks, which
meet before each turn; it is over when the slowest rank is done. What synchronisation adds is the step less
the step of the module alone, taken in each round.
"""

import gc
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import BenchError
from paceline.testing import run_ranks
from paceline.tools.bench.gradients import compare
from paceline.tools.bench.measure import samples, slowest
from paceline.tools.bench.sides import ALONE, Side
from paceline.tools.bench.training import Step, Subject, Training

# torch settles its buckets after the first step.
WARMUPS = 3
# Steps in which a parameter may turn out to get no gradient.
LOOKS = 3
# What a copy of the model takes at least, in its parameters: those, their gradients, and buckets.
COPY = 3
# A turn should last so long, or have so many steps: the first after another side's finds colder caches than
# training does.
TURN_SECONDS, TURN_STEPS = 0.02, 8
FEWEST_ROUNDS, MOST_ROUNDS = 4, 40


@dataclass(frozen=True)
class Pace:
    """How many turns each side has, and how many steps a turn has."""

    rounds: int
    calls: int


@dataclass(frozen=True)
class Budget:
    """How many seconds may be spent on a model, which decides on the pace."""

    seconds: float

    def pace(self, step: float, round_: float) -> Pace:
        """What can be done of steps that take so long, all sides' in a round so long."""
        calls = max(1, min(TURN_STEPS, math.ceil(TURN_SECONDS / step)))
        rounds = int(self.seconds / (round_ * calls))
        return Pace(max(FEWEST_ROUNDS, min(MOST_ROUNDS, rounds)), calls)


@dataclass(frozen=True)
class Seconds:
    """A model's step on each side, a value a round."""

    of: Mapping[str, Sequence[float]]

    def added(self, side: Side, *, parts: int = 1) -> list[float]:
        """What the wrapper adds to the module's own step, as a share of so many parts."""
        pairs = zip(self.of[str(side)], self.of[str(ALONE)], strict=True)
        return [(ours - alone) / parts for ours, alone in pairs]


@dataclass(frozen=True)
class Measured:
    """A model's steps, as a rank has measured them, or all ranks have.

    ``tensors`` and ``elements`` are those that are trained; ``unused`` names those that got no gradient in
    some step on some rank; ``wrong`` says why the sides have not done the same work.
    """

    what: str
    seconds: Seconds
    pace: Pace
    tensors: int
    elements: int
    unused: Sequence[str]
    wrong: str | None


def time_steps(
    subject: Subject,
    sides: Sequence[Side],
    pace: Pace | Budget,
    *,
    world: int,
    threads: int = 1,
    timeout: float,
) -> Measured:
    """Time the module alone and the sides on fresh ranks, of so many threads each."""
    args = (subject, [ALONE, *sides], pace, threads)
    ranks = run_ranks(steps_on_rank, world, args=args, timeout=timeout)
    return replace(ranks[0], seconds=Seconds(slowest([rank.seconds.of for rank in ranks])))


def steps_on_rank(
    rank: int, subject: Subject, sides: Sequence[Side], pace: Pace | Budget, threads: int
) -> Measured:
    """Time the sides, of which the first is the module alone."""
    os.dup2(2, 1)  # stdout has the tables; what a user's model prints must not get between them
    torch.set_num_threads(threads)
    alone = subject.make(rank)
    check_that_it_fits(alone.module, copies=len(sides))
    equalise(alone.module)
    unused = find_unused(rank, alone)
    trainings = {str(sides[0]): alone} | {
        str(side): wrapped(side, like(alone, subject.make(rank)), has_unused=bool(unused))
        for side in sides[1:]
    }
    steps = {side: naming(side)(training.step()) for side, training in trainings.items()}
    warm_up(steps)
    decided = pace if isinstance(pace, Pace) else decide(pace, steps)
    seconds = samples(steps, rounds=decided.rounds, calls=decided.calls, before=dist.barrier)
    compared = {str(side): trainings[str(side)] for side in sides if side.is_synchronised}
    wrong = compare(rank, alone, compared)
    # torch's wrapper can hang if it outlives the group.
    del trainings, steps, compared
    gc.collect()
    trained = [parameter for parameter in alone.module.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in trained)
    return Measured(subject.what, Seconds(seconds), decided, len(trained), elements, unused, wrong)


def equalise(module: nn.Module) -> None:
    """Give all ranks the first one's values, as wrappers do."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), 0)


def wrapped(side: Side, training: Training, *, has_unused: bool) -> Training:
    """The same training with the side's wrapper around the module."""
    with naming(str(side)):
        return replace(training, module=side.wrap(training.module, has_unused=has_unused))


@contextmanager
def naming(side: str) -> Iterator[None]:
    """Have what is raised say on which side it was: the others may do well with the model."""
    try:
        yield
    except Exception as error:
        error.add_note(f"this was raised under: {side}")
        raise


def like(first: Training, other: Training) -> Training:
    """The other with the first one's values and inputs, in case it was not made the same."""
    other.module.load_state_dict(first.module.state_dict())
    return replace(other, args=first.args, kwargs=first.kwargs)


def find_unused(rank: int, training: Training) -> list[str]:
    """Parameters that get no gradient in some step, on some rank; under torch's wrapper they need a flag."""
    found: set[str] = set()
    for look in range(LOOKS):
        training.backward(rank + look)
        found |= {
            name
            for name, parameter in training.module.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        }
    everyone: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    return sorted(set().union(*everyone))


def warm_up(steps: Mapping[str, Step]) -> None:
    """Take the steps that are not like those that follow."""
    for step in steps.values():
        for _ in range(WARMUPS):
            step()


def decide(budget: Budget, steps: Mapping[str, Step]) -> Pace:
    """The pace for steps as they are, by the slowest rank; the same on all ranks."""
    seconds = samples(steps, rounds=2, warmups=0, before=dist.barrier)
    least = {side: min(values) for side, values in seconds.items()}
    slow = torch.tensor([least[str(ALONE)], sum(least.values())], dtype=torch.float64)
    dist.all_reduce(slow, dist.ReduceOp.MAX)
    return budget.pace(*slow.tolist())


def check_that_it_fits(module: nn.Module, *, copies: int) -> None:
    """Refuse a model whose copies cannot all be in memory: nobody knows what the kernel would end."""
    one = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    world = dist.get_world_size()
    wanted, available = one * COPY * copies * world, available_bytes()
    if wanted > available:
        raise BenchError(
            f"the model does not fit: {world} ranks with {copies} copies each, with gradients and buckets, "
            f"need {wanted / 1e9:.1f} GB or more (available: {available / 1e9:.1f} GB, "
            f"parameters and buffers: {one / 1e9:.2f} GB)"
        )


def available_bytes() -> int:
    """Memory that can be had without swapping; less in a container that may not have as much."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        return min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or none that limits it
        return free
