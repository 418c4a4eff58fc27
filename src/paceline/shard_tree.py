"""A step's shards: which rank has which, and in which order their gradients are added up. Pure: no tensors.

Note [One tree]. Floating-point sums depend on the order of their terms. So the order belongs to the shards:
they are the leaves of a binary tree, and each node is the sum of its two children. Each rank has shards that
follow each other, adds up the nodes that lie within them, and sends these. Ranks then add up the rest of the
tree. So the number of ranks decides who adds, but not what is added to what.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from paceline.errors import OptionError

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree: the shards from ``start`` up to ``stop``."""

    start: int
    stop: int


@dataclass(frozen=True)
class ShardTree:
    """The tree over a step's shards.

    Attributes:
        shards: the number of shards.
    """

    shards: int

    def __post_init__(self) -> None:
        if type(self.shards) is not int or self.shards < 1:
            raise OptionError(f"shards must be a positive whole number (shards: {self.shards!r})")

    @property
    def root(self) -> Node:
        """The sum of all shards."""
        return Node(0, self.shards)

    @cached_property
    def _parents(self) -> dict[Node, Node]:
        """The parent of each left child, by the child."""
        parents: dict[Node, Node] = {}
        todo = [self.root]
        while todo:
            node = todo.pop()
            if (both := children(node)) is not None:
                parents[both[0]] = node
                todo += both
        return parents

    def share(self, rank: int, world: int) -> range:
        """The shards of one rank: they follow each other, and no rank has two more than another."""
        if world > self.shards:
            raise OptionError(
                "there must be a shard for every rank: choose more shards, or fewer ranks "
                f"(shards: {self.shards}, ranks: {world})"
            )
        return range(rank * self.shards // world, (rank + 1) * self.shards // world)

    def join(self, left: Node, right: Node) -> Node | None:
        """The parent of two nodes; None if they are not the two children of one."""
        parent = self._parents.get(left)
        return (
            parent if parent is not None and parent.stop == right.stop and left.stop == right.start else None
        )

    def nodes(self, rank: int, world: int) -> list[Node]:
        """The largest nodes within a rank's shards, in their order."""
        found: list[Node] = []
        for shard in self.share(rank, world):
            node = Node(shard, shard + 1)
            while found and (parent := self.join(found[-1], node)) is not None:
                node = parent
                found.pop()
            found.append(node)
        return found

    def is_in_pairs(self, world: int) -> bool:
        """Whether each rank has one node, and the tree adds up the ranks neighbours first."""
        lists = [self.nodes(rank, world) for rank in range(world)]
        if any(len(nodes) > 1 for nodes in lists):
            return False
        level = [nodes[0] for nodes in lists]
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=False)
            parents = [parent for left, right in pairs if (parent := self.join(left, right)) is not None]
            if len(parents) < len(level) // 2:
                return False
            level = parents + level[len(level) - len(level) % 2 :]
        return True

    def fold(self, values: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
        """The sum at the root, from the values of nodes that together have every shard once."""
        return self._fold(self.root, values, add)

    def _fold(self, node: Node, values: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
        if node in values:
            return values[node]
        left, right = children(node) or _missing(node)
        return add(self._fold(left, values, add), self._fold(right, values, add))


def children(node: Node) -> tuple[Node, Node] | None:
    """The two children of a node; None for a single shard. The left one has a power of two of shards."""
    count = node.stop - node.start
    if count == 1:
        return None
    middle = node.start + (1 << (count - 1).bit_length() - 1)
    return Node(node.start, middle), Node(middle, node.stop)


def _missing(node: Node) -> tuple[Node, Node]:
    raise AssertionError(f"no value for shard {node.start}")


def split_rows(rows: int, shards: int) -> Sequence[range]:
    """The rows of each of a rank's shards: no shard has two more than another, and the first ones have more.

    It does not matter whether the rows of all shards are split, or those of some that follow each other.
    """
    each, more = divmod(rows, shards)
    starts = [shard * each + min(shard, more) for shard in range(shards + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
