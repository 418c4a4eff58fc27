"""Runs a hook between hosts, on what each host's ranks add up to.

Note [Between hosts]. Inside a host there is nothing to be gained by compression. So its ranks add up a
bucket in shared memory, each the parameters that are its own to carry; the hook runs among the counterparts
on all hosts, on those parameters alone; and what it returns is spread inside the host. The order of Note
[Rounds] holds between counterparts: a bucket's first collective leaves when this host's sum is there, a
second one when the sums of all buckets are there and their first ones have left. Who carries a parameter is
decided when it is first seen and never changes, so that what a hook remembers of it stays with it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.comm.shm.in_place import Slice
from paceline.comm.shm.transport import SharedMemoryTransport
from paceline.ddp.buckets.dense import DenseBucket
from paceline.ddp.buckets.plan import Slot
from paceline.ddp.exchange.comm_hook import check_result
from paceline.ddp.exchange.exchange import Unusual
from paceline.ddp.exchange.round import Round
from paceline.errors import BrokenHookError, HookError
from paceline.hooks.grad_bucket import GradBucket
from paceline.hooks.hook import Hook

# Elements that one rank may have more to carry than another: neighbours in a bucket are to stay together.
_LEAD = 1 << 16


class Couriers:
    """Who carries which slot, the same on every rank.

    Args:
        count: how many ranks of a host carry anything.
    """

    def __init__(self, count: int) -> None:
        self._loads = [0] * count
        self._current = 0
        self._courier: dict[int, int] = {}

    def of(self, slots: Sequence[Slot]) -> list[int]:
        """Each slot's courier; new slots go to one that has little."""
        return [self._of(slot) for slot in slots]

    def _of(self, slot: Slot) -> int:
        if slot.index not in self._courier:
            least = min(self._loads)
            if self._loads[self._current] - least > _LEAD:
                self._current = self._loads.index(least)
            self._loads[self._current] += slot.numel
            self._courier[slot.index] = self._current
        return self._courier[slot.index]


@dataclass(frozen=True)
class Part:
    """What a rank carries of a bucket.

    Attributes:
        bucket: has memory of its own.
        runs: where its gradients are in the storage of the whole.
    """

    bucket: DenseBucket
    runs: Sequence[Slice]


