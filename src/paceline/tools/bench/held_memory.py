"""How much memory the ranks hold together in training steps, minus what they held before.

It is Linux's proportional set size (PSS), in which a page that n processes share counts 1/n in each, so that
the sum over ranks counts it once. File pages, which are the code of libraries, are left out, because their
count depends on what else runs. The kernel keeps no peak of the PSS, so it is read at some points: after
forward, at some of backward's gradients before the wrapper sees them, after backward, and after the
optimizer's step. At each point the ranks wait for each other before and after reading, so that the sum is of
one moment. What is allocated and freed between two points is missed. Each figure is from fresh ranks.

"Before" is either before the module was wrapped, or before it was made. Since then, all of these count on
every side: parameters, buffers and inputs of the module, what forward keeps for backward, gradients, buckets,
and the optimizer's state. What a step leaves behind in any case, such as the code that it has loaded, was
there before: an earlier copy of the module has taken a step and is gone.

malloc keeps freed memory for later, so that a process may hold more than it uses, by as much as a few copies
of the parameters. That counts, because nobody else can use it. ``in_use`` leaves it out: malloc then gives
back at once what is freed. Shared memory that is reserved counts from its first use on.
"""

import ctypes
import gc
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

from paceline.testing import run_ranks
from paceline.tools.bench.models import SGD, BenchModel, OptimizerKind
from paceline.tools.bench.sides import Side
from paceline.tools.bench.step_times import wrapped

MEMORY_STEPS = 5
# How many gradients of a backward are reading points, evenly spread: reading takes 15 ms.
MEMORY_GRADIENTS = 8
# From mallopt(3): larger blocks are mapped by themselves, and unmapped when they are freed.
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 64 << 10
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class HeldMemory:
    """Bytes, of one rank or of all ranks together.

    Attributes:
        before_module: what was held before the module was made.
        before_wrapping: what was held before the module was wrapped.
        points: what was held at each point of the steps.
    """

    before_module: int
    before_wrapping: int
    points: Sequence[int]

    @classmethod
    def of_ranks(cls, ranks: Sequence["HeldMemory"]) -> Self:
        """What all ranks hold together."""
        return cls(
            sum(rank.before_module for rank in ranks),
            sum(rank.before_wrapping for rank in ranks),
            [sum(point) for point in zip(*(rank.points for rank in ranks), strict=True)],
        )

    @property
    def since_module(self) -> list[int]:
        """What is held at each point, minus what was held before the module was made."""
        return [held - self.before_module for held in self.points]

    @property
    def since_wrapping(self) -> list[int]:
        """What is held at each point, minus what was held before the module was wrapped."""
        return [held - self.before_wrapping for held in self.points]


@dataclass(frozen=True)
class MemoryCase:
    """What is measured on a rank.

    Attributes:
        model: the model.
        side: the wrapper and the optimizer's class.
        kind: which optimizer.
        gradients: how many gradients of a backward are reading points. With any, all ranks must compute the
            same gradients in the same order.
        in_use: whether to leave out what malloc keeps for later.
    """

    model: BenchModel
    side: Side
    kind: OptimizerKind = SGD
    gradients: int = MEMORY_GRADIENTS
    in_use: bool = False


def held_memory(case: MemoryCase, *, world: int, timeout: float) -> HeldMemory:
    """What fresh ranks hold together."""
    return HeldMemory.of_ranks(run_ranks(held_on_rank, world, args=(case,), timeout=timeout))


def held_on_rank(rank: int, case: MemoryCase) -> HeldMemory:
    """What this rank holds before it has a module, before that is wrapped, and at each point of the steps."""
    os.dup2(2, 1)  # stdout is for the tables: what a user's model prints goes to stderr
    if case.in_use:
        _LIBC.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    held: list[int] = []

    def point() -> None:
        # On a separate group, so that barriers do not mix with the wrapper's collectives.
        dist.barrier(group)
        held.append(held_bytes())
        dist.barrier(group)

    group = dist.new_group(backend="gloo")
    load_code(rank, case)
    gc.collect()
    _LIBC.malloc_trim(0)
    point()
    training = case.model.make(rank)
    point()
    trained = [parameter for parameter in training.module.parameters() if parameter.requires_grad]
    training = wrapped(case.side, training, case.kind)
    if case.gradients:
        for parameter in trained[:: math.ceil(len(trained) / case.gradients)]:
            parameter.register_hook(lambda _: point())
    step = training.step(point)
    for _ in range(MEMORY_STEPS):
        step()
    # torch's wrapper can hang if it outlives the group.
    del training, step
    gc.collect()
    return HeldMemory(held[0], held[1], held[2:])


def load_code(rank: int, case: MemoryCase) -> None:
    """Load the libraries that a step needs into memory, by a step of the module alone."""
    replace(case.model.make(rank), make_optimizer=case.kind.make).step()()
    dist.all_reduce(torch.zeros(1))
    if case.side.optimizer is not None:
        case.side.import_optimizer()


def held_bytes() -> int:
    """This rank's proportional set size, without file pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    parts = [line.split()[1] for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    return sum(map(int, parts)) * 1024
