"""Which samples counted: each process writes down what it takes into a step, and which steps were completed.

The ledger is an option of the recorder. It is written if ``PACELINE_RECORD`` names a folder and
``PACELINE_LEDGER`` is 1. Each process has a file of its own, with one line of JSON per event.

Note [Which steps count]. When the ranks of a run change, a new *generation* begins, and the step that was
lost is done again. So a step may have been taken several times. It counts in a generation if any rank of it
has completed it: this rank has the gradients of all the others. It is void if a later generation has taken
this step again, or an earlier one: then the parameters that it made are used no more.
"""

import json
import os
import re
import secrets
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RecordingError
from paceline.recording.files import create_file, make_folder, read_json_lines
from paceline.recording.recorder import folder_from_environment

LEDGER_VARIABLE = "PACELINE_LEDGER"

_NAME = re.compile(r"ledger-\d{1,18}-\d{1,18}-[0-9a-f]{8}\.jsonl", re.ASCII)
_MOST_BYTES = 1 << 30
_LIMIT = 1 << 63

# A generation, and a step in it.
Attempt = tuple[int, int]


class LedgerWriter:
    """Writes the ledger of one process; what cannot be written is left out, and training goes on.

    Each event is one write of a whole line, so that it outlives the process, whatever ends it.

    Args:
        folder: where the file is.
        rank: the global rank.
        epoch_samples: how many samples an epoch has, numbered from 0; None if it is not known.
    """

    def __init__(self, folder: Path, *, rank: int, epoch_samples: int | None = None) -> None:
        # A process that takes the place of a killed one may have the same number as that one had.
        name = f"ledger-{rank}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        self._path = folder / name
        self._close: Callable[[], object] = lambda: None
        self._file: int | None = None
        try:
            make_folder(folder)
            self._file = create_file(self._path)
        except OSError as error:
            self._give_up(error)
        else:
            self._close = weakref.finalize(self, os.close, self._file)
        if epoch_samples is not None:
            self._write({"event": "began", "epoch_samples": epoch_samples})

    def took(self, *, epoch: int, step: int, generation: int, samples: Mapping[int, Sequence[int]]) -> None:
        """This rank takes samples into a step; to be called before gradients of the step are reduced.

        Args:
            epoch: the epoch.
            step: the number of the step.
            generation: the generation of the ranks.
            samples: the numbers of the samples, by shard.
        """
        shards = {shard: [int(sample) for sample in own] for shard, own in samples.items()}
        self._write(
            {"event": "took", "epoch": epoch, "step": step, "generation": generation, "samples": shards}
        )

    def counted(self, *, step: int, generation: int) -> None:
        """The step is complete on this rank, and so is the optimizer's."""
        self._write({"event": "counted", "step": step, "generation": generation})

    def close(self) -> None:
        """Write no more."""
        self._file = None
        self._close()

    def _write(self, event: Mapping[str, object]) -> None:
        if self._file is None:
            return
        line = json.dumps(event, separators=(",", ":")).encode("ascii") + b"\n"
        try:
            if os.write(self._file, line) < len(line):
                raise OSError("no space is left for the whole line")
        except OSError as error:
            # No more after half a line: it must stay the last one.
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.close()
        warnings.warn(
            f"the ledger lacks the samples of the next steps, because of an error ({self._path}: {error})",
            RuntimeWarning,
            stacklevel=4,
        )


def ledger_from_environment(*, rank: int, epoch_samples: int | None = None) -> LedgerWriter | None:
    """The ledger that the environment asks for; None if it does not ask for one."""
    folder = folder_from_environment()
    if folder is None or os.environ.get(LEDGER_VARIABLE) != "1":
        return None
    return LedgerWriter(folder, rank=rank, epoch_samples=epoch_samples)


@dataclass(frozen=True)
class Take:
    """What one rank took into a step: the epoch, and the samples of each of its shards."""

    epoch: int
    samples: Mapping[int, Sequence[int]]


