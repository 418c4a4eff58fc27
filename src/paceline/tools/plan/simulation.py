"""Simulates one training step on several hosts: events on a host's link, and its ranks' threads (pure).

Note [One host stands for all]. Every host has the same link and sends as much as every other. The leaders of
a host send at the same time and share its link, so their messages are simulated as one of the sum of their
bytes. A collective between hosts begins when the last rank of all hosts has come to it.

Note [What a step does]. A rank's thread computes gradients. When a bucket is ready on all ranks, the thread
sums it inside the host. Without a hook the exchange between hosts begins at once. A hook encodes the sum
first, and begins when the thread comes by: at the launch of the next bucket, or at the end of backward. This
work delays all gradients that come later. After backward the thread takes one bucket after the other: it
waits, decodes, launches the hook's next collective and waits again, and spreads the result inside the host.

Note [Sums that were recorded]. Ranks that recorded on one host have summed and spread buckets too, and the
recorded times contain it: a thread that makes a bucket ready as the last one sums it at once, before it goes
on with backward. What they took comes off what follows the bucket, until the averages.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# gloo's threads per process group: the collectives that a leader has on the link at once.
_AT_ONCE = 2
# MessageRounds of one collective beyond this number are simulated several at a time.
_MOST_ROUNDS = 32


@dataclass(frozen=True)
class MessageRounds:
    """A collective between hosts: messages that wait for each other.

    Attributes:
        count: how many rounds it has.
        nbytes: what each host sends in each round, all leaders together.
    """

    count: int
    nbytes: float

    @property
    def sent(self) -> float:
        """The bytes that each host sends."""
        return self.count * self.nbytes


@dataclass(frozen=True)
class HookStage:
    """What a rank's thread does before it launches collectives between hosts.

    Attributes:
        seconds: how long the thread works.
        exchanges: the collectives, launched together.
    """

    seconds: float
    exchanges: Sequence[MessageRounds]


@dataclass(frozen=True)
class BucketWork:
    """What has to be done for one bucket; seconds are those of each rank's thread.

    Attributes:
        sum_seconds: to sum inside the host.
        stages: one for each of the hook's collectives; without a hook there is one that takes no time. None
            on one host.
        last_seconds: after the last collective.
        spread_seconds: to spread the result inside the host.
        recorded_seconds: to do both on the recorded host: see Note [Sums that were recorded].
    """

    sum_seconds: float
    stages: Sequence[HookStage]
    last_seconds: float
    spread_seconds: float
    recorded_seconds: float = 0.0

    @property
    def sent(self) -> float:
        """The bytes that each host sends."""
        return sum(each.sent for stage in self.stages for each in stage.exchanges)


@dataclass(frozen=True)
class SlowestTimes:
    """When things happen in a step, in seconds.

    Attributes:
        ready: when the last rank had each bucket ready, in launch order.
        backward_end: when the last rank's backward ended.
        averaged: when the last rank had all averages of its host; 0 if the recording does not tell.
    """

    ready: Sequence[float]
    backward_end: float
    averaged: float = 0.0


@dataclass
class _Transfer:
    rounds: int
    seconds: float
    latency: float
    end: float | None = None  # of the message that is under way


@dataclass
class HostLink:
    """The link of a host: messages leave one after the other; a collective's next message needs its last one.

    Attributes:
        bytes_per_second: how much it carries.
        latency: seconds until a message arrives, beside those for its bytes.
    """

    bytes_per_second: float
    latency: float
    _free: float = 0.0
    _running: int = 0
    _waiting: deque[_Transfer] = field(default_factory=deque)
    _events: list[tuple[float, int, _Transfer]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def launch(self, rounds: MessageRounds, at: float) -> _Transfer:
        """Begin a collective; calls come in the order of their times."""
        simulated = min(rounds.count, _MOST_ROUNDS)
        together = rounds.count / max(1, simulated)
        transfer = _Transfer(
            rounds=simulated,
            seconds=rounds.nbytes * together / self.bytes_per_second,
            latency=self.latency * together,
        )
        self._add(transfer, at)
        return transfer

    def wait(self, transfers: Sequence[_Transfer], now: float) -> float:
        """When the last of some collectives ends; not before ``now``."""
        while any(each.rounds for each in transfers):
            at, _, transfer = heapq.heappop(self._events)
            self._handle(transfer, at)
        return max([now, *(each.end for each in transfers if each.end is not None)])

    def _add(self, transfer: _Transfer, at: float) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), transfer))

    def _handle(self, transfer: _Transfer, at: float) -> None:
        if transfer.end is None:  # it is new
            if self._running == _AT_ONCE:
                self._waiting.append(transfer)
                return
            self._running += 1
        elif transfer.rounds == 1:
            self._finish(transfer, at)
            return
        else:
            transfer.rounds -= 1
        self._send(transfer, at)

    def _send(self, transfer: _Transfer, at: float) -> None:
        self._free = max(at, self._free) + transfer.seconds
        transfer.end = self._free + transfer.latency
        self._add(transfer, transfer.end)

    def _finish(self, transfer: _Transfer, at: float) -> None:
        transfer.rounds = 0
        if self._waiting:
            self._send(self._waiting.popleft(), at)
        else:
            self._running -= 1


@dataclass
class _Thread:
    """A rank's thread.

    Attributes:
        now: when it is free.
        late: by how much later than recorded its gradients come.
    """

    now: float = 0.0
    late: float = 0.0

    def reach(self, recorded: float) -> float:
        """Go on to something that happened at a recorded time; returns when it happens now."""
        self.now = max(self.now, recorded + self.late)
        return self.now

    def work(self, seconds: float) -> float:
        """Do what the recorded rank did not; returns when it is done."""
        self.now += seconds
        self.late += seconds
        return self.now

    def leave_out(self, seconds: float) -> None:
        """Do not do again what the recorded rank did from now on."""
        self.late -= seconds


def simulate_step(
    times: SlowestTimes,
    work: Sequence[BucketWork],
    link: HostLink,
    *,
    has_hook: bool,
    report: MessageRounds | None,
) -> float:
    """When every rank has all averages; see Note [What a step does].

    Args:
        times: the ranks' own work.
        work: what has to be done for each bucket.
        link: of a host, unused so far.
        has_hook: whether a hook runs between hosts.
        report: the collective of the ranks' reports, if it is one of its own.
    """
    thread = _Thread()
    in_flight: list[list[_Transfer]] = []
    for number, (bucket, ready) in enumerate(zip(work, times.ready, strict=True)):
        thread.reach(ready)
        if has_hook and number:
            in_flight.append(_begin(work[number - 1], thread, link))
        thread.work(bucket.sum_seconds)
        if not has_hook:
            in_flight.append(_begin(bucket, thread, link))
        thread.leave_out(bucket.recorded_seconds)
    thread.reach(times.backward_end)
    if has_hook:
        in_flight.append(_begin(work[-1], thread, link))
    thread.reach(times.averaged)
    for bucket, transfers in zip(work, in_flight, strict=True):
        _end(bucket, transfers, thread, link)
    return thread.now if report is None else link.wait([link.launch(report, thread.now)], thread.now)


def _begin(bucket: BucketWork, thread: _Thread, link: HostLink) -> list[_Transfer]:
    if not bucket.stages:
        return []
    first = bucket.stages[0]
    thread.work(first.seconds)
    return [link.launch(each, thread.now) for each in first.exchanges]


def _end(bucket: BucketWork, transfers: Sequence[_Transfer], thread: _Thread, link: HostLink) -> None:
    thread.now = link.wait(transfers, thread.now)
    for stage in bucket.stages[1:]:
        thread.work(stage.seconds)
        later = [link.launch(each, thread.now) for each in stage.exchanges]
        thread.now = link.wait(later, thread.now)
    thread.work(bucket.last_seconds + bucket.spread_seconds)
