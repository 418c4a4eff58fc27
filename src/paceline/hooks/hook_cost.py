"""What a hook costs on this processor, measured on gradients like the module's, which are not sent."""

import math
import time
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import NothingPending, Pending
from paceline.hooks.choice import HookCost
from paceline.hooks.grad_bucket import BucketOfGradients, GradBucket
from paceline.hooks.hook import Hook

# More than a cache holds, as most buckets are.
_SAMPLE_BYTES = 4 << 20
_REPEATS = 3
_SEED = 0


def measure_cost(hook: Hook, gradients: Sequence[Tensor], members: int) -> HookCost:
    """Run a hook on stand-ins for some of the gradients, and count what it would send.

    Args:
        hook: a new one, which belongs to no wrapper.
        gradients: their shapes and types; what is in them is not looked at.
        members: the number of ranks, or of hosts, among which the hook would run.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(gradient.dtype, []).append(gradient)
    costs = [_cost_of_kind(hook, kind, members) for kind in kinds.values()]
    parts = [sum(each.nbytes for each in kind) for kind in kinds.values()]
    return _mean(costs, parts)


def _mean(costs: Sequence[HookCost], nbytes: Sequence[int]) -> HookCost:
    """The cost per byte of gradients of which some bytes have one cost, and some another."""
    weights = [each / max(1, sum(nbytes)) for each in nbytes]
    pairs = [*zip(costs, weights, strict=True)]
    return HookCost(
        before=sum(cost.before * weight for cost, weight in pairs),
        after=sum(cost.after * weight for cost, weight in pairs),
        sent=sum(cost.sent * weight for cost, weight in pairs),
        rounds=max((cost.rounds for cost in costs), default=0),
    )


def _cost_of_kind(hook: Hook, gradients: Sequence[Tensor], members: int) -> HookCost:
    """The cost of gradients of one type, which share buckets."""
    group = CountingGroup(members)
    bucket = SampleBucket(gradients)
    hook.meet(cast("Group", group))
    # The first run fills caches, and what a hook remembers is there only after it.
    runs = [run_hook(hook, bucket, cast("Group", group), time.perf_counter) for _ in range(1 + _REPEATS)][1:]
    nbytes = max(1, bucket.gradients.nbytes)
    return HookCost(
        before=min(before for before, *_ in runs) / nbytes,
        after=min(sum(after) for _, *after in runs) / nbytes,
        sent=group.sent / (1 + _REPEATS) / nbytes,
        rounds=group.rounds // (1 + _REPEATS),
    )


def run_hook(hook: Hook, bucket: BucketOfGradients, group: Group, clock: Callable[[], float]) -> list[float]:
    """Run a step of a hook on one bucket.

    Args:
        hook: the hook.
        bucket: stands for a bucket of gradients.
        group: stands for the ranks among which the hook runs.
        clock: gives seconds.

    Returns:
        The seconds that the hook works before each of its collectives, and after the last one.
    """
    seconds = []
    since = clock()
    hook.begin(None)
    reduction = hook.reduce(GradBucket(bucket, 0, is_last=True), group)
    try:
        pending = next(reduction)
        while True:
            seconds.append(clock() - since)
            answer = pending.wait(lambda: None)
            since = clock()
            pending = reduction.send(answer)
    except StopIteration:
        parameters = cast("Sequence[Parameter]", bucket.parameters)  # no DTensors
        hook.finish(parameters, [1] * len(parameters), None)
    return [*seconds, clock() - since]


class SampleBucket:
    """A bucket of random gradients, like some of those given, of which the largest are cut.

    Args:
        like: gradients of one type.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        cut, room = [], _SAMPLE_BYTES // 4
        for each in like:
            if room > 0 and each.numel():
                rows, *others = each.shape or (1,)
                cut.append((min(rows, -(-room * rows // each.numel())), *others))
                room -= math.prod(cut[-1])
        sizes = [math.prod(shape) for shape in cut]
        # Not from the global generator: the user's seeded runs repeat, whatever is measured in them.
        drawn = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(_SEED))
        self.gradients = drawn.to(like[0].dtype)
        self.parameters = [Parameter(torch.zeros(shape, dtype=like[0].dtype)) for shape in cut]
        parts = zip(self.gradients.split(sizes), cut, strict=True)
        self.views = [part.view(shape) for part, shape in parts]


class CountingGroup:
    """Stands for a group: its collectives take no time, and it counts what they would send.

    Args:
        size: the number of members.

    Attributes:
        sent: bytes that a member would send.
        rounds: messages that would wait for each other.
    """

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size
        self.sent = 0.0
        self.rounds = 0

    def all_reduce(self, tensor: Tensor) -> Pending:
        """As a ring does it: a round of sums, and one of results."""
        self._count(2 * tensor.nbytes / self.size * (self.size - 1), 2 * (self.size - 1))
        return NothingPending(tensor)

    def all_gather(self, row: Tensor) -> Pending:
        """Everybody's row, which is this member's."""
        self._count(row.nbytes * (self.size - 1), self.size - 1)
        return NothingPending(row.expand(self.size, -1))

    def all_to_all(self, rows: Tensor) -> Pending:
        """As many rows as were given."""
        self._count(rows.nbytes / self.size * (self.size - 1), 1)
        return NothingPending(rows)

    def _count(self, sent: float, rounds: int) -> None:
        self.sent += sent
        self.rounds += rounds
