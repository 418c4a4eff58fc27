"""The healings of a run: ranks that were lost, and replaced or left out while the others went on."""

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.recording.files import make_folder, read_file, read_json_lines, write_file

_NAME = "healings.jsonl"
_LIMIT = 1 << 63
_NUMBERS = ("generation", "step", "world", "at")


@dataclass(frozen=True)
class Healing:
    """One change of a run's ranks.

    Attributes:
        generation: the generation that began with it.
        step: the step that was lost, and is done again.
        world: how many ranks there are from then on.
        lost: the ranks that were lost, each with the reason, such as "SIGKILL".
        at: when the loss was seen, in nanoseconds since the epoch.
        seconds: how long it took until training went on.
    """

    generation: int
    step: int
    world: int
    lost: Sequence[tuple[int, str]]
    at: int
    seconds: float


def healings_file(folder: Path) -> Path:
    """The file that has the healings of the run that records in a folder."""
    return folder / _NAME


def write_healing(folder: Path, healing: Healing) -> None:
    """Add a healing to those of the run; called by one rank. If it cannot be written, training goes on."""
    path = healings_file(folder)
    line = json.dumps(asdict(healing)).encode("ascii") + b"\n"
    try:
        make_folder(folder)
        before = read_file(path) if os.path.lexists(path) else b""
        # After half a line, which nobody could read, nothing else could be read either.
        write_file(path, before[: before.rfind(b"\n") + 1] + line)
    except OSError as error:
        warnings.warn(
            f"a healing is not recorded, because of an error ({path}: {error})", RuntimeWarning, stacklevel=2
        )


def read_healings(folder: Path) -> list[Healing]:
    """The healings of the run that has recorded in a folder; a last line that was cut off is left out.

    Raises:
        RecordingError: the file is damaged.
    """
    path = healings_file(folder)
    healings: list[Healing] = []
    if os.path.lexists(path):
        read_json_lines(path, lambda event: healings.append(_parse(event)))
    return healings


def _parse(event: Any) -> Healing:
    match event:
        case {"lost": list(lost), "seconds": int() | float() as seconds}:
            numbers = {name: event.get(name) for name in _NUMBERS}
        case _:
            raise ValueError("it is no healing")
    if not all(map(_is_count, numbers.values())) or not 0 <= seconds < _LIMIT:
        raise ValueError("a number is missing, or out of range")
    return Healing(**numbers, lost=[_lost_rank(each) for each in lost], seconds=float(seconds))


def _lost_rank(lost: object) -> tuple[int, str]:
    match lost:
        case [int(rank), str(why)] if _is_count(rank):
            return rank, why
    raise ValueError("a lost rank has a number and a reason")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LIMIT
