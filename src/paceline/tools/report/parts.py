"""Where a step goes: its parts, and what of the communication was hidden."""

import enum
import statistics
from collections.abc import Mapping, Sequence

from paceline.recording.rows import BucketColumn, Column
from paceline.tools.report.runs import Section, Track

# Medians of buckets are taken from so many steps, spread over the record.
_SAMPLES = 512


class Part(enum.StrEnum):
    """What a rank is at; in the order of a step."""

    PASSES = "earlier passes"
    """Forwards and backwards whose gradients are only accumulated."""
    BUFFERS = "module buffers"
    FORWARD = "forward"
    LOSS = "loss"
    """Between forward and backward."""
    BACKWARD = "backward"
    WAITING = "waiting for the last rank"
    """Backward is over here, and not yet on some other rank."""
    COMMUNICATION = "exposed communication"
    """Backward is over on all ranks, and the last bucket is not back."""
    HANDING_OUT = "handing out"
    AFTER = "after backward"
    """Before the optimizer: gradients are clipped, say."""
    OPTIMIZER = "optimizer"
    BETWEEN = "data and the rest"
    """Before the next forward."""


Durations = Mapping[Part, Sequence[int]]


def durations(track: Track, last_arrivals: Mapping[int, int]) -> Durations:
    """Nanoseconds that each of a rank's steps spent in each part."""
    found: dict[Part, list[int]] = {part: [] for part in Part}
    whole = zip(*track.columns[: len(Column)], strict=True)
    for row, length in zip(whole, track.lengths, strict=True):
        for part, spent in zip(Part, _parts(row, length, last_arrivals), strict=True):
            found[part].append(spent)
    return found


def _parts(row: Sequence[int], length: int, last_arrivals: Mapping[int, int]) -> tuple[int, ...]:
    step, _, begin, _, start, buffers, forward, backward, arrival, landed, end, optimizer, done, _ = row
    synced = max(buffers, start)
    exposed = _span(arrival, landed)
    waiting = min(exposed, _span(arrival, last_arrivals.get(step, 0)))
    spent = (
        _span(begin, start),
        _span(start, buffers),
        _span(synced, forward),
        _span(max(forward, start), backward),
        _span(backward, arrival),
        waiting,
        exposed - waiting,
        _span(landed, end),
        _span(end, optimizer),
        _span(optimizer, done),
    )
    return *spent, max(0, length - sum(spent))


def _span(start: int, end: int) -> int:
    return max(0, end - start) if start and end else 0


def typical(lengths: Sequence[int]) -> list[int]:
    """Where the middle half of the steps is, by length; without the last, of which no next one tells it."""
    ordered = sorted(range(max(1, len(lengths) - 1)), key=lambda place: lengths[place])
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def shares(spent: Durations, places: Sequence[int]) -> dict[Part, float]:
    """Mean nanoseconds of each part in some steps."""
    return {part: statistics.fmean(column[place] for place in places) for part, column in spent.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first, the median and the third."""
    if not values:
        return 0.0, 0.0, 0.0
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def median(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return statistics.median(values) if values else 0.0


def samples(track: Track) -> range:
    """Some of a track's steps, spread over it."""
    return range(0, len(track), max(1, len(track) // _SAMPLES))


def communication(section: Section, track: Track) -> tuple[float, float]:
    """Mean nanoseconds a step in which some bucket was under way, and how many of them in backward."""
    under_way, hidden, places = 0, 0, samples(track)
    buckets = range(len(section.buckets))
    columns = [
        (track.bucket(each, BucketColumn.LAUNCH), track.bucket(each, BucketColumn.DONE)) for each in buckets
    ]
    for place in places:
        arrival = track[Column.BACKWARD_END][place]
        for start, end in _union([(launch[place], done[place]) for launch, done in columns]):
            under_way += end - start
            hidden += max(0, min(end, arrival) - start)
    return under_way / len(places), hidden / len(places)


def _union(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if 0 < span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
