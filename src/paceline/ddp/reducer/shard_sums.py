"""The gradients of a rank's shards, added up in the tree's order as the rank works on one after the other."""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_not

import torch
from torch import Tensor

from paceline.errors import StepError, WeightsError
from paceline.shard_tree import Node, ShardTree
from paceline.tensors.dtensor import Trained
from paceline.torch_private import foreach_add_

# By slot; None where a node has no gradient.
Gradients = list[Tensor | None]
_IS_SPARSE = attrgetter("is_sparse")


class ShardSums:
    """The sums of a rank's shards in the running step.

    Note [Last shard first]. A rank begins with its last shard, so rank 0 ends with shard 0, whose module
    buffers are those that stay. Each new shard is to the left of what is there already.

    Args:
        tree: the order of additions.
        parameters: every slot's parameter.

    Attributes:
        weight: the sum of the weights of the shards that were kept.
        is_weighted: whether they had weights.
    """

    def __init__(self, tree: ShardTree, parameters: Sequence[Trained]) -> None:
        self.tree = tree
        self._parameters = parameters
        self._is_last = False
        self.begin(0)

    def begin(self, shard: int) -> None:
        """A step begins with this shard."""
        self.weight = 0.0
        self.is_weighted = False
        self._shard = shard
        self._nodes: list[tuple[Node, Gradients]] = []

    def expect(self, shard: int, *, is_last: bool) -> None:
        """Work on this shard; a backward may be synced if it is the rank's last one."""
        self._shard, self._is_last = shard, is_last

    def check_synced(self, *, weighted: bool) -> None:
        """Refuse to sync another backward than the last one of the last shard, or one without a weight.

        Args:
            weighted: whether it has a weight.
        """
        if not self._is_last:
            raise StepError(
                f"with shards={self.tree.shards}, backward runs inside `for ... in ddp.shards(batch)`; if a "
                "shard needs several, all but the last of them belong under no_sync()"
            )
        self._is_last = False
        self._check_weight(weighted=weighted)

    def _check_weight(self, *, weighted: bool) -> None:
        if any(map(self._has_any, self._nodes)) and weighted != self.is_weighted:
            raise WeightsError("some shards of this rank were weighed, and others not; weigh all or none")

    @staticmethod
    def _has_any(kept: tuple[Node, Gradients]) -> bool:
        return any(map(is_not, kept[1], repeat(None)))

    @property
    def has_earlier(self) -> bool:
        """Whether sums of other shards wait for the last one."""
        return bool(self._nodes)

    def used(self) -> bytearray:
        """A 1 for each slot that has a gradient from earlier shards."""
        used = bytearray(len(self._parameters))
        for _, gradients in self._nodes:
            for slot, gradient in enumerate(gradients):
                used[slot] |= gradient is not None
        return used

    def keep(self, weight: float | None) -> None:
        """Take the gradients of a shard that is not the last off their parameters, and add up what can be.

        Args:
            weight: what the shard counts; None for the plain mean, or if it had no backward.
        """
        gradients = _leaves([parameter.grad for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None
        if any(map(is_not, gradients, repeat(None))):
            self._check_weight(weighted=weight is not None)
        if weight is not None:
            self.weight += weight
            self.is_weighted = True
        node = Node(self._shard, self._shard + 1)
        while self._nodes and (parent := self.tree.join(node, self._nodes[-1][0])) is not None:
            gradients = _added(gradients, self._nodes.pop()[1])
            node = parent
        self._nodes.append((node, gradients))

    def add_to_last(self, slots: Sequence[int], *, all_nodes: bool = False) -> list[Gradients]:
        """Add to the last shard's gradients what belongs to the same node.

        Args:
            slots: the slots whose gradients of the last shard are complete.
            all_nodes: whether to add everything, because rows of sparse gradients are only put one after the
                other.

        Returns:
            For each node that goes apart, in the order of the shards, the gradients of these slots.
        """
        node = Node(self._shard, self._shard + 1)
        parameters = [self._parameters[slot] for slot in slots]
        gradients = _leaves([parameter.grad for parameter in parameters])
        apart: list[Gradients] = []
        for right, theirs in reversed(self._nodes):
            chosen = [theirs[slot] for slot in slots]
            parent = None if apart else self.tree.join(node, right)
            if parent is None and not all_nodes:
                apart.append(chosen)
            else:
                gradients, node = _added(gradients, chosen), parent or node
        for at, parameter in enumerate(parameters):
            if apart and gradients[at] is None and any(each[at] is not None for each in apart):
                gradients[at] = torch.zeros_like(parameter.detach())  # the rank has used it
            parameter.grad = gradients[at]
        return apart


def _leaves(gradients: Gradients) -> Gradients:
    """A shard's own gradients; rows of a sparse one are added up within the shard, and not across shards."""
    return [each.coalesce() if each is not None and each.is_sparse else each for each in gradients]


def _added(left: Gradients, right: Gradients) -> Gradients:
    """The sums of two nodes. A missing gradient counts as zeros, also in the sign of a zero."""
    if _are_plain(left) and _are_plain(right):
        if left:
            foreach_add_(left, right)
        return left
    return [_sum(*pair) for pair in zip(left, right, strict=True)]


def _are_plain(gradients: Gradients) -> bool:
    """Whether none is missing, and none is sparse."""
    return all(map(is_not, gradients, repeat(None))) and not any(map(_IS_SPARSE, gradients))


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is not None and right is not None:
        if left.is_sparse and right.is_sparse:
            return _rows_of_both(left, right)
        return left.to_dense().add_(right.to_dense())
    found = right if left is None else left
    return found if found is None or found.is_sparse else found.add_(0.0)


def _rows_of_both(left: Tensor, right: Tensor) -> Tensor:
    """The rows of both, one after the other: they are added up when all shards' rows have come."""
    return torch.sparse_coo_tensor(
        torch.cat([left._indices(), right._indices()], dim=1),
        torch.cat([left._values(), right._values()]),
        left.shape,
        check_invariants=False,
    )
