"""Runs a hook between hosts, on the sums of each host's ranks.

Note [Hooks between hosts]. Inside a host there is nothing to be gained by compression. So the ranks of a host
sum a bucket in shared memory, and each rank leads for its own parameters: the hook runs among the leaders of
the same parameters on all hosts, and what it returns is given to every rank of the host. The order of Note
[Hooks are generators] holds between leaders: a bucket's first collective is launched when this host's sum is
there, a second one when the sums of all buckets are there and their first collectives are launched. Who leads
for a parameter is decided when the parameter is first seen and never changes, so that what a hook remembers
of it stays with it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import OnSlow, Pending
from paceline.comm.shm.in_place import Slice
from paceline.comm.shm.transport import SharedMemoryTransport
from paceline.ddp.buckets.dense import DenseBucket
from paceline.ddp.buckets.plan import Slot
from paceline.ddp.exchange.comm_hook import check_result
from paceline.ddp.exchange.hook_run import HookRun
from paceline.errors import BrokenHookError, HookError
from paceline.hooks.grad_bucket import GradBucket
from paceline.hooks.hook import Hook

# Elements that one leader may have more than another, so that adjacent parameters stay together.
_MAX_LEAD = 1 << 16


class SlotLeaders:
    """Which rank of a host leads for which slot; the same on every rank.

    Args:
        count: the number of leaders per host.
    """

    def __init__(self, count: int) -> None:
        self._loads = [0] * count
        self._current = 0
        self._leader: dict[int, int] = {}

    def of(self, slots: Sequence[Slot]) -> list[int]:
        """Each slot's leader; new slots go to one that has few elements."""
        return [self._of(slot) for slot in slots]

    def _of(self, slot: Slot) -> int:
        if slot.index not in self._leader:
            least = min(self._loads)
            if self._loads[self._current] - least > _MAX_LEAD:
                self._current = self._loads.index(least)
            self._loads[self._current] += slot.numel
            self._leader[slot.index] = self._current
        return self._leader[slot.index]


@dataclass(frozen=True)
class LeaderShare:
    """The gradients of a bucket for which this rank leads.

    Attributes:
        bucket: a bucket of these gradients alone, with memory of its own.
        runs: where they are in the storage of the whole bucket.
    """

    bucket: DenseBucket
    runs: Sequence[Slice]


