"""Records when the steps of one wrapper did what, on one rank.

Recording is always on. With ``PACELINE_RECORD=FOLDER`` in the environment, the recording is in files in that
folder, which ``paceline report`` reads. Otherwise it is in memory, until ``write`` is called.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.recording.audit_file import AuditWriter
from paceline.recording.files import make_folder
from paceline.recording.rows import (
    EVALUATION_COLUMNS,
    LOADER_COLUMNS,
    OTHERS_COLUMNS,
    SAVING_COLUMNS,
    BucketColumn,
    StepColumn,
    StepKind,
    elapsed,
    first_launch,
    row_sums,
    row_width,
)
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


class RecordedTimes(NamedTuple):
    """How many seconds the parts of one step took, on one rank.

    Attributes:
        step: from the first forward to averaged gradients.
        communication: from the first launch until the last bucket was reduced.
        backward: from its start until the last gradient was computed.
        ready: when each bucket was ready, after the start of backward.
    """

    step: float
    communication: float
    backward: float
    ready: Sequence[float]


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
        # Only this thread waits for what it does between steps; others load or save beside the training.
        self._thread = 0
        self._is_in_optimizer = False
        # Up to when its time is in the row; an optimizer's step may call that of its base class.
        self._optimizer_until = 0
        self._evaluation_start = 0
        # Since when it has been in one of its parts, or between them; one of them is 0, until then both.
        self._busy_since, self._free_since = 0, 0
        self._without_inputs_since = 0
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
        self._thread = threading.get_ident()
        now = time.monotonic_ns()
        self._become_busy(now)
        row = self._row
        if self._has_ended:
            row = self._close_row(now)
        if row[StepColumn.BEGIN]:
            row[StepColumn.KNOWN_BEFORE_FORWARD] = self._known_inside()
        else:
            row[StepColumn.BEGIN] = now
        row[StepColumn.FORWARDS] += 1
        row[StepColumn.FORWARD_START] = now
        row[StepColumn.BUFFERS_END] = row[StepColumn.JOIN_END] = 0

    def joined(self) -> None:
        """Under join, the ranks have told each other who has inputs."""
        self._row[StepColumn.JOIN_END] = time.monotonic_ns()

    def inputs_ran_out(self) -> None:
        """Under join, this rank has no inputs left, and waits, perhaps since an earlier call."""
        self._without_inputs_since = self._without_inputs_since or time.monotonic_ns()

    def join_ended(self) -> None:
        """No rank has inputs left: each goes on with what follows the join."""
        self._add_wait_without_inputs(time.monotonic_ns())
        self._without_inputs_since = 0

    def _add_wait_without_inputs(self, now: int) -> None:
        if self._without_inputs_since and self._has_ended:
            since = max(self._without_inputs_since, self._row[StepColumn.END])
            self._row[StepColumn.WITHOUT_INPUTS] += now - since

    def buffers_synced(self) -> None:
        """The module buffers have been synchronised across ranks."""
        self._row[StepColumn.BUFFERS_END] = time.monotonic_ns()

    def forward_ended(self) -> None:
        """The module's forward has returned."""
        self._row[StepColumn.FORWARD_END] = now = time.monotonic_ns()
        self._become_free(now)

    def evaluation_began(self) -> None:
        """The wrapper's forward was called without gradients."""
        if not self._busy_since:  # otherwise it is inside of a part that has a name
            self._evaluation_start = now = time.monotonic_ns()
            self._become_busy(now)

    def evaluation_ended(self) -> None:
        """That forward has returned, or raised."""
        if self._evaluation_start:
            now = time.monotonic_ns()
            self._add_between(EVALUATION_COLUMNS, now - self._evaluation_start)
            self._row[StepColumn.EVALUATIONS] += self._has_ended
            self._evaluation_start = 0
            self._become_free(now)

    def accumulation_began(self) -> None:
        """A backward has begun whose gradients are not to be averaged yet."""
        self._become_busy(time.monotonic_ns())

    def accumulated(self) -> None:
        """That backward has ended, or raised."""
        if not self._has_ended:  # otherwise it is a second backward over the forward of a step that is over
            self._row[StepColumn.ACCUMULATED] += 1
        self._become_free(time.monotonic_ns())

    def backward_began(self, step: int) -> None:
        """The first sign of a synchronised backward was seen."""
        now = time.monotonic_ns()
        self._become_busy(now)
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
        """The last gradient was computed; of a shared backward it is known already."""
        self._row[StepColumn.BACKWARD_END] = self._row[StepColumn.BACKWARD_END] or time.monotonic_ns()

    def shared_backward_ended(self) -> None:
        """The last gradient was computed in a backward that had other wrappers in it, before or after."""
        self.backward_ended()
        ready = self._row[_BUCKETS + BucketColumn.READY :: len(BucketColumn)]
        if all(ready):
            self._row[StepColumn.OTHERS_IN_BACKWARD] = elapsed(max(ready), self._row[StepColumn.BACKWARD_END])

    def all_reduced(self) -> None:
        """The last bucket's reduction is complete."""
        self._row[StepColumn.ALL_REDUCED] = time.monotonic_ns()

    def step_ended(self, kind: StepKind = StepKind.ORDINARY) -> None:
        """Every parameter's ``.grad`` is the average, or the step is lost."""
        row, now = self._row, time.monotonic_ns()
        row[StepColumn.END] = now
        row[StepColumn.KIND] |= kind
        self._has_ended = True
        if self._is_in_optimizer:  # it has called forward and backward itself, in a closure
            row[StepColumn.OPTIMIZER_START] = self._optimizer_until = now
        else:
            self._become_free(now)

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

    def step_times(self) -> RecordedTimes | None:
        """Seconds of the step that has just ended; None if this rank had no inputs."""
        row = self._row
        if not self._has_ended or row[StepColumn.KIND] or not row[StepColumn.BEGIN]:
            return None
        start = row[StepColumn.BACKWARD_START]
        ready = row[_BUCKETS + BucketColumn.READY :: len(BucketColumn)]
        return RecordedTimes(
            step=elapsed(row[StepColumn.BEGIN], row[StepColumn.END]) / 1e9,
            communication=elapsed(first_launch(row), row[StepColumn.ALL_REDUCED]) / 1e9,
            backward=elapsed(start, row[StepColumn.BACKWARD_END]) / 1e9,
            # A bucket that was never full is launched when backward has ended.
            ready=[elapsed(start, at or row[StepColumn.BACKWARD_END]) / 1e9 for at in ready],
        )

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

    def _enter_optimizer(self, now: int) -> None:
        if not self._is_in_optimizer:
            self._is_in_optimizer, self._optimizer_until = True, now
        self._become_busy(now)
        if self._has_ended:
            self._row[StepColumn.OPTIMIZER_START] = self._row[StepColumn.OPTIMIZER_START] or now
            self._row[StepColumn.KNOWN_BEFORE_OPTIMIZER] = self._known_after()

    def _leave_optimizer(self, now: int) -> None:
        self._is_in_optimizer = False
        self._become_free(now)
        if self._has_ended:
            self._end_optimizer(now)
            self.optimizer_steps += 1

    def _end_optimizer(self, now: int) -> None:
        self._row[StepColumn.OPTIMIZER_END] = now
        self._row[StepColumn.OPTIMIZER] += elapsed(self._optimizer_until, now)
        self._optimizer_until = now

    # Note [Time in other wrappers]. While this wrapper is in none of its parts, others may be in theirs. That
    # time is added when one of the two changes: when the other leaves its part, or when this one begins one.
    # A forward without gradients is a part too, and a backward that only accumulates.
    def _become_busy(self, now: int) -> None:
        if len(_recorders) > 1:
            for other in list(_recorders):
                if other is not self and other._busy_since:
                    self._add_others_time(now, other._busy_since)
        self._busy_since, self._free_since = self._busy_since or now, 0

    def _become_free(self, now: int) -> None:
        if len(_recorders) > 1 and self._busy_since:
            for other in list(_recorders):
                if other is not self:
                    other._add_others_time(now, self._busy_since)
        self._busy_since, self._free_since = 0, self._free_since or now

    def _add_others_time(self, now: int, since: int) -> None:
        if self._free_since:
            self._add_between(OTHERS_COLUMNS, now - max(since, self._free_since))

    def _add_between(self, columns: tuple[StepColumn, StepColumn], nanoseconds: int) -> None:
        """Add what was done between the parts of a step; before the first step it is no part of any."""
        inside, after = columns
        if self._row[StepColumn.BEGIN]:
            self._row[after if self._has_ended else inside] += nanoseconds

    def _known_inside(self) -> int:
        row = self._row
        return (
            row[StepColumn.LOADER_INSIDE]
            + row[StepColumn.EVALUATION_INSIDE]
            + row[StepColumn.SAVING_INSIDE]
            + row[StepColumn.OTHERS_INSIDE]
        )

    def _known_after(self) -> int:
        row = self._row
        return (
            row[StepColumn.LOADER]
            + row[StepColumn.EVALUATION]
            + row[StepColumn.SAVING]
            + row[StepColumn.OTHERS]
        )

    def _waited_for_loader(self, asked: int, now: int) -> None:
        row = self._row
        if self._has_ended and not row[StepColumn.LOADER_START]:
            row[StepColumn.LOADER_START] = max(asked, self._free_since)
            row[StepColumn.KNOWN_BEFORE_LOADER] = self._known_after()
        self._add_between(LOADER_COLUMNS, now - max(asked, self._free_since))

    def _saved(self, began: int, now: int) -> None:
        self._add_between(SAVING_COLUMNS, now - max(began, self._free_since))

    def _close_row(self, now: int) -> list[int]:
        """Store the row, and begin the next one."""
        row = self._row
        if self._is_in_optimizer and row[StepColumn.OPTIMIZER_START] and not row[StepColumn.OPTIMIZER_END]:
            self._end_optimizer(now)
        self._add_wait_without_inputs(now)
        if self._writers:
            sums = row_sums(row, next_begin=now)
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
    for recorder in list(_recorders):
        if not recorder._parameter_ids.isdisjoint(parameter_ids):
            recorder._enter_optimizer(now)


