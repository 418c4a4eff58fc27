"""The lists of tests: one id per line, what follows ``#`` is for the reader.

Those beside this file are of the torch that ``constraints.txt`` pins. Another version's are in a folder that
``run.py --lists`` names. The exceptions are the same for all.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

DIRECTORY = Path(__file__).parent
PASSES_WITH_TORCH = "passes_with_torch.txt"
FAILS_WITH_TORCH = "fails_with_torch.txt"
EXCEPTIONS = DIRECTORY / "exceptions.txt"


def read(file: Path) -> list[str]:
    """The ids in a list."""
    entries = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [entry for entry in entries if entry]


def write(file: Path, header: str, notes: Mapping[str, str]) -> None:
    """Write a list of ids, each with its note."""
    width = max(map(len, notes), default=0)
    file.write_text("\n".join([*_comment(header), *_entries(notes, width)]) + "\n")


def _comment(text: str) -> Iterable[str]:
    return (f"# {line}".rstrip() for line in text.strip().splitlines())


def _entries(notes: Mapping[str, str], width: int) -> Iterable[str]:
    return (f"{name:{width}}  # {note}" if note else name for name, note in sorted(notes.items()))
