"""Numbers for the page: columns of them, compressed, as text.

A column is whole numbers. What is written is each one's difference to the one before, with the sign in the
lowest bit, as 32 bits; all lowest bytes first, then all second ones, and so on. Most of the higher ones are 0
then, and the compression that browsers know by themselves finds that.

Times are counted in ticks from their step's begin, and one more, because 0 is what has not happened.
"""

import base64
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from paceline.recording.rows import BucketColumn, Column, Sum
from paceline.tools.report.runs import Track

_MICROSECOND = 1000
# A difference has a sign, and must still fit.
_LIMIT = (1 << 30) - 1
# Begins are many steps apart from the first one: written as two columns.
_HIGH = 1 << 20
_PLAIN = (Column.STEP, Column.KIND)
_TIMES = (
    Column.FORWARD_START,
    Column.BUFFERS_END,
    Column.FORWARD_END,
    Column.BACKWARD_START,
    Column.BACKWARD_END,
    Column.LANDED,
    Column.END,
    Column.OPTIMIZER_START,
    Column.OPTIMIZER_END,
)
_SUMS = (Sum.STEPS, Sum.FIRST, Sum.STEP, Sum.EXPOSED, Sum.COMMUNICATION, Sum.COUNT)
_PLAIN_SUMS = (Sum.STEPS, Sum.FIRST, Sum.COUNT)
COLUMNS = len(_PLAIN) + 2 + len(_TIMES)


def text(columns: Iterable[Sequence[int]]) -> str:
    """Columns as the page reads them."""
    compressor = zlib.compressobj(6)
    packed = b"".join(compressor.compress(_bytes(column)) for column in columns) + compressor.flush()
    return base64.b64encode(packed).decode("ascii")


def tick(tracks: Iterable[Track]) -> int:
    """Nanoseconds of the unit of time: a microsecond, unless steps are so long that these do not fit."""
    longest = max((length for track in tracks for length in track.lengths), default=0)
    unit = _MICROSECOND
    while longest // unit >= _LIMIT // 2:
        unit *= 1000
    return unit


def rows(track: Track, last: int, *, start: int, unit: int) -> Iterator[Sequence[int]]:
    """The columns of a track's last steps, with times since a start."""
    of = slice(max(0, len(track) - last), None)
    begins = track[Column.BEGIN][of]
    ticks = [max(0, begin - start) // unit for begin in begins]
    for column in _PLAIN:
        yield track[column][of]
    yield [each // _HIGH for each in ticks]
    yield [each % _HIGH for each in ticks]
    for column in _TIMES:
        yield _since(begins, track[column][of], unit)
    for bucket in range((len(track.columns) - len(Column)) // len(BucketColumn)):
        for part in (BucketColumn.READY, BucketColumn.LAUNCH, BucketColumn.DONE):
            yield _since(begins, track.bucket(bucket, part)[of], unit)
        yield track.bucket(bucket, BucketColumn.LAST)[of]


def sums(track: Track) -> Iterator[Sequence[int]]:
    """The columns of its sums; times in microseconds a step."""
    for column in _SUMS:
        if column in _PLAIN_SUMS:
            yield [each[column] for each in track.sums]
        else:
            yield [each[column] // max(1, each[Sum.STEPS]) // _MICROSECOND for each in track.sums]


def _since(begins: Sequence[int], times: Sequence[int], unit: int) -> list[int]:
    return [time and max(0, time - begin) // unit + 1 for begin, time in zip(begins, times, strict=True)]


def _bytes(column: Sequence[int]) -> bytes:
    kept = [min(max(each, -_LIMIT), _LIMIT) for each in column]
    changes = (each - last for last, each in pairwise([0, *kept]))
    cells = array("I", [change << 1 if change >= 0 else (-change << 1) - 1 for change in changes])
    if sys.byteorder == "big":
        cells.byteswap()
    raw = cells.tobytes()
    return b"".join(raw[byte::4] for byte in range(4))
