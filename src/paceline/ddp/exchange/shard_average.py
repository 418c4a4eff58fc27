"""The average over a step's shards: the same bits for every number of ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.pending import NothingPending, OnSlow, Pending
from paceline.comm.shm.collectives import Scaling
from paceline.ddp.buckets.bucket_set import Bucket
from paceline.ddp.buckets.dense import DenseBucket
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.exchange.hook_run import HookRun
from paceline.hooks.hook import Reduction
from paceline.shard_tree import ShardTree


class ShardAverage(Exchange):
    """Adds up the ranks' nodes of the shards' tree, and then divides by the number of shards.

    The division comes last, because half of the tree, divided by 6, has other last bits than the whole.

    Where each rank has one node, and ranks of one host add neighbours first, a bucket takes one all-reduce.
    In other cases each rank gets a slice of all nodes, adds it up in the tree's order, and sends the sum to
    all.

    Args:
        group: the ranks.
        tree: the order of additions.
    """

    name = "the average of shards"

    def __init__(self, group: Group, tree: ShardTree) -> None:
        super().__init__(group)
        self._tree = tree
        self.sum_per_result = 1.0
        self._factor: float | None = None
        self.carries_report = tree.is_in_pairs(group.size) and group.adds_neighbours_first

    def for_group(self, group: Group) -> "ShardAverage":
        """The same shards among other ranks."""
        return ShardAverage(group, self._tree)

    def begin(self, weight: float | None, ranks: int) -> None:
        """Divide by the number of shards, unless they have weights: then the step divides by these."""
        self._factor = 1 / ranks if weight is None else None

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:  # noqa: ARG002  # all are alike
        """Begin to reduce a bucket."""
        if not isinstance(bucket, DenseBucket):
            return HookRun(self._add_rows(bucket.storage), self.name)
        storage = bucket.storage
        if not self.carries_report:
            return HookRun(self._add_slices(storage, bucket.apart), self.name)
        if self._factor is None:
            return self._group.all_reduce(storage) if self._group.size > 1 else NothingPending(storage)
        width = 2 if bucket.gradients.is_complex() else 1
        scaling = Scaling(bucket.gradients.numel() * width, self._factor)
        return self._group.all_reduce_scaled(storage, scaling)

    def wait(self, bucket: Bucket, number: int, pending: Pending, on_slow: OnSlow) -> None:  # noqa: ARG002
        """Wait until the bucket holds the average."""
        result = pending.wait(on_slow)
        if not isinstance(bucket, DenseBucket):
            bucket.receive(result)

    def _add_slices(self, storage: Tensor, apart: Sequence[Tensor]) -> Reduction:
        """Give each rank its slice of all nodes; it adds them up, and all ranks fetch its sum."""
        world = self._group.size
        nodes = [self._tree.nodes(rank, world) for rank in range(world)]
        most = max(map(len, nodes))
        length = -(-storage.numel() // world)
        rows = storage.new_zeros(most, world * length)
        for row, node in zip(rows, (storage, *apart), strict=False):
            row[: storage.numel()] = node
        received = rows.view(most, world, length).transpose(0, 1).reshape(world, -1)
        if world > 1:
            received = yield self._group.all_to_all(received)
        slices = received.view(world, most, length)
        values = {node: slices[rank][at] for rank, own in enumerate(nodes) for at, node in enumerate(own)}
        total = self._tree.fold(values, torch.add)
        if self._factor is not None:
            total = total * self._factor
        if world > 1:
            total = yield self._group.all_gather(total.view(1, -1))
        storage.copy_(total.view(-1)[: storage.numel()])
        return storage

    def _add_rows(self, rows: Tensor) -> Reduction:
        """Fetch every rank's rows, and add those with the same index up in the order of the shards."""
        indices, values = rows._indices(), rows._values()
        if self._group.size > 1:
            count = torch.tensor([[indices.shape[1]]], device=values.device)
            counts = (yield self._group.all_gather(count)).view(-1).tolist()
            most = max(counts)
            padded = (_padded(indices.T.contiguous(), most), _padded(values, most))
            everyone = []
            for mine in padded:
                row = mine.view(1, -1).view(torch.uint8)
                theirs = yield self._group.all_gather(row) if row.numel() else NothingPending(row)
                theirs = theirs.contiguous().view(mine.dtype).view(-1, *mine.shape)
                everyone.append([one[:count] for one, count in zip(theirs, counts, strict=True) if most])
            indices = torch.cat(everyone[0]).T if most else indices
            values = torch.cat(everyone[1]) if most else values
        total = torch.sparse_coo_tensor(indices, values, rows.shape, check_invariants=False).coalesce()
        return total if self._factor is None else total * self._factor


def _padded(rows: Tensor, count: int) -> Tensor:
    padded = rows.new_zeros(count, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded
