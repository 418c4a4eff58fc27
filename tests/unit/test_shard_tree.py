"""Which rank has which shards, and in which order they are added up."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import OptionError
from paceline.shard_tree import Node, ShardTree, split_rows

COUNTS = st.integers(1, 40)


def drawn(tree: ShardTree, node: Node) -> str:
    """A node's sum, written with parentheses."""
    leaves = {Node(shard, shard + 1): str(shard) for shard in range(tree.shards)}
    return tree._fold(node, leaves, lambda left, right: f"({left}+{right})")


@pytest.mark.parametrize(
    ("shards", "text"),
    [(1, "0"), (2, "(0+1)"), (3, "((0+1)+2)"), (6, "(((0+1)+(2+3))+(4+5))"), (4, "((0+1)+(2+3))")],
)
def test_neighbours_are_added_first(shards: int, text: str) -> None:
    tree = ShardTree(shards)
    assert drawn(tree, tree.root) == text


@given(COUNTS, st.data())
def test_the_number_of_ranks_does_not_change_the_sum(shards: int, data: st.DataObject) -> None:
    tree = ShardTree(shards)
    world = data.draw(st.integers(1, shards))
    nodes = [node for rank in range(world) for node in tree.nodes(rank, world)]
    found = tree.fold({node: drawn(tree, node) for node in nodes}, lambda left, right: f"({left}+{right})")
    assert found == drawn(tree, tree.root)


@given(COUNTS, st.data())
def test_every_shard_belongs_to_one_rank_and_no_rank_has_two_more_than_another(
    shards: int, data: st.DataObject
) -> None:
    world = data.draw(st.integers(1, shards))
    shares = [ShardTree(shards).share(rank, world) for rank in range(world)]
    assert [shard for share in shares for shard in share] == list(range(shards))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 17), st.integers(0, 2**32))
def test_ranks_in_pairs_add_neighbours_first_as_the_tree_does(shards: int, seed: int) -> None:
    tree, values = ShardTree(shards), random.Random(seed)
    leaves = {Node(shard, shard + 1): values.uniform(-1, 1) for shard in range(shards)}
    expected = tree.fold(leaves, lambda left, right: left + right)
    for world in filter(tree.is_in_pairs, range(1, shards + 1)):
        level = [
            tree._fold(tree.nodes(rank, world)[0], leaves, lambda left, right: left + right)
            for rank in range(world)
        ]
        while len(level) > 1:
            pairs = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
            level = pairs + level[len(level) - len(level) % 2 :]
        assert level == [expected]


def test_ranks_in_pairs_are_recognised() -> None:
    assert [world for world in range(1, 9) if ShardTree(8).is_in_pairs(world)] == [1, 2, 4, 7, 8]


@given(COUNTS, st.integers(0, 200), st.data())
def test_rows_are_split_alike_with_all_shards_and_with_some(
    shards: int, rows: int, data: st.DataObject
) -> None:
    world = data.draw(st.integers(1, shards))
    together = split_rows(rows, shards)
    for rank in range(world):
        share = ShardTree(shards).share(rank, world)
        first, last = together[share[0]].start, together[share[-1]].stop
        own = [range(first + each.start, first + each.stop) for each in split_rows(last - first, len(share))]
        assert own == [together[shard] for shard in share]


@pytest.mark.parametrize("shards", [0, -1, 2.0, True, "8"])
def test_what_is_no_number_of_shards_is_refused(shards: object) -> None:
    with pytest.raises(OptionError, match="shards must be a positive whole number"):
        ShardTree(shards)  # type: ignore[arg-type]


def test_more_ranks_than_shards_are_refused() -> None:
    with pytest.raises(OptionError, match=r"choose more shards, or fewer ranks \(shards: 2, ranks: 3\)"):
        ShardTree(2).share(0, 3)
