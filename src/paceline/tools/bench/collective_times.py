"""Times a collective on gloo and on paceline, and copying the same bytes, in turns on the same ranks.

The sides:
  gloo     torch.distributed on a gloo group
  backend  torch.distributed on a group of the backend "paceline", with ordinary tensors
  shared   paceline's own all-reduce, of tensors that live in shared memory, as DistributedDataParallel's
           buckets do; there is none for the other collectives
  memcpy   copy_ between two private tensors, on all ranks at once, of as many bytes as a rank must read and
           write at least: an all-reduce of N bytes reads N (its slice of every rank's tensor) and writes N

The size of a case is that of the larger of a rank's two tensors, of float32; a KB has 1,024 bytes. A turn is
many calls in a row, fewer for larger tensors. Ranks wait for each other before it, by a call that is not
timed, and it is over when the slowest rank is done. Results are checked before and after: equal to those of
the first side up to rounding; those of paceline also bit-equal on all ranks, and before and after.
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
from paceline.tools.formatting import plural
from paceline.torch_private import all_gather_single, reduce_scatter_single

COLLECTIVE_SIDES = ("gloo", "backend", "shared", "memcpy")
PACELINE_SIDES = ("backend", "shared")
KB, MB = 1024, 1024**2
ITEM_BYTES = 4

# Seconds per call of each side, one value per round.
SecondsBySide = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class CollectiveSpec:
    """One of torch.distributed's collectives.

    Attributes:
        call: calls it with an output, an input and a group.
        input_parts: given the world size, how many inputs make up the size of a case.
        output_parts: the same for outputs; None if the input is overwritten.
        same_on_all_ranks: whether all ranks have the same output.
    """

    call: Callable[[Tensor, Tensor, Any], object]
    input_parts: Callable[[int], int]
    output_parts: Callable[[int], int] | None
    same_on_all_ranks: bool

    def tensors(self, count: int, world: int) -> tuple[Tensor, Tensor]:
        """An output and an input for a case of ``count`` elements; they may be the same tensor."""
        # Zeros are written: the kernel maps all pages that were never written to one and the same page.
        data = torch.empty(count // self.input_parts(world)).zero_()
        if self.output_parts is None:
            return data, data
        return torch.empty(count // self.output_parts(world)).zero_(), data

    def bytes_to_copy(self, size: int, world: int) -> int:
        """How many bytes a copy must have to read and write as many as each rank must."""
        read, written = size, size // (self.output_parts or one)(world)
        return (read + written) // 2


def one(_: int) -> int:
    """The tensor has the whole size."""
    return 1


def one_per_rank(world: int) -> int:
    """The tensor is a rank's part of the size."""
    return world


COLLECTIVES = {
    "all_reduce": CollectiveSpec(
        lambda out, _, group: dist.all_reduce(out, group=group), one, None, same_on_all_ranks=True
    ),
    "broadcast": CollectiveSpec(
        lambda out, _, group: dist.broadcast(out, 0, group), one, None, same_on_all_ranks=True
    ),
    "all_gather": CollectiveSpec(
        lambda out, data, group: all_gather_single(out, data, group),
        one_per_rank,
        one,
        same_on_all_ranks=True,
    ),
    "reduce_scatter": CollectiveSpec(
        lambda out, data, group: reduce_scatter_single(out, data, group=group),
        one,
        one_per_rank,
        same_on_all_ranks=False,
    ),
    "all_to_all": CollectiveSpec(
        lambda out, data, group: dist.all_to_all_single(out, data, group=group),
        one,
        one,
        same_on_all_ranks=False,
    ),
}


