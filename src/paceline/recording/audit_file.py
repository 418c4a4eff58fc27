"""The file in which a rank keeps the hashes of its replica: appended to in each step, and read afterwards.

It begins with ``MAGIC``. Then come records: their kind, the length of what follows, and that. A layout says
which tensors each part has; the hashes of a step are those of one part's tensors, in that order.
"""

import contextlib
import json
import os
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from paceline.errors import RecordingError
from paceline.recording.files import make_folder, new_file, open_file

MAGIC = b"PACELINE AUDIT 1"
_HEADER = struct.Struct("<BI")
_STEP = struct.Struct("<qi8s8s")
# From here on only digests are written, which are as long for any model.
_MOST_BYTES = 64 * 1024 * 1024
_MOST_READ = 8 * _MOST_BYTES
_LONGEST_RECORD = 256 * 1024 * 1024
_NAME = re.compile(r"rank(\d+)-wrapper(\d+)\.audit")


class _Kind(IntEnum):
    LAYOUT = 1
    STEP = 2
    FINDING = 3


@dataclass(frozen=True)
class StepHashes:
    """What a rank has seen in one step.

    Attributes:
        step: its number.
        part: the number of the part that was looked at.
        digest: of everything that was looked at.
        options: of the optimizers' options, as a digest.
        hashes: by the tensor's name; empty in a long recording.
    """

    step: int
    part: int
    digest: bytes
    options: bytes
    hashes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AuditFile:
    """What one rank has written for one wrapper.

    Attributes:
        rank: the global rank.
        wrapper: the number of the wrapper in its process.
        steps: in the order in which they were written.
        findings: what the ranks have found while they trained.
    """

    rank: int
    wrapper: int
    steps: list[StepHashes]
    findings: list[str]


class AuditWriter:
    """Appends to the file of one wrapper on one rank; what cannot be written is left out.

    Args:
        folder: where the file is; an older one of the same name is replaced.
        rank: the global rank.
        wrapper: the number of the wrapper in this process.
    """

    def __init__(self, folder: Path, *, rank: int, wrapper: int) -> None:
        self._file: int | None = None
        self._written = 0
        self._owner = os.getpid()
        path = folder / f"rank{rank}-wrapper{wrapper}.audit"
        with contextlib.suppress(OSError):
            make_folder(folder)
            with new_file(path) as file:
                self._file = os.dup(file)
                self._write(MAGIC)

    @property
    def wants_hashes(self) -> bool:
        """Whether the file is still short enough for every tensor's hash."""
        return self._file is not None and self._written < _MOST_BYTES

    def write_layout(self, parts: Sequence[Sequence[str]]) -> None:
        """From now on parts consist of these tensors."""
        self._append(_Kind.LAYOUT, json.dumps([list(names) for names in parts]).encode())

    def write_step(
        self, step: int, part: int, *, digest: bytes, options: bytes, hashes: Sequence[int] = ()
    ) -> None:
        """A part was looked at."""
        self._append(_Kind.STEP, _STEP.pack(step, part, digest, options) + array("q", hashes).tobytes())

    def write_finding(self, finding: str) -> None:
        """The ranks have found that they differ."""
        self._append(_Kind.FINDING, finding.encode())

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()

    def _append(self, kind: _Kind, content: bytes) -> None:
        if os.getpid() == self._owner:  # a forked child has a copy of this object
            self._write(_HEADER.pack(kind, len(content)) + content)

    def _write(self, content: bytes) -> None:
        if self._file is None:
            return
        try:
            os.write(self._file, content)
        except OSError:  # no space left; training goes on
            self.close()
        self._written += len(content)


def audit_files(folder: Path) -> list[Path]:
    """The files of audits in a folder, by rank and wrapper."""
    found = {}
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name)) and path.is_file():
            found[tuple(map(int, match.groups()))] = path
    return [found[key] for key in sorted(found)]


def read_audit_file(path: Path) -> AuditFile:
    """What one rank has written; a last record that was cut off is left out.

    Raises:
        RecordingError: the file is something else, or damaged.
    """
    match = _NAME.fullmatch(path.name)
    try:
        with os.fdopen(open_file(path, most_bytes=_MOST_READ), "rb") as file:
            if match is None or file.read(len(MAGIC)) != MAGIC:
                raise ValueError("not the file of an audit")
            return _read(file, *map(int, match.groups()))
    except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        raise RecordingError(f"the file cannot be read ({path}: {error})") from error


def _read(file: BinaryIO, rank: int, wrapper: int) -> AuditFile:
    found = AuditFile(rank, wrapper, [], [])
    layout: list[list[str]] = []
    for kind, content in _records(file):
        if kind == _Kind.LAYOUT:
            layout = json.loads(content)
        elif kind == _Kind.STEP:
            found.steps.append(_step(content, layout))
        elif kind == _Kind.FINDING:
            found.findings.append(content.decode())
        else:
            raise ValueError(f"unknown kind of record: {kind}")
    return found


def _records(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        kind, length = _HEADER.unpack(header)
        if length > _LONGEST_RECORD:
            raise ValueError(f"a record of {length} bytes")
        content = file.read(length)
        if len(content) < length:
            return
        yield kind, content


def _step(content: bytes, layout: list[list[str]]) -> StepHashes:
    step, part, digest, options = _STEP.unpack_from(content)
    hashes = array("q")
    hashes.frombytes(content[_STEP.size :])
    named = dict(zip(layout[part], hashes, strict=True)) if hashes else {}
    return StepHashes(step, part, digest, options, named)
