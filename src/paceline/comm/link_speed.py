"""How fast the links between the members of a group are: latency and bandwidth of each pair.

Note [Bursts]. A link of limited rate lets some bytes through at once before it slows down, and after a pause
it does so again. So each timed message follows another one that uses up what goes through at once, and the
receiver takes the time from the end of the first to the end of the second. If the receiver looks late, the
second is there already, and this time is too short: so it counts as no shorter than its share of both. More
than the first message may go through at once, so the first time of each size does not count.

Note [Messages in vain]. A rank may be stopped, or raise, while another one waits for its message. That wait
ends after a minute. gloo then closes the whole process group, so links are measured in a group of their own.
"""

import inspect
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.errors import LateRankError

# Under load, most pings are late; the shortest counts. So there are many, unless each takes long.
_PINGS, _PING_SECONDS = 30, 0.05
_FEWEST_PINGS, _MOST_PING_SECONDS = 10, 0.5
# More than shaped links usually let through at once.
_FIRST_BYTES = 192 * 1024
# The size grows until a message takes long enough. Each is sent several times, and the fastest counts: what
# else the processors do can only slow a message down.
_SIZES = (2**16, 2**18, 2**20, 2**22)
_MOST_REPEATS, _REPEAT_SECONDS = 4, 0.4
_LONG_SECONDS = 0.02
_LEAST_SECONDS = 1e-9
# Up to this many members every pair is measured; of more, each with its successor, as a ring uses them.
_MOST_FOR_ALL_PAIRS = 8
_TAG = 77
DEADLINE = timedelta(seconds=60)


@dataclass(frozen=True)
class Link:
    """The way from one host to another.

    Attributes:
        latency: the seconds that a short message takes.
        bandwidth: bytes per second, in the slower direction, while both are busy.
    """

    latency: float
    bandwidth: float


def open_measuring_group(group: Group, device: torch.device, name: str) -> Any:
    """Open a process group for the messages of ``measure_links``; every member calls this at once.

    Args:
        group: the members, such as one rank per host.
        device: where to send from.
        name: the same on all members, and never used before.

    Raises:
        LateRankError: a member did not come within a minute.
    """
    try:
        return group.open_for_messages(device, name=name, timeout=DEADLINE)
    except RuntimeError as error:
        raise LateRankError(
            f"another rank did not come to measure links within {DEADLINE.total_seconds():g} s"
        ) from error


def measure_links(group: Group, messages: Any, device: torch.device) -> dict[tuple[int, int], Link]:
    """Measure the pairs that this member belongs to; every member calls this at once.

    Args:
        group: the members.
        messages: what ``open_measuring_group`` returned; it is of no use any more if this raises on a member.
        device: where to send from.

    Raises:
        LateRankError: a member did not answer within a minute: see Note [Messages in vain].
    """
    own = [pair for pair in _pairs(group.size) if group.rank in pair]
    return {pair: _measure(group, messages, pair, device) for pair in own}


def _pairs(size: int) -> Sequence[tuple[int, int]]:
    """The pairs, in the order in which each member measures its own."""
    if size <= _MOST_FOR_ALL_PAIRS:
        return [*itertools.combinations(range(size), 2)]
    # Every other pair first: all of these at the same time, and nobody waits for more than two others.
    neighbours = sorted(itertools.pairwise(range(size)), key=lambda pair: pair[0] % 2)
    return [*neighbours, (0, size - 1)]


def _measure(group: Group, messages: Any, pair: tuple[int, int], device: torch.device) -> Link:
    [other] = [member for member in pair if member != group.rank]
    [name] = group.name_ranks([other])
    end = _LinkEnd(messages, other, name, device, leads=group.rank == pair[0])
    latency = end.latency()
    bandwidth = end.bandwidth(latency)
    # Again: what keeps processors busy for some milliseconds may be over.
    return Link(min(latency, end.latency()), bandwidth)


