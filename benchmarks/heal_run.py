"""Starts a training, kills ranks as planned, and notes what came of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from heal_judge import Kill, Ran, stall
from heal_notes import process_of, read_ends, read_phase, read_results
from heal_plan import Strike
from heal_training import EPOCH_STEPS

from paceline.errors import RecordingError
from paceline.recording.ledger import read_ledger
from paceline.recording.ledger_check import check_ledger

HERE = Path(__file__).parent
PROGRAMS = Path(sys.executable).parent
SHM = Path("/dev/shm")  # noqa: S108  # it is looked at only
# The names of what paceline, torch and Python make there; other programs have theirs.
OURS = ("paceline", "torch", "gloo", "psm", "sem")
# Every process of a run has it in its environment, so that those that are left can be found.
MARK = "PACELINE_HEAL_FOLDER"
# No rank is killed in the last fifth of the steps.
LAST_SHARE = 0.8
# A run hangs if no step ends anywhere for so long.
SILENT_SECONDS = 60.0
# How long what a run has left may take to go.
LEFT_SECONDS = 2.0
_POLL_SECONDS = 0.02


class HungError(Exception):
    """No step has ended for long, or a process has not come."""


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        side: one of SIDES.
        world: the number of ranks.
        epochs: how long it is.
        pause: how many seconds each phase of a step takes longer.
        workers: how many processes load data for each rank.
        snapshot_every: steps per snapshot, with torchrun.
    """

    side: str
    world: int
    epochs: int
    pause: float
    workers: int = 0
    snapshot_every: int = 20

    @property
    def last_step(self) -> int:
        """The last step after which a rank may be killed."""
        return int(LAST_SHARE * self.epochs * EPOCH_STEPS)

    def command(self, folder: Path) -> list[str]:
        """The command line."""
        options = {
            "--notes": _notes(folder),
            "--epochs": self.epochs,
            "--pause": self.pause,
            "--workers": self.workers,
            "--snapshot-every": self.snapshot_every,
        }
        start, script = SIDES[self.side](self.world, folder), HERE / f"heal_train_{_SCRIPTS[self.side]}.py"
        return [*start, str(script), *(str(each) for pair in options.items() for each in pair)]


def _paceline(world: int, folder: Path) -> list[str]:
    command = [str(PROGRAMS / "paceline"), "run", "--heal", "-n", str(world)]
    return [*command, "--record", str(_record(folder)), "--ledger"]


def _quiet(world: int, _: Path) -> list[str]:
    return [str(PROGRAMS / "paceline"), "run", "-n", str(world)]


def _torchrun(world: int, _: Path) -> list[str]:
    command = [str(PROGRAMS / "torchrun"), "--standalone"]
    return [*command, "--nproc-per-node", str(world), "--max-restarts", "100"]


def _torchft(world: int, _: Path) -> list[str]:
    return [sys.executable, str(HERE / "heal_replicas.py"), str(world)]


