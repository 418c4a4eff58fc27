"""How much memory the ranks hold together in training steps, minus what they held before wrapping.

It is Linux's proportional set size (PSS), in which a page that n processes share counts 1/n in each, so that
the sum over ranks counts it once. File pages, which are the code of libraries, are left out, because their
count depends on what else runs. The kernel keeps no peak of the PSS, so it is read at some points: after
forward, at some of backward's gradients before the wrapper sees them, after backward, and after the
optimizer's step. At each point the ranks wait for each other before and after reading, so that the sum is of
one moment. What is allocated and freed between two points is missed. Each figure is from fresh ranks.
"""

import ctypes
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.testing import run_ranks
from paceline.tools.bench.measure import Size, size
from paceline.tools.bench.models import BenchModel, Training
from paceline.tools.bench.step_times import Side

MEMORY_STEPS = 5
# How many gradients of a backward are reading points, evenly spread: reading takes 15 ms.
MEMORY_GRADIENTS = 8
TIMEOUT_SECONDS = 3600.0


def peak_memory(model: BenchModel, sides: Sequence[Side], *, world: int, runs: int) -> dict[Side, Size]:
    """Each side's peak, in several runs: it depends on what happens to overlap."""
    peaks = [[max(held_memory(model, side, world=world)) for side in sides] for _ in range(runs)]
    return {side: size(values) for side, values in zip(sides, zip(*peaks, strict=True), strict=True)}


def held_memory(
    model: BenchModel,
    side: Side,
    on_rank: Callable[[int, BenchModel, Side], list[int]] | None = None,
    *,
    world: int,
) -> list[int]:
    """What the ranks hold together at each point of the steps, minus what they held before.

    ``on_rank`` is what a rank calls to find out; ``held_on_rank`` by default.
    """
    ranks = run_ranks(on_rank or held_on_rank, world, args=(model, side), timeout=TIMEOUT_SECONDS)
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
