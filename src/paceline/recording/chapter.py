"""A part of a recording: the rows of one plan, and what they are to be read with.

In a folder it is two files: ``rank0-wrapper0-plan0.json`` says what it is of, and the rows are in the file
of the same name that ends in ``.rows``.
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

from paceline.recording.ring import Ring
from paceline.recording.rows import VERSION, width

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Bucket:
    """One bucket of a plan: its slots, and how long its gradients are."""

    slots: Sequence[int]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What a plan's rows are to be read with.

    Attributes:
        buckets: in the order in which they leave.
        exchange: how they are averaged; the name of the hook, if there is one.
    """

    buckets: Sequence[Bucket]
    exchange: str


@dataclass(frozen=True)
class About:
    """What a recording is of.

    Attributes:
        rank: of the process, among all.
        world: how many there are.
        group: the ranks that the wrapper averages over.
        module: the class of what is wrapped.
        slots: the parameters' names.
        nbytes: and their sizes.
        backend: of the process group.
        transport: "shared memory", "shared memory and c10d" or "c10d".
        hosts: on how many hosts the ranks are, if that is known.
        device: where the module is.
        first_cap: bytes that the first bucket may hold.
        cap: and each of the others.
        wrapper: its number in this process.
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


class Chapter:
    """The rows of one plan.

    Args:
        about: what they are of.
        plan: the plan.
        number: which of the recording's chapters it is.
        unit: what is counted in each step.
        folder: where to keep it; in memory if None, or if there is no room.

    Attributes:
        ring: where rows go.
    """

    def __init__(self, about: About, plan: Plan, number: int, *, unit: str, folder: Path | None) -> None:
        self.number = number
        self.unit = unit
        self._about = about
        self._plan = plan
        self._folder = folder
        columns = width(len(plan.buckets))
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self.ring = Ring(columns, None if folder is None else self._path(folder, "rows"))
            if folder is not None:
                self._describe(folder)
        except OSError as error:
            warnings.warn(f"steps are not recorded in {folder} ({error})", RuntimeWarning, stacklevel=2)
            with contextlib.suppress(OSError):
                self.remove()
            self._folder = None
            self.ring = Ring(columns, None)

    def rename_unit(self, unit: str) -> None:
        """Something else is counted from now on."""
        self.unit = unit
        if self._folder is not None:
            self._describe(self._folder)

    def write(self, folder: Path) -> None:
        """Put a copy into a folder."""
        self._describe(folder)
        if folder != self._folder:
            self._path(folder, "rows").write_bytes(self.ring.content())

    def remove(self) -> None:
        """Leave nothing of it."""
        if self._folder is not None:
            for kind in ("json", "rows"):
                self._path(self._folder, kind).unlink(missing_ok=True)

    def _describe(self, folder: Path) -> None:
        """Say what it is of, in one move, so that nobody reads half of it."""
        about = {
            "version": VERSION,
            **asdict(self._about),
            **asdict(self._plan),
            "plan": self.number,
            "unit": self.unit,
            "host": platform.node(),
            "boot": _BOOT.read_text().strip() if _BOOT.exists() else "",
            "pid": os.getpid(),
            "epoch": time.time_ns() - time.monotonic_ns(),
        }
        path = self._path(folder, "json")
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(about))
        unfinished.replace(path)

    def _path(self, folder: Path, kind: str) -> Path:
        return folder / f"rank{self._about.rank}-wrapper{self._about.wrapper}-plan{self.number}.{kind}"