class BetweenHosts:
    """One wrapper's hook, run between hosts.

    Args:
        group: all ranks.
        shared: the memory that the ranks of a host share.
        hook: the hook.
    """

    def __init__(self, group: Group, shared: SharedMemoryTransport, hook: Hook) -> None:
        self._shared = shared
        self._hook = hook
        self._leaders_group = group.open_leader_group()
        if self._leaders_group is not None:
            hook.meet(self._leaders_group)
        # The hook averages over hosts, which may differ in their number of ranks.
        self._factor = shared.hosts / group.size
        self._leaders = SlotLeaders(shared.leaders)
        self._shares: WeakKeyDictionary[DenseBucket, LeaderShare] = WeakKeyDictionary()
        self._summing: deque[HostsReduction] = deque()
        self._weight: Pending | None = None

    def begin(self, weight: float | None) -> None:
        """A step begins: the weights of this host's ranks are summed too."""
        self._summing.clear()  # of a step that every rank left at the same point
        given = torch.tensor([weight is not None, weight or 0.0], dtype=torch.float64)
        self._weight = self._shared.all_reduce_on_host(given)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """Tell the hook that the step has ended well."""
        self._begin_hook()
        self._hook.finish(parameters, used, None if total is None else total * self._factor)

    def launch(self, bucket: DenseBucket, number: int, *, is_last: bool) -> "HostsReduction":
        """Begin to sum a bucket inside the host."""
        reduction = HostsReduction(self, bucket, self._share(bucket), number, is_last=is_last)
        self._summing.append(reduction)
        while self._summing and self._summing[0].is_summed:
            self._start()
        return reduction

    def start_all(self, on_slow: OnSlow) -> None:
        """Wait for this host's sums, and launch the hook's first collective for each."""
        while self._summing:
            self._summing[0].wait_for_sum(on_slow)
            self._start()

    def sum(self, bucket: DenseBucket, share: LeaderShare) -> Pending:
        """Begin to sum inside the host."""
        return self._shared.reduce_scatter_slices(
            bucket.storage, share.bucket.storage, share.runs, factor=self._factor
        )

    def spread(self, bucket: DenseBucket, share: LeaderShare) -> Pending:
        """Begin to give this rank's share to every rank of the host."""
        return self._shared.all_gather_slices(bucket.storage, share.bucket.storage, share.runs)

    def run_hook(self, share: LeaderShare, number: int, *, is_last: bool) -> HookRun | None:
        """Run the hook up to its first collective; None if this rank leads for nothing in the bucket."""
        if self._leaders_group is None or not share.bucket.slots:
            return None
        self._begin_hook()
        given = GradBucket(share.bucket, number, is_last=is_last)
        return HookRun(self._hook.reduce(given, self._leaders_group), self._hook.name)

    @property
    def name(self) -> str:
        """The hook's name."""
        return self._hook.name

    def _start(self) -> None:
        try:
            self._summing.popleft().start()
        except Exception as error:
            raise BrokenHookError(f"a hook raised {error!r} (hook: {self.name})") from error

    def _begin_hook(self) -> None:
        """Tell the hook once that the step has begun."""
        if self._weight is not None:
            # It was launched before everything that has been waited for.
            count, total = self._weight.wait(_never_slow).tolist()
            self._weight = None
            self._hook.begin(total * self._factor if count else None)

    def _share(self, bucket: DenseBucket) -> LeaderShare:
        if bucket not in self._shares:
            self._shares[bucket] = self._cut(bucket)
        share = self._shares[bucket]
        share.bucket.begin()
        return share

    def _cut(self, bucket: DenseBucket) -> LeaderShare:
        own: list[int] = []
        runs: list[Slice] = []
        width = 2 if bucket.gradients.is_complex() else 1
        offset = 0
        leaders = self._leaders.of(bucket.slots)
        for position, (slot, leader) in enumerate(zip(bucket.slots, leaders, strict=True)):
            end = offset + width * slot.numel
            if leader == self._shared.rank:
                own.append(position)
                first = runs.pop()[0] if runs and runs[-1][1] == offset else offset
                runs.append((first, end))
            offset = end
        return LeaderShare(bucket.part(own), runs)


class HostsReduction:
    """A bucket's reduction between hosts: summed inside the host, run through the hook, spread inside.

    Args:
        between: the hook that runs between hosts.
        bucket: the bucket.
        share: the part for which this rank leads.
        number: the bucket's index in the plan.
        is_last: whether no bucket of this step comes after it.
    """

    def __init__(
        self, between: BetweenHosts, bucket: DenseBucket, share: LeaderShare, number: int, *, is_last: bool
    ) -> None:
        self._between = between
        self._bucket = bucket
        self._share = share
        self._number = number
        self._is_last = is_last
        self._sum = between.sum(bucket, share)
        self._run: HookRun | None = None
        self._spread: Pending | None = None
        self._mistake: HookError | None = None

    @property
    def is_summed(self) -> bool:
        """Whether this host's sum is there."""
        return self._sum.done()

    def wait_for_sum(self, on_slow: OnSlow) -> None:
        """Wait for this host's sum."""
        self._sum.wait(on_slow)

    def start(self) -> None:
        """Pass the sum to the hook."""
        self._run = self._between.run_hook(self._share, self._number, is_last=self._is_last)

    def wait(self, on_slow: OnSlow) -> torch.Tensor:
        """Wait until the bucket holds the hook's result; returns its gradients."""
        self._between.start_all(on_slow)
        if self._spread is None:
            if self._run is not None:
                self._receive(self._run.wait(on_slow))
            # Also after a mistake, which concerns this rank alone: the others of the host expect it.
            self._spread = self._between.spread(self._bucket, self._share)
        self._spread.wait(on_slow)
        if self._mistake is not None:
            raise self._mistake
        return self._bucket.gradients

    def done(self) -> bool:
        """Whether the bucket holds the result."""
        return self._spread is not None and self._spread.done()

    def _receive(self, result: object) -> None:
        bucket = self._share.bucket
        try:
            check_result(result, bucket, self._number, self._between.name)
        except HookError as error:
            self._mistake = error
        else:
            assert isinstance(result, torch.Tensor)
            bucket.receive(result)


def _never_slow() -> None:
    """What is waited for is already there."""
