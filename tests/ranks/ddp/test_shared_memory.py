"""Wrappers in shared memory: in threads, on several groups, copied on one rank, and steps given up."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import batches
import pytest
import torch
from threads import in_threads
from torch import Tensor, distributed, nn

from paceline import DistributedDataParallel
from paceline.errors import PacelineError
from paceline.testing import RankPool

LAYERS, WIDTH = 4, 40

rows = functools.partial(batches.rows, count=3, width=WIDTH, dtype=torch.float64)


class Net(nn.Module):
    """Layers in several buckets, and a place to fail in, on the way there or back."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)).double()

    def forward(self, x: Tensor, fail: str = "") -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 1 and fail == "forward":
                raise ZeroDivisionError
            if number == 1 and fail == "backward":
                x.register_hook(_raise)
        return x.square().sum()


def _raise(_: Tensor) -> None:
    raise ZeroDivisionError


def wrap(seed: int, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(Net(seed), bucket_cap_mb=0.02, **options)
    assert ddp._group.shared is not None
    return ddp


def check_step(ddp: DistributedDataParallel, step: int, ranks: Sequence[int]) -> None:
    """The average of what each rank's rows alone give."""
    ddp.zero_grad()
    ddp(rows(distributed.get_rank(), step)).backward()
    alone = copy.deepcopy(ddp.module)
    alone.zero_grad()
    for rank in ranks:
        (alone(rows(rank, step)) / len(ranks)).backward()
    for ours, wanted in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-9, atol=1e-12)


def everyone() -> range:
    return range(distributed.get_world_size())


def several(_: int) -> None:
    wrappers = [wrap(seed) for seed in range(3)]

    def train(seed: int) -> None:
        for step in range(6):
            check_step(wrappers[seed], step, everyone())

    in_threads(train, 3)


def test_wrappers_train_in_threads_on_one_group(ranks: RankPool) -> None:
    ranks.run(several)


def on_groups(rank: int) -> None:
    parts = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]
    groups = [distributed.new_group(part) for part in parts]
    mine = [
        (part, wrap(seed, process_group=group))
        for seed, (part, group) in enumerate(zip(parts, groups, strict=True))
        if rank in part
    ]
    for step in range(3):
        for part, ddp in mine:
            check_step(ddp, step, part)
    assert len({ddp._group.shared._channel._segment.inode for _, ddp in mine}) == len(mine)


def test_wrappers_on_several_groups(four: RankPool) -> None:
    four.run(on_groups)


def copied_on_one(rank: int) -> None:
    ddp = wrap(0)
    check_step(ddp, 0, everyone())
    copied = copy.deepcopy(ddp) if rank == 0 else None
    check_step(ddp, 1, everyone())
    del copied
    for step in range(2, 4):
        check_step(ddp, step, everyone())


def test_a_copy_on_one_rank_does_not_disturb_the_others(pair: RankPool) -> None:
    pair.run(copied_on_one)


def given_up(rank: int, where: str, *, then: str) -> list[str]:
    ddp = wrap(0)
    said = []
    for step in range(3):
        check_step(ddp, step, everyone())
        ddp.zero_grad()
        try:
            ddp(rows(rank, step), fail=where if rank == 0 else "").backward()
        except (ZeroDivisionError, PacelineError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if then == "barrier":
            distributed.barrier()
    check_step(ddp, 3, everyone())
    return said


@pytest.mark.parametrize("then", ["barrier", "next step"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_one_rank_gives_up_is_lost_on_all_and_the_next_is_fine(
    ranks: RankPool, where: str, then: str
) -> None:
    own, *others = ranks.run(lost_step, where, then)
    assert [text.partition(":")[0] for text in own] == ["ZeroDivisionError"] * 3
    for said in others:
        assert len(said) == 3
        assert all("rank 0 raised" in text for text in said)


def lost_step(rank: int, where: str, then: str) -> list[str]:
    return given_up(rank, where, then=then)