class _LinkEnd:
    """One end of a pair's link.

    Args:
        group: the process group that messages go through.
        other: the other end.
        name: the other end as users know it.
        device: where to send from.
        leads: whether this end decides what comes next.
    """

    def __init__(self, group: Any, other: int, name: int, device: torch.device, *, leads: bool) -> None:
        self._group = group
        self._other = other
        self._name = name
        self._leads = leads
        # Made once: the first write to new memory takes longer than a fast link.
        self._sent, self._received = (
            torch.ones(_SIZES[-1], dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._own, self._others = (torch.zeros(1, dtype=torch.float64, device=device) for _ in range(2))

    def latency(self) -> float:
        """Half of the shortest round trip; the first one, which opens the way, does not count."""
        self._round_trip(goes_on=True)
        began, goes_on = time.perf_counter(), True
        trips: list[float] = []
        while goes_on:
            seconds, goes_on = self._round_trip(goes_on=_wants_more(len(trips) + 1, began))
            trips.append(seconds)
        return min(trips) / 2

    def bandwidth(self, latency: float) -> float:
        """Bytes per second of the fastest message of the largest size, in the slower direction."""
        for size in _SIZES:
            first = self._slower(self._both_ways(size, latency))
            repeats = max(1, min(_MOST_REPEATS, int(_REPEAT_SECONDS / first)))
            seconds = self._slower(min(self._both_ways(size, latency) for _ in range(repeats)))
            if seconds >= _LONG_SECONDS:
                break
        return size / seconds

    def _round_trip(self, *, goes_on: bool) -> tuple[float, bool]:
        """Seconds, and whether the end that leads wants another round trip."""
        began = time.perf_counter()
        self._own.fill_(goes_on)
        for sends in (self._leads, not self._leads):
            if sends:
                self._wait(self._send(self._own))
            else:
                self._wait(self._receive(self._others))
        seconds = time.perf_counter() - began
        return seconds, bool((self._own if self._leads else self._others).item())

    def _both_ways(self, size: int, latency: float) -> float:
        """Seconds that a message takes from the other end, while another goes there: see Note [Bursts]."""
        began = time.perf_counter()
        first, second = [self._receive(self._received[:each]) for each in (_FIRST_BYTES, size)]
        sending = [self._send(self._sent[:each]) for each in (_FIRST_BYTES, size)]
        self._wait(first)
        between = time.perf_counter()
        self._wait(second)
        ended = time.perf_counter()
        for each in sending:
            self._wait(each)
        share = (ended - began - latency) * size / (_FIRST_BYTES + size)
        return max(ended - between, share, _LEAST_SECONDS)

    def _slower(self, seconds: float) -> float:
        """The longer of both ends' times."""
        self._own.fill_(seconds)
        receiving, sending = self._receive(self._others), self._send(self._own)
        self._wait(receiving)
        self._wait(sending)
        return max(seconds, float(self._others.item()))

    def _send(self, tensor: torch.Tensor) -> Any:
        return self._group.send([tensor], self._other, _TAG)

    def _receive(self, tensor: torch.Tensor) -> Any:
        return self._group.recv([tensor], self._other, _TAG)

    def _wait(self, work: Any) -> None:
        """Wait for a message; raise if it does not come in time."""
        began = time.monotonic()
        # A work in Python may not take a timeout, and has an end itself.
        arguments = () if inspect.isfunction(type(work).wait) else (DEADLINE,)
        try:
            work.wait(*arguments)
        except RuntimeError as error:
            if time.monotonic() - began < DEADLINE.total_seconds() / 2:
                raise
            raise LateRankError(
                f"rank {self._name} did not answer within {DEADLINE.total_seconds():g} s while links were "
                "measured"
            ) from error


def _wants_more(pings: int, began: float) -> bool:
    """Whether more round trips than these are worth their time."""
    seconds = time.perf_counter() - began
    if pings >= _FEWEST_PINGS and seconds >= _MOST_PING_SECONDS:
        return False
    return pings < _PINGS or seconds < _PING_SECONDS
