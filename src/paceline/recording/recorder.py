"""One wrapper's record on one rank.

Always on. With ``PACELINE_RECORD`` in the environment the record is kept in that folder, in files that
``paceline report`` reads; otherwise in memory, until ``write`` is called.
"""

import atexit
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.recording.chapter import About, Chapter, Plan
from paceline.recording.rows import BucketColumn, Column, Kind, first_launch, sums_of, width

FOLDER_VARIABLE = "PACELINE_RECORD"
# Plans change once or twice; who changes them all the time has the last ones recorded.
_MOST_CHAPTERS = 8

_BUCKETS = len(Column)
_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()
# What the monotonic clock lacks to the time since the epoch.
_EPOCH = time.time_ns() - time.monotonic_ns()


class Recorder:
    """Stamps what happens.

    Args:
        parameters: the ids of what is trained, by which its optimizers are known.
        folder: where to keep it; in memory if None.

    Attributes:
        unit: what ``count`` counts.
    """

    def __init__(self, parameters: Iterable[int] = (), folder: Path | None = None) -> None:
        self._parameters = frozenset(parameters)
        self.unit = "samples"
        self._folder = folder
        self._chapters: list[Chapter] = []
        self._next: tuple[Plan, About] | None = None
        self._row = self._last = [0] * width(0)
        self._has_ended = False
        self._counted = 0
        self._owner = os.getpid()
        _recorders.add(self)

    def follow(self, plan: Plan, about: About) -> None:
        """Steps are of another plan, or among other ranks, from now on."""
        self._next = plan, about

    def count(self, number: int, unit: str | None = None) -> None:
        """So many samples go through the step at hand; or tokens, or whatever the unit says.

        Between an optimizer's step and the next forward, they are the next step's.
        """
        if self._has_ended:
            self._counted += number
        else:
            self._row[Column.COUNT] += number
        if unit is not None and unit != self.unit:
            self.unit = unit
            if self._chapters:
                self._chapters[-1].rename_unit(unit)

    def forward_began(self) -> None:
        """The wrapper's forward was called."""
        now = time.monotonic_ns()
        row = self._row
        if self._has_ended:
            row = self._close(now)
        if not row[Column.BEGIN]:
            row[Column.BEGIN] = now
        row[Column.FORWARDS] += 1
        row[Column.FORWARD_START] = now
        row[Column.BUFFERS_END] = 0

    def buffers_synced(self) -> None:
        """Module buffers are equal on all ranks."""
        self._row[Column.BUFFERS_END] = time.monotonic_ns()

    def forward_ended(self) -> None:
        """The module has returned."""
        self._row[Column.FORWARD_END] = time.monotonic_ns()

    def backward_began(self, step: int) -> None:
        """The first sign of a synced backward."""
        now = time.monotonic_ns()
        if self._has_ended:  # a second backward over one forward
            self._close(now)
        if self._next is not None:
            self._turn_over(*self._next)
            self._next = None
        row = self._row
        row[Column.STEP] = step
        row[Column.BACKWARD_START] = now
        row[Column.BEGIN] = row[Column.BEGIN] or now

    def ready(self, bucket: int, slot: int) -> None:
        """The last of a bucket's gradients is there."""
        place = _BUCKETS + bucket * len(BucketColumn)
        self._row[place + BucketColumn.READY] = time.monotonic_ns()
        self._row[place + BucketColumn.LAST] = slot

    def launched(self, bucket: int) -> None:
        """A bucket left."""
        self._row[_BUCKETS + bucket * len(BucketColumn) + BucketColumn.LAUNCH] = time.monotonic_ns()

    def done(self, bucket: int) -> None:
        """A bucket is back."""
        self._row[_BUCKETS + bucket * len(BucketColumn) + BucketColumn.DONE] = time.monotonic_ns()

    def backward_ended(self) -> None:
        """The last gradient was there."""
        self._row[Column.BACKWARD_END] = time.monotonic_ns()

    def landed(self) -> None:
        """The last bucket was back."""
        self._row[Column.LANDED] = time.monotonic_ns()

    def ended(self, kind: Kind = Kind.ORDINARY) -> None:
        """Averages have been handed out, or the step is lost."""
        self._row[Column.END] = time.monotonic_ns()
        self._row[Column.KIND] |= kind
        self._has_ended = True

    def write(self, folder: Path | str) -> None:
        """Write what is there to a folder."""
        self.close()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for chapter in self._chapters:
            chapter.write(folder)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """No more belongs to the step at hand."""
        # A forked child has this object and the memory too, and the step is not its own to put away.
        if self._has_ended and os.getpid() == self._owner:
            self._close(time.monotonic_ns())

    def durations(self) -> dict[str, int]:
        """Of the last step: nanoseconds of forward, backward, communication, and of the last two at once."""
        row = self._row if self._has_ended else self._last
        backward_start, backward_end, launch = (
            row[Column.BACKWARD_START],
            row[Column.BACKWARD_END],
            first_launch(row),
        )
        compute = backward_end - backward_start
        return {
            "forward_compute_time": max(backward_start - row[Column.FORWARD_START], 0),
            "backward_compute_time": compute,
            "backward_comm_time": max(row[Column.LANDED] - launch, 0),
            "backward_compute_comm_overlap_time": min(max(backward_end - launch, 0), compute),
        }

    def stamps(self) -> dict[str, int]:
        """When the parts of the last step began and ended, in nanoseconds since the epoch."""
        row = self._row if self._has_ended else self._last
        times = {
            "forward_compute_time_start": row[Column.FORWARD_START],
            "backward_compute_time_start": row[Column.BACKWARD_START],
            "backward_compute_time_end": row[Column.BACKWARD_END],
            "backward_comm_time_start": first_launch(row),
            "backward_comm_time_end": row[Column.LANDED],
        }
        return {key: stamp + _EPOCH for key, stamp in times.items()}

    def _close(self, now: int) -> list[int]:
        """Put the row away, and begin another."""
        row = self._row
        if self._chapters:
            sums = sums_of(row, next_begin=now, communication=self.durations()["backward_comm_time"])
            self._chapters[-1].ring.append(row, sums)
        self._last, self._row = row, [0] * len(row)
        self._row[Column.COUNT], self._counted = self._counted, 0
        self._has_ended = False
        return self._row

    def _turn_over(self, plan: Plan, about: About) -> None:
        """Begin a chapter of rows of another width, or of other buckets."""
        number = self._chapters[-1].number + 1 if self._chapters else 0
        self._chapters.append(Chapter(about, plan, number, unit=self.unit, folder=self._folder))
        if len(self._chapters) > _MOST_CHAPTERS:
            self._chapters.pop(0).remove()
        self._row[_BUCKETS:] = [0] * (width(len(plan.buckets)) - _BUCKETS)


def optimizer_began(parameters: Sequence[int]) -> None:
    """An optimizer's step began; these are the ids of its parameters."""
    now = time.monotonic_ns()
    for recorder in _stepped(parameters):
        recorder._row[Column.OPTIMIZER_START] = recorder._row[Column.OPTIMIZER_START] or now


def optimizer_ended(parameters: Sequence[int]) -> None:
    """An optimizer's step has ended."""
    now = time.monotonic_ns()
    for recorder in _stepped(parameters):
        recorder._row[Column.OPTIMIZER_END] = now


def _stepped(parameters: Sequence[int]) -> "list[Recorder]":
    """The recorders to whose last step an optimizer's step belongs."""
    return [
        recorder
        for recorder in list(_recorders)
        if recorder._has_ended and not recorder._parameters.isdisjoint(parameters)
    ]


def folder_from_environment() -> Path | None:
    """Where records are to be kept."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder).absolute() if folder else None


@atexit.register
def _close_all() -> None:
    for recorder in list(_recorders):
        recorder.close()
