"""Records when the steps of one wrapper did what, on one rank.

Recording is always on. With ``PACELINE_RECORD=FOLDER`` in the environment, the recording is in files in that
folder, which ``paceline report`` reads. Otherwise it is in memory, until ``write`` is called.
"""

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.recording.audit_file import AuditWriter
from paceline.recording.files import make_folder
from paceline.recording.rows import BucketColumn, StepColumn, StepKind, first_launch, row_sums, row_width
from paceline.recording.writer import PlanDescription, PlanWriter, WrapperDescription

FOLDER_VARIABLE = "PACELINE_RECORD"
# Most runs have two or three plans. Of a run that changes its plan all the time, the last ones are kept; in a
# run whose ranks are replaced, those of each generation.
_MOST_PLANS = 8
# In a run whose ranks are replaced, the plans of a generation have numbers of their own.
PLANS_PER_GENERATION = 100

_BUCKETS = len(StepColumn)
_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()
# Added to a time of the monotonic clock, it gives the time since the epoch.
_EPOCH = time.time_ns() - time.monotonic_ns()


class Recorder:
    """Takes the time of each event of a step.

    Args:
        parameter_ids: the ``id`` of each trained parameter, by which its optimizers are recognised.
        describe: describes the wrapper, given the process group that it averages over.
        folder: where the files are; the recording is kept in memory if it is None.

    Attributes:
        unit: what ``count`` counts.
        optimizer_steps: how many steps optimizers of these parameters have taken.
    """

    def __init__(
        self,
        parameter_ids: Iterable[int],
        *,
        describe: Callable[[Any], WrapperDescription],
        folder: Path | None = None,
    ) -> None:
        self._parameter_ids = frozenset(parameter_ids)
        self._describe = describe
        self.unit = "samples"
        self.optimizer_steps = 0
        self._folder = folder
        self._writers: list[PlanWriter] = []
        self._next: tuple[WrapperDescription, PlanDescription] | None = None
        self._row = self._last = [0] * row_width(0)
        self._has_ended = False
        self._counted = 0
        self._first_plan = 0
        self._owner = os.getpid()
        _recorders.add(self)

    def follow(self, plan: PlanDescription, group: Any) -> None:
        """From the next step on, steps have another plan or are averaged over another process group."""
        self._next = self._describe(group), plan

    def begin_generation(self, generation: int) -> None:
        """Number plans anew, with the same numbers on all ranks, whichever of them are new."""
        self._first_plan = PLANS_PER_GENERATION * generation

    def count(self, number: int, unit: str | None = None) -> None:
        """Add a number of samples, tokens or other units to the current step.

        Between an optimizer's step and the next forward, they are added to the next step.
        """
        if self._has_ended:
            self._counted += number
        else:
            self._row[StepColumn.COUNT] += number
        if unit is not None and unit != self.unit:
            self.unit = unit
            if self._writers:
                self._writers[-1].set_unit(unit)

    def audit_writer(self, group: Any) -> AuditWriter | None:
        """Writes the hashes of replicas into the folder that the environment asks to record in."""
        if self._folder is None:
            return None
        described = self._describe(group)
        return AuditWriter(self._folder, rank=described.rank, wrapper=described.wrapper)

    def forward_began(self) -> None:
        """The wrapper's forward was called."""
        now = time.monotonic_ns()
        row = self._row
        if self._has_ended:
            row = self._close_row(now)
        if not row[StepColumn.BEGIN]:
            row[StepColumn.BEGIN] = now
        row[StepColumn.FORWARDS] += 1
        row[StepColumn.FORWARD_START] = now
        row[StepColumn.BUFFERS_END] = 0

    def buffers_synced(self) -> None:
        """The module buffers have been synchronised across ranks."""
        self._row[StepColumn.BUFFERS_END] = time.monotonic_ns()

    def forward_ended(self) -> None:
        """The module's forward has returned."""
        self._row[StepColumn.FORWARD_END] = time.monotonic_ns()

    def backward_began(self, step: int) -> None:
        """The first sign of a synchronised backward was seen."""
        now = time.monotonic_ns()
        if self._has_ended:  # a second backward over one forward
            self._close_row(now)
        if self._next is not None:
            self._start_plan(*self._next)
            self._next = None
        row = self._row
        row[StepColumn.STEP] = step
        row[StepColumn.BACKWARD_START] = now
        row[StepColumn.BEGIN] = row[StepColumn.BEGIN] or now

    def ready(self, bucket: int, slot: int) -> None:
        """The last of a bucket's gradients, which is that of the slot, was computed."""
        start = _BUCKETS + bucket * len(BucketColumn)
        self._row[start + BucketColumn.READY] = time.monotonic_ns()
        self._row[start + BucketColumn.LAST_SLOT] = slot

    def launched(self, bucket: int) -> None:
        """A bucket's reduction was launched."""
        self._row[_BUCKETS + bucket * len(BucketColumn) + BucketColumn.LAUNCH] = time.monotonic_ns()

    def reduced(self, bucket: int) -> None:
        """A bucket's reduction is complete."""
        self._row[_BUCKETS + bucket * len(BucketColumn) + BucketColumn.REDUCED] = time.monotonic_ns()

    def backward_ended(self) -> None:
        """The last gradient was computed."""
        self._row[StepColumn.BACKWARD_END] = time.monotonic_ns()

    def all_reduced(self) -> None:
        """The last bucket's reduction is complete."""
        self._row[StepColumn.ALL_REDUCED] = time.monotonic_ns()

    def step_ended(self, kind: StepKind = StepKind.ORDINARY) -> None:
        """Every parameter's ``.grad`` is the average, or the step is lost."""
        self._row[StepColumn.END] = time.monotonic_ns()
        self._row[StepColumn.KIND] |= kind
        self._has_ended = True

    def write(self, folder: Path | str) -> None:
        """Write what was recorded so far to a folder, for ``paceline report``."""
        self.close()
        folder = Path(folder)
        make_folder(folder)
        for writer in self._writers:
            writer.copy_to(folder)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Store the row of the last step, to which nothing can be added any more."""
        # A forked child has a copy of this object and shares its memory, but the row is not the child's.
        if self._has_ended and os.getpid() == self._owner:
            self._close_row(time.monotonic_ns())

    def durations(self) -> dict[str, int]:
        """Nanoseconds of the last step's forward, backward, communication, and overlap of the last two."""
        row = self._row if self._has_ended else self._last
        backward_start, backward_end, launch = (
            row[StepColumn.BACKWARD_START],
            row[StepColumn.BACKWARD_END],
            first_launch(row),
        )
        compute = backward_end - backward_start
        return {
            "forward_compute_time": max(backward_start - row[StepColumn.FORWARD_START], 0),
            "backward_compute_time": compute,
            "backward_comm_time": max(row[StepColumn.ALL_REDUCED] - launch, 0),
            "backward_compute_comm_overlap_time": min(max(backward_end - launch, 0), compute),
        }

    def stamps(self) -> dict[str, int]:
        """When the parts of the last step began and ended, in nanoseconds since the epoch."""
        row = self._row if self._has_ended else self._last
        times = {
            "forward_compute_time_start": row[StepColumn.FORWARD_START],
            "backward_compute_time_start": row[StepColumn.BACKWARD_START],
            "backward_compute_time_end": row[StepColumn.BACKWARD_END],
            "backward_comm_time_start": first_launch(row),
            "backward_comm_time_end": row[StepColumn.ALL_REDUCED],
        }
        return {key: stamp + _EPOCH for key, stamp in times.items()}

    def _close_row(self, now: int) -> list[int]:
        """Store the row, and begin the next one."""
        row = self._row
        if self._writers:
            sums = row_sums(row, next_begin=now, communication=self.durations()["backward_comm_time"])
            self._writers[-1].ring.append(row, sums)
        self._last, self._row = row, [0] * len(row)
        self._row[StepColumn.COUNT], self._counted = self._counted, 0
        self._has_ended = False
        return self._row

    def _start_plan(self, wrapper: WrapperDescription, plan: PlanDescription) -> None:
        """Write to new files, because another plan has other buckets and rows of another width."""
        number = max(self._first_plan, self._writers[-1].number + 1 if self._writers else 0)
        self._writers.append(PlanWriter(wrapper, plan, number, unit=self.unit, folder=self._folder))
        # Of earlier generations, what is in files stays there, and needs to be open no more.
        self._writers = [
            each for each in self._writers if each.number >= self._first_plan or not each.is_in_folder
        ]
        if len(self._writers) > _MOST_PLANS:
            self._writers.pop(0).delete_files()
        self._row[_BUCKETS:] = [0] * (row_width(len(plan.buckets)) - _BUCKETS)


def optimizer_began(parameter_ids: Sequence[int]) -> None:
    """The step of an optimizer of these parameters began."""
    now = time.monotonic_ns()
    for recorder in _recorders_of(parameter_ids):
        recorder._row[StepColumn.OPTIMIZER_START] = recorder._row[StepColumn.OPTIMIZER_START] or now


def optimizer_ended(parameter_ids: Sequence[int]) -> None:
    """The step of an optimizer of these parameters has ended."""
    now = time.monotonic_ns()
    for recorder in _recorders_of(parameter_ids):
        recorder._row[StepColumn.OPTIMIZER_END] = now
        recorder.optimizer_steps += 1


def _recorders_of(parameter_ids: Sequence[int]) -> "list[Recorder]":
    """The recorders of these parameters that are between the end of a step and the next forward."""
    return [
        recorder
        for recorder in list(_recorders)
        if recorder._has_ended and not recorder._parameter_ids.isdisjoint(parameter_ids)
    ]


def folder_from_environment() -> Path | None:
    """The folder that the environment asks to record in."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder).absolute() if folder else None


@atexit.register
def _close_all() -> None:
    for recorder in list(_recorders):
        recorder.close()
