"""Mixed collectives in shared memory, each result compared bit by bit with what it must be.

python tests/soak/shm_soak.py --collectives 100000 --ranks 2 3 4 8 --seed 1

What is called, on which group and with which numbers follows from the seed, the same on every rank. Each rank
decides for itself whether its tensor lives in shared memory, when it sleeps, and when it waits.
"""

import argparse
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from paceline.comm.group import Group
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import Collective, Launched
from paceline.comm.shm.collectives import (
    STAGED_CHUNK_BYTES,
    AllToAll,
    Barrier,
    BroadcastBytes,
    Gather,
    OneShotReduce,
    ReduceScatter,
    Scatter,
    as_bytes,
)
from paceline.comm.shm.in_place import TwoShotAllReduce
from paceline.comm.shm.segment import CHUNK_BYTES
from paceline.comm.shm.transport import local_ranks_of
from paceline.testing import RankPool

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
OPS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": Tensor.add_,
    "product": Tensor.mul_,
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
}
MOST_IN_FLIGHT = 40
MOST_BYTES = 2 * CHUNK_BYTES + 16
# Bytes around which something changes.
BOUNDS = [0, 32 << 10, 1 << 20, CHUNK_BYTES, 2 * CHUNK_BYTES]


def numbers(dtype: torch.dtype) -> Tensor:
    """Enough numbers for any tensor; small ones, so that products stay finite."""
    generator = torch.Generator().manual_seed(0)
    numel = MOST_BYTES // dtype.itemsize + 10_000
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.promote_types(dtype, torch.float32)
        return torch.randn(numel, dtype=wide, generator=generator).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


TABLES = {dtype: numbers(dtype) for dtype in DTYPES}


@dataclass
class Stream:
    """One group's channel, and what is in flight in it."""

    channel: Channel
    in_flight: deque[tuple[Launched, Callable[[], None]]]


