"""Encodes the numbers of the page: columns of integers, compressed, as text. ``page/data.js`` decodes them.

Of each number, its difference to the one before in its column is encoded as 32 bits, with the sign in the
lowest bit. The lowest bytes of a column come first, then the second ones, and so on: most of the higher bytes
are 0, which zlib compresses well, and every browser has zlib.

Times are counted in ticks from the begin of their step, plus one, because 0 stands for what did not happen.
"""

import base64
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from paceline.recording.rows import BucketColumn, StepColumn, SumColumn
from paceline.tools.report.step_parts import StepPart
from paceline.tools.report.timeline_overlays import step_overlays
from paceline.tools.report.wall_time import PauseCause, RankWallTime
from paceline.tools.report.wrapper_runs import RankTimeline

_MICROSECOND = 1000
# A difference of two numbers needs one more bit, and one for the sign.
_LIMIT = (1 << 30) - 1
# The begin of a step may exceed the limit, so it is encoded as two columns.
_HIGH = 1 << 20
_PLAIN = (StepColumn.STEP, StepColumn.KIND)
_TIMES = (
    StepColumn.FORWARD_START,
    StepColumn.BUFFERS_END,
    StepColumn.FORWARD_END,
    StepColumn.BACKWARD_START,
    StepColumn.BACKWARD_END,
    StepColumn.ALL_REDUCED,
    StepColumn.END,
    StepColumn.OPTIMIZER_START,
    StepColumn.OPTIMIZER_END,
)
_PLAIN_SUMS = (SumColumn.STEPS, SumColumn.FIRST_STEP, SumColumn.COUNT)
_SUMS = (
    SumColumn.STEPS,
    SumColumn.FIRST_STEP,
    SumColumn.STEP,
    SumColumn.WAIT_AFTER_BACKWARD,
    SumColumn.COMMUNICATION,
    SumColumn.COUNT,
)
COLUMNS = len(_PLAIN) + 2 + len(_TIMES) + 1


def encode(columns: Iterable[Sequence[int]]) -> str:
    """The columns as text."""
    compressor = zlib.compressobj(6)
    compressed = b"".join(compressor.compress(_bytes(column)) for column in columns) + compressor.flush()
    return base64.b64encode(compressed).decode("ascii")


def tick(timelines: Iterable[RankTimeline]) -> int:
    """The unit of time in nanoseconds: a microsecond, or more if steps are too long for that."""
    longest = max((time for timeline in timelines for time in timeline.step_times), default=0)
    unit = _MICROSECOND
    while longest // unit >= _LIMIT // 2:
        unit *= 1000
    return unit


def step_columns(timeline: RankTimeline, last: int, *, start: int, unit: int) -> Iterator[Sequence[int]]:
    """The columns of a timeline's last steps.

    Args:
        timeline: the timeline.
        last: how many steps.
        start: when the first step of all ranks began.
        unit: the tick.
    """
    rows = slice(max(0, len(timeline) - last), None)
    begins = timeline[StepColumn.BEGIN][rows]
    ticks = [max(0, begin - start) // unit for begin in begins]
    for column in _PLAIN:
        yield timeline[column][rows]
    yield [each // _HIGH for each in ticks]
    yield [each % _HIGH for each in ticks]
    for column in _TIMES:
        yield _since(begins, timeline[column][rows], unit)
    for bucket in range((len(timeline.columns) - len(StepColumn)) // len(BucketColumn)):
        for time in (BucketColumn.READY, BucketColumn.LAUNCH, BucketColumn.REDUCED):
            yield _since(begins, timeline.bucket(bucket, time)[rows], unit)
        yield timeline.bucket(bucket, BucketColumn.LAST_SLOT)[rows]


def overlay_columns(
    timeline: RankTimeline, wall: RankWallTime, last: int, *, unit: int
) -> list[Sequence[int]]:
    """What is drawn over the parts of a timeline's last steps; see ``Overlay``.

    How many per step; then of each its part, its begin since that of its step, its length, and for a pause
    the place of its cause among ``PauseCause``, plus one.
    """
    rows = range(max(0, len(timeline) - last), len(timeline))
    by_row = step_overlays(timeline, wall)
    begins = timeline[StepColumn.BEGIN]
    drawn = [(begins[row], each) for row in rows for each in by_row[row]]
    parts, causes = list(StepPart), [None, *PauseCause]
    return [
        [len(by_row[row]) for row in rows],
        [parts.index(each.part) for _, each in drawn],
        [max(0, each.start - begin) // unit for begin, each in drawn],
        [each.nanoseconds // unit for _, each in drawn],
        [causes.index(each.cause) for _, each in drawn],
    ]


def sum_columns(timeline: RankTimeline) -> Iterator[Sequence[int]]:
    """The columns of a timeline's sums; times are microseconds per step."""
    for column in _SUMS:
        if column in _PLAIN_SUMS:
            yield [each[column] for each in timeline.sums]
        else:
            yield [each[column] // max(1, each[SumColumn.STEPS]) // _MICROSECOND for each in timeline.sums]


def _since(begins: Sequence[int], times: Sequence[int], unit: int) -> list[int]:
    return [time and max(0, time - begin) // unit + 1 for begin, time in zip(begins, times, strict=True)]


def _bytes(column: Sequence[int]) -> bytes:
    limited = [min(max(each, -_LIMIT), _LIMIT) for each in column]
    changes = (each - last for last, each in pairwise([0, *limited]))
    cells = array("I", [change << 1 if change >= 0 else (-change << 1) - 1 for change in changes])
    if sys.byteorder == "big":
        cells.byteswap()
    raw = cells.tobytes()
    return b"".join(raw[byte::4] for byte in range(4))