@dataclass(frozen=True)
class CollectiveCase:
    """A collective of one size on a number of ranks."""

    collective: str
    world: int
    size: int

    def __str__(self) -> str:
        return f"{self.collective} of {format_size(self.size)}, {plural(self.world, 'rank')}"

    @property
    def calls(self) -> int:
        """How many calls a turn has: many short ones, but no turn takes seconds."""
        return max(2, min(400 // self.world, 200 * MB // (self.size * self.world)))


@dataclass(frozen=True)
class PreparedCall:
    """A side's call, ready to be made, with its tensors."""

    call: Callable[[], object]
    output: Tensor
    input: Tensor

    def result(self, data: Tensor) -> Tensor:
        """The output of a call with ``data`` as input."""
        self.input.copy_(data)
        self.call()
        return self.output


@contextmanager
def backend_group() -> Iterator[Any]:
    """A group of all ranks on the backend "paceline"."""
    group = dist.new_group(backend="paceline")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def prepare(side: str, case: CollectiveCase, stack: ExitStack) -> PreparedCall:
    """A side's call; the stack closes what it opens."""
    match side:
        case "gloo":
            return through_torch(case, dist.group.WORLD)
        case "backend":
            return through_torch(case, stack.enter_context(backend_group()))
        case "shared":
            return in_shared_memory(case)
        case _:
            count = COLLECTIVES[case.collective].bytes_to_copy(case.size, case.world) // ITEM_BYTES
            to, data = torch.empty(count).zero_(), torch.empty(count).zero_()
            return PreparedCall(lambda: to.copy_(data), to, data)


def through_torch(case: CollectiveCase, group: Any) -> PreparedCall:
    """torch.distributed's call, with ordinary tensors."""
    collective = COLLECTIVES[case.collective]
    output, data = collective.tensors(case.size // ITEM_BYTES, case.world)
    return PreparedCall(lambda: collective.call(output, data, group), output, data)


def ranks_share_memory(_: int) -> bool:
    """Whether ranks share memory, so that the side "shared" can be measured; the same on all ranks."""
    group = Group(dist.group.WORLD)
    group.share_memory(nbytes=MB)
    return group.shared is not None


def in_shared_memory(case: CollectiveCase) -> PreparedCall:
    """Our own all-reduce, of a tensor in shared memory."""
    group = Group(dist.group.WORLD)
    group.share_memory(nbytes=case.size)
    storage = group.empty(case.size // ITEM_BYTES, dtype=torch.float32, device=torch.device("cpu")).zero_()
    first = group.all_reduce(storage)
    first.wait(lambda: None)
    if isinstance(first, WorkPending):
        raise BenchError("these ranks share no memory: leave out this side (side: shared)")
    return PreparedCall(lambda: group.all_reduce(storage).wait(lambda: None), storage, storage)


def seconds_on_rank(
    rank: int, case: CollectiveCase, sides: Sequence[str], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Check and time the sides."""
    with ExitStack() as stack:
        prepared = {side: prepare(side, case, stack) for side in sides}
        collectives = {side: call for side, call in prepared.items() if side != "memcpy"}
        before = check_results(rank, case, collectives)
        turns = {side: call.call for side, call in prepared.items()}
        seconds = samples(turns, rounds=rounds, calls=calls, before=dist.barrier, untimed=1)
        after = check_results(rank, case, collectives)
        assert after == before, f"a result differs from the same one before ({case})"
    return seconds


def check_results(rank: int, case: CollectiveCase, calls: Mapping[str, PreparedCall]) -> dict[str, bytes]:
    """Make sure that all sides have the same result; returns a digest of each of paceline's results."""
    digests: dict[str, bytes] = {}
    expected: Tensor | None = None
    for side, call in calls.items():
        torch.manual_seed(rank)
        result = call.result(torch.randn_like(call.input))
        expected = result.clone() if expected is None else expected
        torch.testing.assert_close(result, expected)
        if side in PACELINE_SIDES:
            digests[side] = hashlib.sha256(result.numpy().data).digest()
        # Sums of sums would soon be infinite; zeros stay zeros.
        call.input.zero_()
    if COLLECTIVES[case.collective].same_on_all_ranks:
        everyone: list[dict[str, bytes]] = [{} for _ in range(case.world)]
        dist.all_gather_object(everyone, digests)
        assert everyone == [digests] * case.world, f"ranks have different results ({case})"
    return digests


def sides_of(collective: str, sides: Sequence[str]) -> list[str]:
    """Those of the sides that have this collective."""
    return [side for side in sides if side != "shared" or collective == "all_reduce"]


def time_case(
    pool: RankPool, case: CollectiveCase, sides: Sequence[str], *, rounds: int, calls: int
) -> SecondsBySide:
    """Time all sides that have the collective."""
    return slowest(pool.run(seconds_on_rank, case, sides_of(case.collective, sides), rounds, calls))


def format_size(size: int) -> str:
    """A size as users give it: 64 KB, 25 MB."""
    return f"{size // MB} MB" if size % MB == 0 else f"{size / KB:g} KB"