SIDES: Mapping[str, Callable[[int, Path], list[str]]] = {
    "paceline": _paceline,
    "torchrun": _torchrun,
    "torchft": _torchft,
    "quiet": _quiet,
}
# Without it, ranks that the torchrun of torch 2.13 starts again find the addresses of those before them, and
# hang (https://github.com/pytorch/pytorch/issues/135712).
_VARIABLES = {"torchrun": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
_SCRIPTS = {"paceline": "paceline", "quiet": "paceline", "torchrun": "torchrun", "torchft": "torchft"}


def _notes(folder: Path) -> Path:
    return folder / "notes"


def _record(folder: Path) -> Path:
    return folder / "record"


def output(folder: Path) -> Path:
    """The file that has what all processes of a run have printed."""
    return folder / "output.txt"


class Watched:
    """A run that goes on.

    Args:
        job: the training.
        folder: the folder of its files.
        process: the launcher.
    """

    def __init__(self, job: Job, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.job = job
        self.strikes = 0
        self.kills: list[Kill] = []
        self._notes = _notes(folder)
        self._process = process
        self._dead: list[int] = []
        self._since = time.time()

    def strike(self, strikes: Sequence[Strike]) -> None:
        """Kill ranks as planned; those that would come too late are left out."""
        for strike in strikes:
            if not self._wait(self._is_training):
                return
            time.sleep(strike.wait)
            if self._process.poll() is not None or self._furthest() >= self.job.last_step:
                return
            self.strikes += 1
            for number, rank in enumerate(strike.ranks):
                time.sleep(strike.delay if number else 0)
                self._kill(strike.kind, rank)
        self._wait(self._is_training)

    def wait(self) -> int:
        """Wait for the end; returns the exit code."""
        self._wait(lambda: False)
        return self._process.wait()

    def show_stacks(self) -> None:
        """Have all ranks print where they are."""
        for rank in range(self.job.world):
            if (pid := process_of(self._notes, rank)) is not None:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1)

    def _kill(self, kind: str, rank: int) -> None:
        self._wait(lambda: process_of(self._notes, rank, self._dead) is not None)
        pid = process_of(self._notes, rank, self._dead)
        if pid is None:
            return  # the run has ended
        phase, at = read_phase(self._notes, rank, pid), time.time()
        os.kill(pid, signal.SIGKILL)
        self._dead.append(pid)
        self.kills.append(Kill(kind, at, rank, phase))

    def _is_training(self) -> bool:
        """Whether all ranks have ended a step since the last kill."""
        ends = read_ends(self._notes)
        if not self.kills:
            return len(ends) == self.job.world and all(ends.values())
        return stall(self.kills[-1], ends, self.job.world).seconds is not None

    def _furthest(self) -> int:
        return max(end.step for ends in read_ends(self._notes).values() for end in ends)

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        """Wait until something is so; False if the run has ended instead."""
        while not is_so():
            if self._process.poll() is not None:
                return False
            last = [ends[-1].at for ends in read_ends(self._notes).values() if ends]
            if time.time() > max([self._since, *last]) + SILENT_SECONDS:
                raise HungError(f"no step has ended for {SILENT_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        return True


def run_job(job: Job, strikes: Sequence[Strike], folder: Path) -> Ran:
    """Run a training to its end, and kill ranks in it."""
    for each in (_notes(folder), _temporary(folder)):
        each.mkdir(parents=True)
    before = _shared_files()
    code = None
    with _started(job, folder) as watched:
        try:
            watched.strike(strikes)
            code = watched.wait()
        except HungError:
            watched.show_stacks()
        left = [] if code is None else _left(folder, before)
    return Ran(
        job.side,
        job.world,
        code,
        watched.strikes,
        watched.kills,
        read_ends(_notes(folder)),
        read_results(_notes(folder)),
        ledger=why_not_counted_once(folder, job.epochs) if job.side == "paceline" else "",
        left=left,
    )


@contextmanager
def _started(job: Job, folder: Path) -> Iterator[Watched]:
    variables = {
        MARK: str(folder),
        "TMPDIR": str(_temporary(folder)),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **_VARIABLES.get(job.side, {}),
    }
    with output(folder).open("wb") as file:
        process = subprocess.Popen(  # noqa: S603  # ours
            job.command(folder),
            env={**os.environ, **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield Watched(job, folder, process)
        finally:
            for pid in marked(folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def marked(folder: Path) -> list[int]:
    """The processes of a run."""
    mark, found = f"{MARK}={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                found += [int(entry.name)] * (mark in (entry / "environ").read_bytes().split(b"\0"))
    return found


def _temporary(folder: Path) -> Path:
    return folder / "tmp"


def _shared_files() -> set[str]:
    return {str(path) for path in SHM.iterdir() if path.name.startswith(OURS)}


def _left(folder: Path, before: set[str]) -> list[str]:
    """What a run has left: processes, shared memory, and temporary folders of paceline."""
    until = time.monotonic() + LEFT_SECONDS
    while (left := _left_now(folder, before)) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    return left


def _left_now(folder: Path, before: set[str]) -> list[str]:
    return [
        *(f"process {pid} is left" for pid in marked(folder)),
        *(f"{name} is left" for name in sorted(_shared_files() - before)),
        *(f"temporary folder {path.name} is left" for path in _temporary(folder).glob("paceline-*")),
    ]


def why_not_counted_once(folder: Path, epochs: int) -> str:
    """What the ledger says is wrong; empty if every sample of every epoch counted once."""
    try:
        check = check_ledger(read_ledger(_record(folder)))
    except RecordingError as error:
        return f"ledger: {error}"
    return "" if check.is_right and check.epochs == epochs else f"ledger: {check}"