def optimizer_ended(parameter_ids: Sequence[int]) -> None:
    """The step of an optimizer of these parameters has ended."""
    now = time.monotonic_ns()
    for recorder in list(_recorders):
        if not recorder._parameter_ids.isdisjoint(parameter_ids):
            recorder._leave_optimizer(now)
        elif recorder._has_ended:
            recorder._row[StepColumn.OTHER_OPTIMIZERS] += 1


def waited_for_loader(asked: int) -> None:
    """A data loader has begun, or has given a batch; it was asked to at a time of the monotonic clock."""
    now = time.monotonic_ns()
    for recorder in _between_parts():
        recorder._waited_for_loader(asked, now)


def state_saved(began: int) -> None:
    """``torch.save`` has returned; it was called at a time of the monotonic clock."""
    now = time.monotonic_ns()
    for recorder in _between_parts():
        recorder._saved(began, now)


def _between_parts() -> "list[Recorder]":
    """The recorders whose forwards this thread calls, and that are in none of their parts."""
    thread = threading.get_ident()
    return [each for each in list(_recorders) if each._free_since and each._thread == thread]


def folder_from_environment() -> Path | None:
    """The folder that the environment asks to record in."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder).absolute() if folder else None


@atexit.register
def _close_all() -> None:
    for recorder in list(_recorders):
        recorder.close()