@dataclass
class Task:
    """One collective, on one rank."""

    number: int
    kind: str
    stream: Stream
    numel: int
    dtype: torch.dtype
    op: str
    root: int
    seed: int
    gap: int | None

    def given(self, rank: int, part: int = 0, numel: int | None = None) -> Tensor:
        """What a rank gives, which every rank can compute."""
        numel = self.numel if numel is None else numel
        table = TABLES[self.dtype]
        start = random.Random(f"{self.seed} {rank} {part}").randrange(table.numel() - numel)
        return table[start : start + numel].clone()

    def combined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Combined in that order."""
        result = tensors[0].clone()
        for other in tensors[1:]:
            OPS[self.op](result, other)
        return result

    def combined_neighbours_first(self, tensors: Sequence[Tensor]) -> Tensor:
        """Combined as a tournament: the first with the second, the third with the fourth, and so on."""
        level = list(tensors)
        while len(level) > 1:
            pairs = [self.combined(pair) for pair in zip(level[::2], level[1::2], strict=False)]
            level = pairs + level[len(level) - len(level) % 2 :]
        return level[0].clone()

    def combined_in_chunks(self, tensors: Sequence[Tensor], *, parts: int) -> Tensor:
        """The same in chunks: the last bit of a complex product depends on where it is cut."""
        step = STAGED_CHUNK_BYTES // parts // self.dtype.itemsize
        cut = zip(*(tensor.split(step) for tensor in tensors), strict=True)
        return torch.cat([self.combined(chunks) for chunks in cut])

    def own(self) -> Tensor:
        """What this rank gives; in shared memory, somewhere in a block, if it is to be there."""
        given = self.given(self.stream.channel.rank)
        if self.gap is None:
            return given
        block = self.stream.channel.arena.empty(self.gap + self.numel, self.dtype)
        return given if block is None else block[self.gap :].copy_(given)

    def check(self, found: Tensor, wanted: Tensor) -> None:
        """To the bit."""
        if not torch.equal(as_bytes(found), as_bytes(wanted)):
            raise AssertionError(
                f"wrong result (collective: {self.number}, {self.kind} {self.op}, {self.numel} {self.dtype}, "
                f"root: {self.root}, gap in block: {self.gap}, rank {self.stream.channel.rank} "
                f"of {self.stream.channel.size}, elements: {(found != wanted).sum()})"
            )


Begun = tuple[Collective, Callable[[], None]]


def two_shot(task: Task) -> Begun:
    tensor, channel = task.own(), task.stream.channel

    def check() -> None:
        given = [task.given(rank) for rank in range(channel.size)]
        step = CHUNK_BYTES // task.dtype.itemsize
        wanted = []
        for chunks in zip(*(each.split(step) for each in given), strict=True):
            share = -(-chunks[0].numel() // channel.size) or 1
            cut = list(zip(*(chunk.split(share) for chunk in chunks), strict=True))
            wanted += [task.combined_neighbours_first(parts) for parts in cut]
        task.check(tensor, torch.cat(wanted))

    return TwoShotAllReduce(channel, tensor, OPS[task.op], task.op), check


def one_shot(task: Task, root: int | None = None) -> Begun:
    tensor, channel = task.own(), task.stream.channel

    def check() -> None:
        given = [task.given(rank) for rank in range(channel.size)]
        if root in (None, channel.rank):
            step = STAGED_CHUNK_BYTES // task.dtype.itemsize
            chunks = zip(*(each.split(step) for each in given), strict=True)
            task.check(tensor, torch.cat([task.combined_neighbours_first(chunk) for chunk in chunks]))

    return OneShotReduce(channel, tensor, OPS[task.op], task.op, root=root), check


def reduce_to_one(task: Task) -> Begun:
    return one_shot(task, task.root)


def broadcast(task: Task) -> Begun:
    tensor, channel = task.own(), task.stream.channel
    return (
        BroadcastBytes(channel, as_bytes(tensor), root=task.root),
        lambda: task.check(tensor, task.given(task.root)),
    )


def all_gather(task: Task, root: int | None = None) -> Begun:
    channel = task.stream.channel
    wants = root in (None, channel.rank)
    outputs = [torch.empty(task.numel, dtype=task.dtype) for _ in range(channel.size if wants else 0)]

    def check() -> None:
        for rank, output in enumerate(outputs):
            task.check(output, task.given(rank))

    return Gather(channel, as_bytes(task.own()), [as_bytes(each) for each in outputs], root=root), check


def gather(task: Task) -> Begun:
    return all_gather(task, task.root)


def scatter(task: Task) -> Begun:
    channel = task.stream.channel
    output = torch.empty(task.numel, dtype=task.dtype)
    parts = range(channel.size) if channel.rank == task.root else ()
    inputs = [as_bytes(task.given(task.root, part)) for part in parts]
    return (
        Scatter(channel, as_bytes(output), inputs, root=task.root),
        lambda: task.check(output, task.given(task.root, channel.rank)),
    )


def reduce_scatter(task: Task) -> Begun:
    channel = task.stream.channel
    output = torch.empty(task.numel, dtype=task.dtype)
    inputs = [task.given(channel.rank, part) for part in range(channel.size)]

    def check() -> None:
        given = [task.given(rank, channel.rank) for rank in range(channel.size)]
        task.check(output, task.combined_in_chunks(given, parts=channel.size))

    return ReduceScatter(channel, output, inputs, OPS[task.op], task.op), check


def all_to_all(task: Task) -> Begun:
    channel = task.stream.channel
    size = channel.size
    # From each rank to each another length, from nothing to all.
    lengths = [
        [task.numel * ((giver + taker) % size) // max(1, size - 1) for taker in range(size)]
        for giver in range(size)
    ]
    inputs = [task.given(channel.rank, taker, lengths[channel.rank][taker]) for taker in range(size)]
    outputs = [torch.empty(lengths[giver][channel.rank], dtype=task.dtype) for giver in range(size)]
    longest = max(map(max, lengths)) * task.dtype.itemsize

    def check() -> None:
        for giver, output in enumerate(outputs):
            task.check(output, task.given(giver, channel.rank, output.numel()))

    return AllToAll(
        channel, [as_bytes(each) for each in outputs], [as_bytes(each) for each in inputs], longest
    ), check


def barrier(task: Task) -> Begun:
    return Barrier(task.stream.channel), lambda: None


KINDS: dict[str, tuple[Callable[[Task], Begun], int]] = {
    "all_reduce, two shots": (two_shot, 6),
    "all_reduce, one shot": (one_shot, 4),
    "reduce": (reduce_to_one, 1),
    "broadcast": (broadcast, 2),
    "all_gather": (all_gather, 2),
    "gather": (gather, 1),
    "scatter": (scatter, 1),
    "reduce_scatter": (reduce_scatter, 2),
    "all_to_all": (all_to_all, 2),
    "barrier": (barrier, 1),
}


@dataclass
class Plan:
    """What comes next: the same on every rank of the group that takes part, and what this rank decides."""

    common: random.Random
    own: random.Random
    streams: list[Stream | None]

    def next(self, number: int) -> Task | None:
        """The next collective; None if this rank is not in its group."""
        common = self.common
        stream = common.choice(self.streams)
        kind = common.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
        dtype = common.choice(DTYPES)
        op = common.choice(["sum", "product"] if dtype.is_complex else list(OPS))
        numel, root, seed = self._bytes() // dtype.itemsize, common.random(), common.getrandbits(60)
        if stream is None:
            return None
        gap = self.own.randrange(9) if self.own.random() < 0.5 else None
        return Task(number, kind, stream, numel, dtype, op, int(root * stream.channel.size), seed, gap)

    def _bytes(self) -> int:
        kind = self.common.random()
        if kind < 0.9:
            return self.common.randrange(4096)
        if kind < 0.99:
            return self.common.randrange(100_000)
        return max(0, self.common.choice(BOUNDS) + self.common.randrange(-17, 17))


def open_streams(rank: int, world: int) -> list[Stream | None]:
    """Two channels of everyone, and some of a part of the ranks."""
    parts = {tuple(range(world)), tuple(range(world - 1)), tuple(range(1, world)), (0, world - 1)}
    groups = [(list(part), distributed.new_group(list(part))) for part in sorted(parts) if len(part) > 1]
    groups.append((list(range(world)), distributed.group.WORLD))
    streams: list[Stream | None] = []
    for ranks, process_group in groups:
        stream = None
        if rank in ranks:
            group = Group(process_group)
            local_ranks = local_ranks_of(process_group, group)
            assert local_ranks is not None
            channel = local_ranks.open_channel(group, nbytes=1 << 20, timeout=120.0)
            assert channel is not None
            stream = Stream(channel, deque())
        streams.append(stream)
    return streams


def soak(rank: int, collectives: int, seed: int) -> Counter[str]:
    """Run them; returns how many of each kind this rank took part in."""
    world = distributed.get_world_size()
    streams = open_streams(rank, world)
    mine = [stream for stream in streams if stream is not None]
    plan = Plan(random.Random(seed), random.Random(f"{seed} {rank}"), streams)
    counts: Counter[str] = Counter()
    for number in range(collectives):
        task = plan.next(number)
        if task is None:
            continue
        counts[task.kind] += 1
        collective, check = KINDS[task.kind][0](task)
        task.stream.in_flight.append((task.stream.channel.launch(collective), check))
        del collective
        if plan.own.random() < 0.002:
            time.sleep(plan.own.random() / 50)
        if plan.own.random() < 0.5 or len(task.stream.in_flight) > MOST_IN_FLIGHT:
            wait_for_some(plan.own.choice(mine), plan.own)
        while len(task.stream.in_flight) > MOST_IN_FLIGHT:
            wait_for_some(task.stream, plan.own)
    for stream in mine:
        while stream.in_flight:
            wait_for_some(stream, plan.own)
    distributed.barrier()
    return counts


def wait_for_some(stream: Stream, chance: random.Random) -> None:
    """Wait for one that is in flight, and for those before it."""
    for _ in range(chance.randint(1, max(1, len(stream.in_flight)))):
        if stream.in_flight:
            launched, check = stream.in_flight.popleft()
            stream.channel.wait(launched)
            check()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collectives", type=int, default=10_000, help="with each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8], metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for world in options.ranks:
        start = time.monotonic()
        with RankPool(world, timeout=60.0 + options.collectives / 5) as pool:
            counts = pool.run(soak, options.collectives, options.seed)
        print(
            f"{world} ranks, {options.collectives} collectives, {time.monotonic() - start:.0f} s: no mismatch"
        )
        print(f"    of which rank 0 took part in {sum(counts[0].values())}: {dict(counts[0])}", flush=True)


if __name__ == "__main__":
    main()
