"""The layout of recorded numbers: one row of integers per step, and sums over blocks of steps.

A step's row begins with its first forward and is closed when the next step begins. Times are nanoseconds of
the monotonic clock; 0 stands for what did not happen.
"""

import enum
from collections.abc import Sequence

# Of the file format; a reader accepts this version only.
VERSION = 4
# A new column needs a new VERSION, and a place in tools/report: step_parts, page_numbers, page/data.js.


class StepColumn(enum.IntEnum):
    """The first columns of a row."""

    STEP = 0
    """The number of the step."""
    KIND = enum.auto()
    """A ``StepKind``."""
    BEGIN = enum.auto()
    """When the step's first forward was called. With gradient accumulation a step has several forwards."""
    FORWARDS = enum.auto()
    """How many forwards the step had."""
    FORWARD_START = enum.auto()
    """When the last forward was called."""
    BUFFERS_END = enum.auto()
    """When the module buffers were synchronised for that forward."""
    FORWARD_END = enum.auto()
    """When that forward returned."""
    BACKWARD_START = enum.auto()
    """The first sign of the synchronised backward."""
    BACKWARD_END = enum.auto()
    """When the last gradient was computed."""
    ALL_REDUCED = enum.auto()
    """When the last bucket was reduced."""
    END = enum.auto()
    """When every parameter's ``.grad`` was the average, or the step was lost."""
    OPTIMIZER_START = enum.auto()
    """When the first optimizer's step began."""
    OPTIMIZER_END = enum.auto()
    """When the last optimizer's step ended."""
    COUNT = enum.auto()
    """How many samples, or other units that the user counts, the step processed."""
    JOIN_END = enum.auto()
    """When, for the last forward, the ranks had told each other who has inputs (under join)."""
    LOADER_START = enum.auto()
    """When a ``DataLoader`` was first asked for a batch, after ``END``."""
    LOADER = enum.auto()
    """Nanoseconds in which a ``DataLoader`` was waited for, after ``END``."""
    EVALUATION = enum.auto()
    """Nanoseconds in forwards of the wrapper without gradients, after ``END``."""
    SAVING = enum.auto()
    """Nanoseconds in ``torch.save``, after ``END``."""
    OTHER_OPTIMIZERS = enum.auto()
    """How many steps optimizers of other parameters took, after ``END``."""
    OTHERS_INSIDE = enum.auto()
    """Nanoseconds in forward, backward and optimizer of other wrappers, before ``END``."""
    OTHERS = enum.auto()
    """The same after ``END``."""
    WITHOUT_INPUTS = enum.auto()
    """Nanoseconds in which this rank had no inputs left and waited for others (under join), after ``END``."""
    OPTIMIZER = enum.auto()
    """Nanoseconds inside of optimizers; from the first one to the last one there may be other things."""
    ACCUMULATED = enum.auto()
    """How many backwards the step had whose gradients were not averaged yet."""
    EVALUATIONS = enum.auto()
    """How many forwards of the wrapper without gradients there were after ``END``."""
    LOADER_INSIDE = enum.auto()
    """Nanoseconds in which a ``DataLoader`` was waited for, before ``END``."""
    EVALUATION_INSIDE = enum.auto()
    """Nanoseconds in forwards of the wrapper without gradients, before ``END``."""
    SAVING_INSIDE = enum.auto()
    """Nanoseconds in ``torch.save``, before ``END``."""
    KNOWN_BEFORE_FORWARD = enum.auto()
    """How much of the four columns that end in ``INSIDE`` was before the last forward."""
    KNOWN_BEFORE_OPTIMIZER = enum.auto()
    """How much of what they are for was after ``END``, and before the last optimizer's step."""
    KNOWN_BEFORE_LOADER = enum.auto()
    """How much of what they are for was after ``END``, and before ``LOADER_START``."""
    OTHERS_IN_BACKWARD = enum.auto()
    """Nanoseconds from the last bucket's ``READY`` to the end of a backward that had other wrappers in it."""


# What may be done between the parts of a step: the nanoseconds before ``END``, and those after it.
OTHERS_COLUMNS = (StepColumn.OTHERS_INSIDE, StepColumn.OTHERS)
LOADER_COLUMNS = (StepColumn.LOADER_INSIDE, StepColumn.LOADER)
EVALUATION_COLUMNS = (StepColumn.EVALUATION_INSIDE, StepColumn.EVALUATION)
SAVING_COLUMNS = (StepColumn.SAVING_INSIDE, StepColumn.SAVING)


# The columns of a step that are no times of the clock.
NOT_TIMES = (
    StepColumn.STEP, StepColumn.KIND, StepColumn.FORWARDS, StepColumn.COUNT, StepColumn.LOADER,
    StepColumn.EVALUATION, StepColumn.SAVING, StepColumn.OTHER_OPTIMIZERS, StepColumn.OTHERS_INSIDE,
    StepColumn.OTHERS, StepColumn.WITHOUT_INPUTS, StepColumn.OPTIMIZER,
    StepColumn.ACCUMULATED, StepColumn.EVALUATIONS, StepColumn.LOADER_INSIDE, StepColumn.EVALUATION_INSIDE,
    StepColumn.SAVING_INSIDE, StepColumn.KNOWN_BEFORE_FORWARD, StepColumn.KNOWN_BEFORE_OPTIMIZER,
    StepColumn.KNOWN_BEFORE_LOADER, StepColumn.OTHERS_IN_BACKWARD,
)  # fmt: skip


