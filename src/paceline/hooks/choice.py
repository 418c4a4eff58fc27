"""Which hook makes steps shortest on a link, by prediction. Pure: no tensors here, and nothing is measured.

Note [Predicted steps]. Backward makes one bucket after the other ready. A rank works on a bucket before it is
sent (it compresses, while backward stands still), the link sends one bucket after the other, and when
backward has ended the rank works on what has arrived. Time in hooks delays every gradient that comes later.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.comm.link_speed import Link

# A hook with a larger error must be faster by this part; otherwise noise decides, and precision is lost for
# nothing.
_WORTH = 0.05


@dataclass(frozen=True)
class HookCost:
    """What a hook costs, on one rank.

    Attributes:
        before: seconds of work per byte of gradients, before the first collective.
        after: the same after it.
        sent: bytes that a host sends to others per byte of gradients.
        rounds: how many messages of a bucket wait for each other.
    """

    before: float
    after: float
    sent: float
    rounds: int


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket of gradients: its bytes, and seconds from the start of backward until they are ready."""

    nbytes: int
    ready: float


@dataclass(frozen=True)
class StepWork:
    """What a step has to do, whichever hook there is.

    Attributes:
        buckets: in launch order.
        backward: seconds that backward takes.
    """

    buckets: Sequence[ReadyBucket]
    backward: float = 0.0


@dataclass(frozen=True)
class Choice:
    """The hook that was chosen, and why.

    Attributes:
        name: the hook.
        seconds: the predicted time of each hook, from the start of backward to averaged gradients.
        link: the slowest link.
    """

    name: str
    seconds: Mapping[str, float]
    link: Link

    def __str__(self) -> str:
        others = [f"{name} {format_time(took)}" for name, took in self.seconds.items() if name != self.name]
        link = f"the slowest link has {_rate(self.link.bandwidth)} and {format_time(self.link.latency)}"
        return ", ".join(
            [f"{self.name} is predicted to take {format_time(self.seconds[self.name])}", *others, link]
        )


def predict(work: StepWork, cost: HookCost, link: Link) -> float:
    """Seconds from the start of backward to averaged gradients: see Note [Predicted steps]."""
    now = in_hook = link_free = 0.0
    arrivals = []
    for bucket in work.buckets:
        now = max(now, bucket.ready + in_hook) + cost.before * bucket.nbytes
        in_hook += cost.before * bucket.nbytes
        sending = cost.rounds * link.latency + cost.sent * bucket.nbytes / link.bandwidth
        link_free = max(link_free, now) + sending
        arrivals.append(link_free)
    now = max(now, work.backward + in_hook)
    for bucket, arrival in zip(work.buckets, arrivals, strict=True):
        now = max(now, arrival) + cost.after * bucket.nbytes
    return now


def choose(work: StepWork, costs: Mapping[str, HookCost], link: Link, *, now: str | None = None) -> Choice:
    """The fastest hook; of hooks that are about as fast, the one in force, or that with the smallest error.

    Args:
        work: what a step has to do.
        costs: what each hook costs, by name; hooks with a smaller error come first.
        link: the slowest link.
        now: the hook in force, if there is one.
    """
    seconds = {name: predict(work, cost, link) for name, cost in costs.items()}
    good = (1 + _WORTH) * min(seconds.values())
    fast = [name for name, took in seconds.items() if took <= good]
    return Choice(now if now is not None and now in fast else fast[0], seconds, link)


def has_changed(before: float, now: float) -> bool:
    """Whether one of two speeds is more than twice the other."""
    return not before / 2 <= now <= 2 * before


def format_time(seconds: float) -> str:
    """Seconds, or milliseconds if it is less than one."""
    return f"{_number(seconds)} s" if seconds >= 1 else f"{_number(1000 * seconds)} ms"


def _rate(bandwidth: float) -> str:
    mbit = 8e-6 * bandwidth
    return f"{_number(mbit)} Mbit/s" if mbit < 1000 else f"{_number(mbit / 1000)} Gbit/s"


def _number(value: float) -> str:
    """A number with three digits or more, never as a power of ten."""
    if not value or value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(value))}f}".rstrip("0").rstrip(".")
