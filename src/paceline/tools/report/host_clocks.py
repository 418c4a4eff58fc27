"""Aligns the clocks of hosts, by when buckets were launched and when they were reduced.

No rank can see a bucket reduced before every rank has launched it. So each step gives two bounds for what
must be added to another host's times to compare them with the reference host's: at least what makes the other
host's first sight of the reduced bucket as late as the reference's last launch, and at most what leaves its
last launch as early as the reference's first sight. The tightest bounds of many steps are used. The offset is
the middle between them.
"""

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.recording.reader import PlanRecording
from paceline.recording.rows import BucketColumn, StepColumn, StepKind

# Steps that share one offset. Clocks drift by some microseconds per second, so it must not be too many.
WINDOW = 64

_LAUNCHES = len(StepColumn) + BucketColumn.LAUNCH
_REDUCED = len(StepColumn) + BucketColumn.REDUCED

# A bucket on one host: when its last rank launched it, and when its first rank saw it reduced.
BucketSpan = tuple[int, int]


@dataclass(frozen=True)
class ClockOffset:
    """What must be added to one host's times to get another's, in nanoseconds.

    Attributes:
        steps: the step in the middle of each window.
        values: the offset at these steps; between them it is interpolated.
        errors: by how much each value may be wrong; empty if only the wall clocks are known.
    """

    steps: Sequence[int]
    values: Sequence[int]
    errors: Sequence[int]

    def at(self, step: int) -> int:
        """The offset at one step."""
        after = bisect_right(self.steps, step)
        if after == 0 or after == len(self.steps):
            return self.values[min(after, len(self.steps) - 1)]
        left, right = self.steps[after - 1], self.steps[after]
        low, high = self.values[after - 1], self.values[after]
        return low + (high - low) * (step - left) // (right - left)

    @property
    def uncertainty(self) -> int | None:
        """The median error; None if it is unknown."""
        return int(statistics.median(self.errors)) if self.errors else None


SAME_CLOCK = ClockOffset((0,), (0,), (0,))


def host_key(recording: PlanRecording) -> str:
    """Equal for ranks that share a clock: those of one boot of one machine."""
    return str(recording.description.get("boot") or recording.description.get("host"))


def clock_offsets(recordings: Sequence[PlanRecording]) -> dict[str, ClockOffset]:
    """What must be added to each host's times to get those of the first host, by ``host_key``."""
    hosts: dict[str, list[PlanRecording]] = defaultdict(list)
    for recording in recordings:
        hosts[host_key(recording)].append(recording)
    (first, reference), *others = hosts.items()
    offsets = {first: SAME_CLOCK}
    if others:
        reference_spans = _bucket_spans(reference)
        for name, own in others:
            guess = int(own[0].description["epoch"]) - int(reference[0].description["epoch"])
            offsets[name] = clock_offset(reference_spans, _bucket_spans(own), guess=guess)
    return offsets


def clock_offset(
    reference: Mapping[int, Sequence[BucketSpan]],
    other: Mapping[int, Sequence[BucketSpan]],
    *,
    guess: int,
    window: int = WINDOW,
) -> ClockOffset:
    """What must be added to the other host's times to get the reference host's.

    Args:
        reference: the spans of the reference host's buckets, by step.
        other: those of the other host.
        guess: the offset by the wall clocks, which is used if no bucket gives bounds.
        window: how many steps share one offset.
    """
    shared = sorted(reference.keys() & other.keys())
    steps, values, errors = [], [], []
    for start in range(0, len(shared), window):
        in_window = shared[start : start + window]
        bounds = [pair for step in in_window for pair in _bounds(reference[step], other[step])]
        if bounds:
            low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
            steps.append(in_window[len(in_window) // 2])
            values.append((low + high) // 2)
            errors.append(abs(high - low) // 2)
    return ClockOffset(steps, values, errors) if steps else ClockOffset((0,), (guess,), ())


def _bounds(reference: Sequence[BucketSpan], other: Sequence[BucketSpan]) -> Iterator[tuple[int, int]]:
    for (our_launch, our_reduced), (their_launch, their_reduced) in zip(reference, other, strict=False):
        if our_launch and our_reduced and their_launch and their_reduced:
            yield our_launch - their_reduced, our_reduced - their_launch


def _bucket_spans(recordings: Sequence[PlanRecording]) -> dict[int, list[BucketSpan]]:
    """The spans of the buckets of each step on one host, without steps that one of its ranks has lost."""
    spans: dict[int, list[BucketSpan]] = {}
    lost: set[int] = set()
    for recording in recordings:
        for row in recording.rows:
            launches, reduced = row[_LAUNCHES :: len(BucketColumn)], row[_REDUCED :: len(BucketColumn)]
            own = list(zip(launches, reduced, strict=True))
            step = row[StepColumn.STEP]
            if row[StepColumn.KIND] & StepKind.LOST:
                lost.add(step)
            known = spans.get(step)
            spans[step] = (
                own if known is None else [_intersection(*pair) for pair in zip(known, own, strict=True)]
            )
    return {step: each for step, each in spans.items() if step not in lost}


def _intersection(one: BucketSpan, other: BucketSpan) -> BucketSpan:
    if not all((*one, *other)):
        return (0, 0)
    return max(one[0], other[0]), min(one[1], other[1])