class BetweenHosts:
    """A hook of one wrapper, between hosts.

    Args:
        group: all ranks.
        shared: the memory that those of a host share.
        hook: the hook.
    """

    def __init__(self, group: Group, shared: SharedMemoryTransport, hook: Hook) -> None:
        self._shared = shared
        self._hook = hook
        self._counterparts = group.open_leader_group()
        if self._counterparts is not None:
            hook.meet(self._counterparts)
        # The hook averages over the hosts, which may have more ranks and less.
        self._factor = shared.hosts / group.size
        self._couriers = Couriers(shared.leaders)
        self._parts: WeakKeyDictionary[DenseBucket, Part] = WeakKeyDictionary()
        self._summing: deque[Crossing] = deque()
        self._weight: Pending | None = None

    def begin(self, weight: float | None) -> None:
        """A step begins: what this rank's gradients were multiplied by is added up too."""
        self._summing.clear()  # of a step that every rank broke off at the same place
        given = torch.tensor([weight is not None, weight or 0.0], dtype=torch.float64)
        self._weight = self._shared.all_reduce_on_host(given)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """Tell the hook that a step has ended well."""
        self._begin_hook()
        self._hook.finish(parameters, used, None if total is None else total * self._factor)

    def launch(self, bucket: DenseBucket, number: int, *, is_last: bool) -> "Crossing":
        """Begin to add up a bucket inside the host."""
        crossing = Crossing(self, bucket, self._part(bucket), number, is_last=is_last)
        self._summing.append(crossing)
        while self._summing and self._summing[0].is_summed:
            self._start()
        return crossing

    def start_all(self, unusual: Unusual) -> None:
        """Wait for this host's sums, and have the hook's first collective of each leave."""
        while self._summing:
            self._summing[0].wait_for_sum(unusual)
            self._start()

    def sum(self, bucket: DenseBucket, part: Part) -> Pending:
        """Begin to add up inside the host."""
        return self._shared.reduce_scatter_slices(
            bucket.storage, part.bucket.storage, part.runs, factor=self._factor
        )

    def spread(self, bucket: DenseBucket, part: Part) -> Pending:
        """Begin to give the part to every rank of the host."""
        return self._shared.all_gather_slices(bucket.storage, part.bucket.storage, part.runs)

    def run_hook(self, part: Part, number: int, *, is_last: bool) -> Round | None:
        """Run the hook up to its first collective; None if there is nothing to carry."""
        if self._counterparts is None or not part.bucket.slots:
            return None
        self._begin_hook()
        given = GradBucket(part.bucket, number, is_last=is_last)
        return Round(self._hook.reduce(given, self._counterparts), self._hook.name)

    @property
    def name(self) -> str:
        """The hook's."""
        return self._hook.name

    def _start(self) -> None:
        try:
            self._summing.popleft().start()
        except Exception as error:
            raise BrokenHookError(f"a hook raised {error!r} (hook: {self.name})") from error

    def _begin_hook(self) -> None:
        """Tell the hook of the step, once."""
        if self._weight is not None:
            # It was launched before everything that has been waited for.
            count, total = self._weight.wait(_no_matter).tolist()
            self._weight = None
            self._hook.begin(total * self._factor if count else None)

    def _part(self, bucket: DenseBucket) -> Part:
        if bucket not in self._parts:
            self._parts[bucket] = self._cut(bucket)
        part = self._parts[bucket]
        part.bucket.begin()
        return part

    def _cut(self, bucket: DenseBucket) -> Part:
        own: list[int] = []
        runs: list[Slice] = []
        width = 2 if bucket.gradients.is_complex() else 1
        offset = 0
        for place, (slot, courier) in enumerate(
            zip(bucket.slots, self._couriers.of(bucket.slots), strict=True)
        ):
            end = offset + width * slot.numel
            if courier == self._shared.rank:
                own.append(place)
                first = runs.pop()[0] if runs and runs[-1][1] == offset else offset
                runs.append((first, end))
            offset = end
        return Part(bucket.part(own), runs)


class Crossing:
    """A bucket on its way: added up inside the host, then in the hook's hands, then spread inside.

    Args:
        between: whose it is.
        bucket: the bucket.
        part: what this rank carries of it.
        number: the bucket's place in the plan.
        is_last: whether no bucket of this step comes after it.
    """

    def __init__(
        self, between: BetweenHosts, bucket: DenseBucket, part: Part, number: int, *, is_last: bool
    ) -> None:
        self._between = between
        self._bucket = bucket
        self._part = part
        self._number = number
        self._is_last = is_last
        self._sum = between.sum(bucket, part)
        self._round: Round | None = None
        self._spread: Pending | None = None
        self._mistake: HookError | None = None

    @property
    def is_summed(self) -> bool:
        """Whether this host's sum is there."""
        return self._sum.done()

    def wait_for_sum(self, unusual: Unusual) -> None:
        """Wait for this host's sum."""
        self._sum.wait(unusual)

    def start(self) -> None:
        """Hand the sum to the hook."""
        self._round = self._between.run_hook(self._part, self._number, is_last=self._is_last)

    def wait(self, unusual: Unusual) -> torch.Tensor:
        """Wait until the bucket holds what the hook made of it; returns its gradients."""
        self._between.start_all(unusual)
        if self._spread is None:
            if self._round is not None:
                self._receive(self._round.wait(unusual))
            # Also after a mistake, which concerns this rank alone: the others of the host expect it.
            self._spread = self._between.spread(self._bucket, self._part)
        self._spread.wait(unusual)
        if self._mistake is not None:
            raise self._mistake
        return self._bucket.gradients

    def done(self) -> bool:
        """Whether the bucket holds the result."""
        return self._spread is not None and self._spread.done()

    def _receive(self, result: object) -> None:
        part = self._part.bucket
        try:
            check_result(result, part, self._number, self._between.name)
        except HookError as error:
            self._mistake = error
        else:
            assert isinstance(result, torch.Tensor)
            part.receive(result)


def _no_matter() -> None:
    """What is there need not be waited for."""
