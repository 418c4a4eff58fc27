"""What each process of a training notes about itself, in files that outlive it: its phase, and the steps.

A process that takes a lost rank's place has files of its own. The name of a file begins with the rank.
"""

import enum
import json
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PHASE, _STEPS, _RESULT = ".phase", ".steps", ".json"


class Phase(enum.IntEnum):
    """What a rank is doing."""

    STARTING = 0
    LOADING = 1
    FORWARD = 2
    BACKWARD = 3
    BEFORE_OPTIMIZER = 4
    OPTIMIZER = 5
    OUTSIDE = 6

    @property
    def words(self) -> str:
        """Its name in a table."""
        return _WORDS[self]


_WORDS = {
    Phase.STARTING: "start of a new process",
    Phase.LOADING: "data loading",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.BEFORE_OPTIMIZER: "between backward and optimizer",
    Phase.OPTIMIZER: "optimizer",
    Phase.OUTSIDE: "between two steps",
}


@dataclass(frozen=True)
class End:
    """A step that has ended on a rank.

    Attributes:
        at: when, in seconds since the epoch.
        step: its number.
        ranks: how many ranks took part.
    """

    at: float
    step: int
    ranks: int


class Notes:
    """Writes the notes of this process, and makes each phase last.

    Args:
        folder: where the files are.
        rank: the rank whose place this process has.
        pause: how many seconds a phase takes longer than it would.
    """

    def __init__(self, folder: Path, rank: int, pause: float) -> None:
        self._pid = os.getpid()
        self._path = folder / f"{rank}-{self._pid}"
        self._pause = pause
        self._steps = os.open(self._path.with_suffix(_STEPS), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        phase = self._path.with_suffix(_PHASE)
        phase.write_bytes(bytes(mmap.PAGESIZE))
        with phase.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def enter(self, phase: Phase, *, share: float = 1.0) -> None:
        """A phase begins; it takes a share of the pause longer."""
        if os.getpid() == self._pid:  # and no worker of a data loader
            self._page[0] = phase
        time.sleep(self._pause * share)

    def ended(self, step: int, ranks: int) -> None:
        """A step has ended here."""
        os.write(self._steps, f"{time.time()!r} {step} {ranks}\n".encode())

    def result(self, values: Mapping[str, str]) -> None:
        """The training has ended here."""
        self._path.with_suffix(_RESULT).write_text(json.dumps(values))


def read_ends(folder: Path) -> dict[int, list[End]]:
    """The steps that have ended on each rank, in the order of time."""
    found: dict[int, list[End]] = {}
    for path in folder.glob(f"*{_STEPS}"):
        lines = path.read_text().splitlines(keepends=True)
        ends = [_parse(line) for line in lines if line.endswith("\n")]
        found.setdefault(_rank(path), []).extend(ends)
    return {rank: sorted(ends, key=lambda end: end.at) for rank, ends in sorted(found.items())}


def read_results(folder: Path) -> dict[int, dict[str, str]]:
    """What each rank has said at the end."""
    return {_rank(path): json.loads(path.read_text()) for path in sorted(folder.glob(f"*{_RESULT}"))}


def read_phase(folder: Path, rank: int, pid: int) -> Phase:
    """What a process is doing, or was doing when it died."""
    with (folder / f"{rank}-{pid}{_PHASE}").open("rb") as file:
        return Phase(file.read(1)[0])


def process_of(folder: Path, rank: int, dead: Sequence[int] = ()) -> int | None:
    """The process that has a rank's place; None if it has not started to take notes."""
    paths = [path for path in folder.glob(f"{rank}-*{_PHASE}") if path.stat().st_size]
    alive = [path for path in paths if _pid(path) not in dead and _is_alive(_pid(path))]
    newest = max(alive, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if newest is None else _pid(newest)


def _parse(line: str) -> End:
    at, step, ranks = line.split()
    return End(float(at), int(step), int(ranks))


def _rank(path: Path) -> int:
    return int(path.stem.split("-")[0])


def _pid(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
