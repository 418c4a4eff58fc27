"""Gradients of shards, added up on several ranks as on one."""

import math
import struct

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.ddp.reducer.shard_sums import ShardSums
from paceline.shard_tree import Node, ShardTree

# Of very different sizes, so that another order of additions has other bits; zeros of both signs too.
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e8, -1e8, 3e-8, 0.1, 1 / 3])


def serial(tree: ShardTree, values: list[float | None]) -> float:
    """What the tree's order gives in float32, where a missing gradient counts as 0."""
    leaves = {Node(shard, shard + 1): 0.0 if value is None else value for shard, value in enumerate(values)}
    return tree.fold(leaves, lambda left, right: _rounded(_rounded(left) + _rounded(right)))


def _rounded(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def on_ranks(tree: ShardTree, values: list[float | None], world: int) -> Tensor:
    """The sum over ranks that each add up their own shards, and then their nodes."""
    nodes: dict[Node, Tensor] = {}
    for rank in range(world):
        parameter = nn.Parameter(torch.zeros(1))
        sums = ShardSums(tree, [parameter])
        share = tree.share(rank, world)
        sums.begin(share[-1])
        apart: list[list[Tensor | None]] = []
        for shard in reversed(share):
            sums.expect(shard, is_last=shard == share[0])
            value = values[shard]
            parameter.grad = None if value is None else torch.tensor([value])
            if shard == share[0]:
                apart = sums.add_to_last([0])
            else:
                sums.keep(None)
        found = [parameter.grad, *(each[0] for each in apart)]
        sent = [torch.zeros(1) if each is None else each for each in found]
        nodes |= dict(zip(tree.nodes(rank, world), sent, strict=True))
    return tree.fold(nodes, torch.add)


@given(st.lists(st.none() | NUMBERS, min_size=1, max_size=13), st.data())
def test_the_sum_has_the_bits_of_a_serial_sum_in_the_trees_order(
    values: list[float | None], data: st.DataObject
) -> None:
    tree = ShardTree(len(values))
    world = data.draw(st.integers(1, len(values)))
    found, expected = on_ranks(tree, values, world).item(), _rounded(serial(tree, values))
    assert (found, math.copysign(1, found)) == (expected, math.copysign(1, expected))


def test_rows_of_sparse_gradients_stay_in_the_order_of_the_shards() -> None:
    parameter = nn.Parameter(torch.zeros(3, 1))
    sums = ShardSums(ShardTree(3), [parameter])
    sums.begin(2)
    for shard in (2, 1, 0):
        sums.expect(shard, is_last=shard == 0)
        rows = torch.tensor([[1, 1]])
        parameter.grad = torch.sparse_coo_tensor(
            rows, torch.tensor([[shard + 1.0], [10.0]]), (3, 1), check_invariants=False
        )
        if shard:
            sums.keep(None)
    assert sums.add_to_last([0], all_nodes=True) == []
    assert parameter.grad is not None
    assert parameter.grad._values().flatten().tolist() == [11.0, 12.0, 13.0]


def test_weights_of_shards_are_added_up_until_the_next_step() -> None:
    sums = ShardSums(ShardTree(4), [nn.Parameter(torch.zeros(1))])
    sums.begin(3)
    sums.keep(2.0)
    sums.expect(2, is_last=False)
    sums.keep(3.0)
    assert (sums.weight, sums.is_weighted, sums.has_earlier) == (5.0, True, True)
    sums.begin(3)
    assert (sums.weight, sums.is_weighted, sums.has_earlier) == (0.0, False, False)
