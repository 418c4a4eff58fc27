"""Sums over the ranks of one host, neighbours first, and scaled."""

import pytest
import torch
import torch.distributed as dist

from paceline.comm.group import Group
from paceline.comm.shm.collectives import Scaling
from paceline.shard_tree import Node, ShardTree
from paceline.testing import run_ranks


def given(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)


def reduce(_: int, numel: int, scales: list[int], transport: str) -> tuple[bool, list[bool]]:
    """Whether neighbours are added first; whether the sum is right, for each number of scaled elements."""
    group = Group(dist.group.WORLD)
    if transport == "auto":
        group.share_memory(nbytes=4 * numel)
    tensor = group.empty(numel, dtype=torch.float32, device=torch.device("cpu"))
    nodes = {Node(rank, rank + 1): given(rank, numel) for rank in range(group.size)}
    right = []
    for scaled in scales:
        tensor.copy_(given(group.rank, numel))
        group.all_reduce_scaled(tensor, Scaling(scaled, 1 / 3)).wait(lambda: None)
        wanted = ShardTree(group.size).fold(nodes, torch.add).clone()
        wanted[:scaled] *= 1 / 3
        right.append(torch.equal(tensor, wanted))
    return group.adds_neighbours_first, right


@pytest.mark.parametrize("numel", [5, 3_000, 3_000_001], ids=["tiny", "one shot", "two shots"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7])
def test_ranks_add_up_as_the_tree_does_and_scale_the_first_elements(world: int, numel: int) -> None:
    found = run_ranks(reduce, world, args=(numel, [0, numel - 2, numel], "auto"), timeout=60)
    assert found == [(True, [True] * 3)] * world


def test_two_ranks_do_so_over_the_process_group_too_and_three_do_not() -> None:
    assert run_ranks(reduce, 2, args=(1000, [998], "c10d"), timeout=60) == [(True, [True])] * 2
    [first, *_] = run_ranks(reduce, 3, args=(1000, [998], "c10d"), timeout=60)
    assert first[0] is False
