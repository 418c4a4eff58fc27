"""Writes the recording of one bucket plan: its rows, and a description of what they are rows of.

In a folder these are two files: ``rank0-wrapper0-plan0.json`` is the description, and the rows are in the
file of the same name that ends in ``.rows``.
"""

import contextlib
import json
import os
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.recording.files import make_folder, write_file
from paceline.recording.ring_buffer import RingBuffer
from paceline.recording.rows import VERSION, row_width

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class PlanDescription:
    """A bucket plan.

    Attributes:
        buckets: the slots (indices of parameters) of each bucket, in the order in which buckets are launched.
        exchange: how buckets are averaged; the name of the communication hook, if there is one.
    """

    buckets: Sequence[Sequence[int]]
    exchange: str


@dataclass(frozen=True)
class WrapperDescription:
    """A wrapper on one rank.

    Attributes:
        rank: the global rank of the process.
        world: how many ranks there are.
        group: the global ranks that the wrapper averages over.
        module: the class name of the wrapped module.
        slots: the names of its parameters.
        nbytes: the size of each parameter.
        backend: the backend of the process group.
        transport: "shared memory", "shared memory and c10d" or "c10d".
        hosts: how many hosts the ranks are on, as far as it is known.
        device: the device of the module.
        first_cap: how many bytes the first bucket may hold.
        cap: how many bytes each of the other buckets may hold.
        wrapper: the number of the wrapper in this process.
    """

    rank: int
    world: int
    group: Sequence[int]
    module: str
    slots: Sequence[str]
    nbytes: Sequence[int]
    backend: str
    transport: str
    hosts: int
    device: str
    first_cap: int
    cap: int
    wrapper: int


class PlanWriter:
    """Writes the rows of one plan of one wrapper on one rank.

    Args:
        wrapper: describes the wrapper.
        plan: describes the plan.
        number: the number of the plan among the wrapper's plans.
        unit: what ``StepColumn.COUNT`` counts.
        folder: where the files are; the rows are kept in memory if it is None or has no space.

    Attributes:
        ring: takes the rows.
    """

    def __init__(
        self,
        wrapper: WrapperDescription,
        plan: PlanDescription,
        number: int,
        *,
        unit: str,
        folder: Path | None,
    ) -> None:
        self.number = number
        self._unit = unit
        self._wrapper = wrapper
        self._plan = plan
        self._folder = folder
        columns = row_width(len(plan.buckets))
        try:
            if folder is not None:
                make_folder(folder)
            self.ring = RingBuffer(columns, None if folder is None else self._path(folder, "rows"))
            if folder is not None:
                self._write_description(folder)
        except OSError as error:
            self._leave_folder(error)
            self.ring = RingBuffer(columns, None)

    @property
    def is_in_folder(self) -> bool:
        """Whether the rows are in a file."""
        return self._folder is not None

    def set_unit(self, unit: str) -> None:
        """Change what is counted."""
        self._unit = unit
        if self._folder is not None:
            try:
                self._write_description(self._folder)
            except OSError as error:
                self._leave_folder(error)

    def _leave_folder(self, error: OSError) -> None:
        """Go on in memory, because training must not fail for a recording."""
        warnings.warn(
            f"steps are not recorded in {self._folder} but in memory, because of an error ({error}); "
            "ddp.recorder.write(folder) writes them to another folder",
            RuntimeWarning,
            stacklevel=3,
        )
        with contextlib.suppress(OSError):
            self.delete_files()
        self._folder = None

    def copy_to(self, folder: Path) -> None:
        """Write both files to a folder."""
        self._write_description(folder)
        # In its own folder, however it is spelled, the file is the ring itself and must stay.
        if self._folder is None or folder.resolve() != self._folder.resolve():
            write_file(self._path(folder, "rows"), self.ring.content())

    def delete_files(self) -> None:
        """Delete both files, if there are any."""
        if self._folder is not None:
            for suffix in ("json", "rows"):
                self._path(self._folder, suffix).unlink(missing_ok=True)

    def _write_description(self, folder: Path) -> None:
        write_file(self._path(folder, "json"), json.dumps(self._description()).encode("ascii"))

    def _description(self) -> dict[str, object]:
        sizes = self._wrapper.nbytes
        return {
            "version": VERSION,
            **asdict(self._wrapper),
            "buckets": [
                {"slots": list(slots), "nbytes": sum(sizes[slot] for slot in slots)}
                for slots in self._plan.buckets
            ],
            "exchange": self._plan.exchange,
            "plan": self.number,
            "unit": self._unit,
            "host": platform.node(),
            "boot": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "",
            "pid": os.getpid(),
            "epoch": time.time_ns() - time.monotonic_ns(),
        }

    def _path(self, folder: Path, suffix: str) -> Path:
        return folder / f"rank{self._wrapper.rank}-wrapper{self._wrapper.wrapper}-plan{self.number}.{suffix}"
