"""How a step is written down: a row of whole numbers, of which times are nanoseconds of the monotonic clock.

A step's row begins with its first forward and is closed by the next step's. What has not happened is 0.
"""

import enum
from collections.abc import Sequence

# Of the files; a reader knows this one only.
VERSION = 1


class Column(enum.IntEnum):
    """What a row begins with."""

    STEP = 0
    """The number of the step."""
    KIND = enum.auto()
    """A ``Kind``."""
    BEGIN = enum.auto()
    """When the step's first forward was called; there are several where gradients are accumulated."""
    FORWARDS = enum.auto()
    """How many forwards there were."""
    FORWARD_START = enum.auto()
    """When the last of them was called."""
    BUFFERS_END = enum.auto()
    """When its module buffers were equal on all ranks."""
    FORWARD_END = enum.auto()
    """When it returned."""
    BACKWARD_START = enum.auto()
    """The first sign of a backward."""
    BACKWARD_END = enum.auto()
    """When the last gradient was there."""
    LANDED = enum.auto()
    """When the last bucket was back."""
    END = enum.auto()
    """When the averages had been handed out."""
    OPTIMIZER_START = enum.auto()
    """When the first optimizer's step began."""
    OPTIMIZER_END = enum.auto()
    """When the last one's had ended."""
    COUNT = enum.auto()
    """How many samples, or whatever the user counts, went through it."""


class BucketColumn(enum.IntEnum):
    """What follows for each bucket, in the order of the plan."""

    READY = 0
    """When the last of its gradients was there."""
    LAST = enum.auto()
    """The slot of that gradient."""
    LAUNCH = enum.auto()
    """When it left."""
    DONE = enum.auto()
    """When it was seen to be back."""


class Kind(enum.IntFlag):
    """What was special about a step."""

    ORDINARY = 0
    SHADOW = enum.auto()
    """This rank had nothing left, and answered the others' collectives."""
    LOST = enum.auto()
    """It was given up, here or on another rank."""


class Sum(enum.IntEnum):
    """What is kept of many steps together; but for the first three, sums of nanoseconds."""

    STEPS = 0
    FIRST = enum.auto()
    """The number of the first step."""
    START = enum.auto()
    """When that began."""
    STEP = enum.auto()
    """From one step's begin to the next one's."""
    FORWARD = enum.auto()
    BUFFERS = enum.auto()
    """The part of forward that went into making buffers equal."""
    BACKWARD = enum.auto()
    EXPOSED = enum.auto()
    """From the end of backward until the last bucket was back: communication that nothing hid."""
    COMMUNICATION = enum.auto()
    """From the first launch until the last bucket was back."""
    OPTIMIZER = enum.auto()
    COUNT = enum.auto()
    """How many samples."""
    LONGEST = enum.auto()
    """Not a sum: the longest step."""


def width(buckets: int) -> int:
    """How many numbers a row has."""
    return len(Column) + buckets * len(BucketColumn)


def first_launch(row: Sequence[int]) -> int:
    """When the first bucket left; the end of communication if none did."""
    launches = row[len(Column) + BucketColumn.LAUNCH :: len(BucketColumn)]
    return min(filter(None, launches), default=row[Column.LANDED])


def sums_of(row: "list[int]", *, next_begin: int, communication: int) -> list[int]:
    """One step's part in the sums.

    Args:
        row: the step's.
        next_begin: when the next step began.
        communication: its nanoseconds of communication.
    """
    sums = [0] * len(Sum)
    sums[Sum.STEPS] = 1
    sums[Sum.FIRST] = row[Column.STEP]
    sums[Sum.START] = row[Column.BEGIN]
    sums[Sum.STEP] = sums[Sum.LONGEST] = _between(row[Column.BEGIN], next_begin)
    sums[Sum.FORWARD] = _between(row[Column.FORWARD_START], row[Column.FORWARD_END])
    sums[Sum.BUFFERS] = _between(row[Column.FORWARD_START], row[Column.BUFFERS_END])
    sums[Sum.BACKWARD] = _between(row[Column.BACKWARD_START], row[Column.BACKWARD_END])
    sums[Sum.EXPOSED] = _between(row[Column.BACKWARD_END], row[Column.LANDED])
    sums[Sum.COMMUNICATION] = communication
    sums[Sum.OPTIMIZER] = _between(row[Column.OPTIMIZER_START], row[Column.OPTIMIZER_END])
    sums[Sum.COUNT] = row[Column.COUNT]
    return sums


def add(sums: "list[int]", more: "list[int]") -> None:
    """Take later steps' sums in."""
    for place in range(Sum.STEP, Sum.LONGEST):
        sums[place] += more[place]
    sums[Sum.STEPS] += more[Sum.STEPS]
    sums[Sum.LONGEST] = max(sums[Sum.LONGEST], more[Sum.LONGEST])


def _between(start: int, end: int) -> int:
    return max(0, end - start) if start and end else 0