@dataclass
class ProcessLedger:
    """What one process has written; if it took a step twice in one generation, the second time.

    Attributes:
        takes: what it took into each attempt.
        completed: the attempts that it completed.
        epoch_samples: how many samples an epoch has; None if it has not said so.
    """

    takes: dict[Attempt, Take] = field(default_factory=dict)
    completed: set[Attempt] = field(default_factory=set)
    epoch_samples: int | None = None

    def add(self, event: Any) -> None:
        """Add an event; raises ValueError if it is something else."""
        match event:
            case {"event": "began"}:
                self.epoch_samples = _number(event, "epoch_samples")
            case {"event": "took", "samples": dict(samples)}:
                shards = dict(_shard(shard, own) for shard, own in samples.items())
                self.takes[_attempt(event)] = Take(_number(event, "epoch"), shards)
            case {"event": "counted"}:
                self.completed.add(_attempt(event))
            case _:
                raise ValueError("it is no event of a ledger")


@dataclass(frozen=True)
class Ledger:
    """The steps that count, of all ranks together.

    Attributes:
        counted: the generation in which each of them counts, by step.
        steps: by epoch and step, the samples of each shard. If two ranks took one shard, it has the samples
            of both.
        epoch_samples: how many samples an epoch has, numbered from 0; None if it is not known.
    """

    counted: Mapping[int, int]
    steps: Mapping[tuple[int, int], Mapping[int, Sequence[int]]]
    epoch_samples: int | None


def ledger_files(folder: Path) -> list[Path]:
    """The files of ledgers in a folder; none if it is no folder."""
    try:
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RecordingError(f"the folder cannot be read ({folder}: {error})") from error


def read_ledger(folder: Path) -> Ledger:
    """What all processes have written into a folder; a last line that was cut off is left out.

    Raises:
        RecordingError: there is no ledger, or it is damaged.
    """
    files = ledger_files(folder)
    if not files:
        raise RecordingError(
            f"there is no ledger in the folder ({folder}); the ranks of paceline.Run write one with "
            f"PACELINE_RECORD={folder} and {LEDGER_VARIABLE}=1 in their environment"
        )
    return combine([_read_file(path) for path in files])


def combine(processes: Sequence[ProcessLedger]) -> Ledger:
    """The steps that count, see Note [Which steps count]."""
    counted = _counted(processes)
    steps: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for process in processes:
        for (generation, step), take in process.takes.items():
            if counted.get(step) == generation:
                for shard, samples in take.samples.items():
                    steps[take.epoch, step][shard] += samples
    told = [process.epoch_samples for process in processes if process.epoch_samples is not None]
    return Ledger(counted, {key: dict(steps[key]) for key in sorted(steps)}, max(told, default=None))


def _counted(processes: Sequence[ProcessLedger]) -> dict[int, int]:
    """The generation in which each step counts."""
    void_from = _void_from(processes)
    completed = {attempt for process in processes for attempt in process.completed}
    return {step: generation for generation, step in sorted(completed) if step < void_from[generation]}


def _void_from(processes: Sequence[ProcessLedger]) -> dict[int, int]:
    """For each generation, the first step that a later one has taken."""
    first_taken: dict[int, int] = {}
    for process in processes:
        for generation, step in process.takes:
            first_taken[generation] = min(step, first_taken.get(generation, _LIMIT))
    generations = {*first_taken, *(generation for each in processes for generation, _ in each.completed)}
    void_from, first_later = {}, _LIMIT
    for generation in sorted(generations, reverse=True):
        void_from[generation] = first_later
        first_later = min(first_later, first_taken.get(generation, _LIMIT))
    return void_from


def _read_file(path: Path) -> ProcessLedger:
    found = ProcessLedger()
    read_json_lines(path, found.add, most_bytes=_MOST_BYTES)
    return found


def _attempt(event: Mapping[str, Any]) -> Attempt:
    return _number(event, "generation"), _number(event, "step")


def _shard(shard: str, samples: object) -> tuple[int, list[int]]:
    if not isinstance(samples, list) or not all(map(_is_number, samples)) or not _is_number(int(shard)):
        raise ValueError(f"a shard has no list of samples: {shard!r}")
    return int(shard), samples


def _number(event: Mapping[str, Any], name: str) -> int:
    value: Any = event.get(name)
    if not _is_number(value):
        raise ValueError(f"a number is missing, or out of range: {name!r}")
    return int(value)


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _LIMIT