class BucketColumn(enum.IntEnum):
    """The columns that follow for each bucket, in the order of the plan."""

    READY = 0
    """When the last of the bucket's gradients was computed."""
    LAST_SLOT = enum.auto()
    """The slot (index of the parameter) of that gradient."""
    LAUNCH = enum.auto()
    """When the bucket's reduction was launched."""
    REDUCED = enum.auto()
    """When its reduction was seen to be complete."""


class StepKind(enum.IntFlag):
    """What was special about a step."""

    ORDINARY = 0
    NO_INPUTS = enum.auto()
    """This rank had no inputs left, and answered the other ranks' collectives."""
    LOST = enum.auto()
    """An error on this rank or on another one ended the step without averaged gradients."""


class SumColumn(enum.IntEnum):
    """The columns of a sum over a block of steps. From ``STEP`` to ``OPTIMIZER`` they are nanoseconds."""

    STEPS = 0
    """How many steps the block has."""
    FIRST_STEP = enum.auto()
    """The number of the first of them."""
    START = enum.auto()
    """When that one began."""
    STEP = enum.auto()
    """From each step's begin to the next one's."""
    JOIN = enum.auto()
    """In which the ranks told each other who has inputs, before the last forward."""
    BUFFERS = enum.auto()
    """In which module buffers were synchronised, before that forward."""
    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    WAIT_AFTER_BACKWARD = enum.auto()
    """From the end of this rank's backward until the last bucket was reduced."""
    COMMUNICATION = enum.auto()
    """In which at least one bucket was in flight."""
    OPTIMIZER = enum.auto()
    COUNT = enum.auto()
    """How many samples."""
    LONGEST = enum.auto()
    """The maximum instead of the sum: the longest step."""


def row_width(buckets: int) -> int:
    """How many numbers a row has."""
    return len(StepColumn) + buckets * len(BucketColumn)


def elapsed(start: int, end: int) -> int:
    """Nanoseconds between two recorded times; 0 if one of them did not happen."""
    return max(0, end - start) if start and end else 0


def first_launch(row: Sequence[int]) -> int:
    """When the first bucket was launched; if none was, when communication ended."""
    launches = row[len(StepColumn) + BucketColumn.LAUNCH :: len(BucketColumn)]
    return min(filter(None, launches), default=row[StepColumn.ALL_REDUCED])


def in_flight(row: Sequence[int]) -> int:
    """Nanoseconds in which at least one bucket was in flight; they are launched in the order of the plan."""
    total = until = 0
    launches = row[len(StepColumn) + BucketColumn.LAUNCH :: len(BucketColumn)]
    reduced = row[len(StepColumn) + BucketColumn.REDUCED :: len(BucketColumn)]
    for start, end in zip(launches, reduced, strict=True):
        if start and end > until:
            total += max(0, end - max(start, until))
            until = end
    return total


def row_sums(row: "list[int]", *, next_begin: int) -> list[int]:
    """What one step adds to the sums.

    Args:
        row: the step's row.
        next_begin: when the next step began.
    """
    sums = [0] * len(SumColumn)
    sums[SumColumn.STEPS] = 1
    sums[SumColumn.FIRST_STEP] = row[StepColumn.STEP]
    sums[SumColumn.START] = row[StepColumn.BEGIN]
    sums[SumColumn.STEP] = sums[SumColumn.LONGEST] = elapsed(row[StepColumn.BEGIN], next_begin)
    joined = max(row[StepColumn.FORWARD_START], row[StepColumn.JOIN_END])
    synced = max(joined, row[StepColumn.BUFFERS_END])
    sums[SumColumn.JOIN] = elapsed(row[StepColumn.FORWARD_START], joined)
    sums[SumColumn.BUFFERS] = elapsed(joined, synced)
    sums[SumColumn.FORWARD] = elapsed(synced, row[StepColumn.FORWARD_END])
    sums[SumColumn.BACKWARD] = elapsed(row[StepColumn.BACKWARD_START], row[StepColumn.BACKWARD_END])
    sums[SumColumn.WAIT_AFTER_BACKWARD] = elapsed(row[StepColumn.BACKWARD_END], row[StepColumn.ALL_REDUCED])
    sums[SumColumn.COMMUNICATION] = in_flight(row)
    sums[SumColumn.OPTIMIZER] = row[StepColumn.OPTIMIZER]
    sums[SumColumn.COUNT] = row[StepColumn.COUNT]
    return sums


def add_sums(sums: "list[int]", later: "list[int]") -> None:
    """Add the sums of later steps, in place."""
    for column in range(SumColumn.STEP, SumColumn.LONGEST):
        sums[column] += later[column]
    sums[SumColumn.STEPS] += later[SumColumn.STEPS]
    sums[SumColumn.LONGEST] = max(sums[SumColumn.LONGEST], later[SumColumn.LONGEST])
