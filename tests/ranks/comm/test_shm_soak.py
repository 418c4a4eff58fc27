"""Short runs of the programs in tests/soak: every collective, every size that matters, a rank lost."""

import random
import signal
from collections import deque

import chaos
import pytest
import shm_soak
import torch
from shm_soak import DTYPES, KINDS, OPS, Stream, Task
from torch import distributed

from paceline.comm.shm.segment import CHUNK_BYTES
from paceline.testing import RankPool

MIB = 1 << 20


@pytest.mark.parametrize(("world", "collectives"), [(3, 300), (8, 60)])
def test_mixed_collectives_on_several_groups(world: int, collectives: int) -> None:
    with RankPool(world, timeout=60.0) as pool:
        assert (
            sum(sum(counts.values()) for counts in pool.run(shm_soak.soak, collectives, world)) > collectives
        )


def at_the_bounds(rank: int) -> None:
    [stream] = [stream for stream in shm_soak.open_streams(rank, distributed.get_world_size())[-1:] if stream]
    chance = random.Random(rank)
    number = 0
    for kind in KINDS:
        for nbytes in (0, 1, 7, 4096, CHUNK_BYTES if kind == "all_reduce, two shots" else MIB):
            for more in (-1, 0, 1) if nbytes >= MIB else (0,):
                dtype = DTYPES[number % len(DTYPES)] if nbytes < MIB else torch.float32
                gap = chance.choice([None, 0, 3])
                check(stream, number, kind, nbytes // dtype.itemsize + more, dtype, gap)
                number += 1


def check(stream: Stream, number: int, kind: str, numel: int, dtype: torch.dtype, gap: int | None) -> None:
    op = list(OPS)[number % (2 if dtype.is_complex else 4)]
    task = Task(number, kind, stream, numel, dtype, op, number % stream.channel.size, number, gap)
    collective, verify = KINDS[kind][0](task)
    stream.channel.run(collective)
    verify()


def test_every_collective_at_the_bounds_of_chunks(pair: RankPool) -> None:
    pair.run(at_the_bounds)


@pytest.mark.parametrize(
    ("work", "way", "how"),
    [("collectives", "named", signal.SIGKILL), ("training", "nameless", signal.SIGKILL)],
)
def test_a_killed_rank_is_named_and_nothing_is_left(work: str, way: str, how: signal.Signals) -> None:
    plan = chaos.Round(world=2, work=work, way=way, victim=1, signal=how, after=0.05)
    _, wrong = chaos.play(plan, seed=0)
    assert not wrong


def test_a_judge_that_finds_nothing_wrong_with_anything_is_no_judge() -> None:
    plan = chaos.Round(world=2, work="training", way="named", victim=1, signal=signal.SIGSTOP, after=0.0)
    assert not chaos.judge(plan, 0, 4.9, "LateRankError: (missing ranks: [1], here: rank 0)")
    assert chaos.judge(plan, 0, 5.1, "LateRankError: (missing ranks: [1], here: rank 0)")
    assert chaos.judge(plan, 0, 1.0, "LateRankError: (missing ranks: [0, 1], here: rank 0)")
    assert chaos.judge(plan, 0, 1.0, "nothing")


def test_a_wrong_bit_is_found() -> None:
    stream: Stream = Stream(type("", (), {"rank": 0, "size": 2})(), deque())  # type: ignore[arg-type]
    task = Task(0, "broadcast", stream, 3, torch.float32, "sum", 0, 1, None)
    task.check(task.given(0), task.given(0))
    with pytest.raises(AssertionError, match="wrong result"):
        task.check(torch.tensor([0.0]), torch.tensor([-0.0]))
