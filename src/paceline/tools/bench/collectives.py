"""A collective on gloo and on paceline, and copying the same bytes, taking turns on the same ranks.

The sides:
  gloo     torch.distributed on a gloo group
  backend  torch.distributed on a group of the backend "paceline", with ordinary tensors
  shared   paceline's own all-reduce, of tensors that live in shared memory, as DistributedDataParallel's
           buckets do; there is none for the other collectives
  floor    copy_ between two tensors of a rank's own, on all ranks at once, of as many bytes as a rank has to
           read and write at least: for an all-reduce of N bytes it reads N (its slice of every rank's tensor)
           and writes N (the result, in place of those)

A size is what one rank holds of the larger of a collective's two tensors, of float32; a KB has 1,024 bytes.
A turn is many calls in a row, fewer of larger tensors; the ranks meet before it, by a call that is not timed,
and it is over when the slowest rank is done. Results are checked before and after a case is timed: equal to
those of the first side to rounding, and paceline's equal on all ranks, and before and after, to the bit.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.pending import WorkPending
from paceline.errors import BenchError
from paceline.testing import RankPool
from paceline.tools.bench.measure import samples, slowest

SIDES = ("gloo", "backend", "shared", "floor")
OURS = ("backend", "shared")
KB, MB = 1024, 1024**2
ITEM_BYTES = 4

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
    """A tensor of the whole size."""
    return 1


def one_of(world: int) -> int:
    """A tensor of a rank's part of the size."""
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
    """A side's call; the stack closes what it needs."""
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
    """torch.distributed's call, of ordinary tensors."""
    collective = COLLECTIVES[case.collective]
    output, data = collective.tensors(case.size // ITEM_BYTES, case.world)
    return Exercise(lambda: collective.call(output, data, group), output, data)


def can_share(_: int) -> bool:
    """Whether ranks share memory, so that all sides can be measured; on all ranks."""
    group = Group(dist.group.WORLD)
    group.share_memory(nbytes=MB)
    return group.shared is not None


def in_shared_memory(case: Case) -> Exercise:
    """Our own call, of a tensor in shared memory."""
    group = Group(dist.group.WORLD)
    group.share_memory(nbytes=case.size)
    storage = group.empty(case.size // ITEM_BYTES, dtype=torch.float32, device=torch.device("cpu")).zero_()
    first = group.all_reduce(storage)
    first.wait(lambda: None)
    if isinstance(first, WorkPending):
        raise BenchError("these ranks share no memory: leave the side out (side: shared)")
    return Exercise(lambda: group.all_reduce(storage).wait(lambda: None), storage, storage)


def seconds_on_rank(
    rank: int, case: Case, sides: Sequence[str], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Check and time the sides."""
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


def sides_of(collective: str, sides: Sequence[str]) -> list[str]:
    """Those of the sides that have such a collective."""
    return [side for side in sides if side != "shared" or collective == "all_reduce"]


def time_case(pool: RankPool, case: Case, sides: Sequence[str], *, rounds: int, calls: int) -> Seconds:
    """Seconds a call of each side that there is, a value a round."""
    return slowest(pool.run(seconds_on_rank, case, sides_of(case.collective, sides), rounds, calls))


def shown_size(size: int) -> str:
    """A size, as it is given."""
    return f"{size // MB} MB" if size % MB == 0 else f"{size / KB:g} KB"
