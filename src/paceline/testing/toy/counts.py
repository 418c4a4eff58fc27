"""Counts what a program does with the toy device that takes time on a real one, and says who did it."""

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator

_SHOWN_LINES = 5
_SHOWN_FRAMES = 3
# A frame of these packages does not say who asked for something.
_BETWEEN = ("torch.", "paceline.testing.", "contextlib.", "threading.")


class Counts:
    """What was done inside a block of ``counting``."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        # Of the first few of each kind: what was done, and by which lines.
        self.lines: dict[str, list[str]] = {}

    @property
    def reads(self) -> int:
        """How often the host read values of the device, for which it has to wait."""
        return self._numbers["reads"]

    @property
    def waits(self) -> int:
        """How often the host waited for a stream, an event or the device."""
        return self._numbers["waits"]

    @property
    def host_copies(self) -> int:
        """The number of copies from the host to the device."""
        return self._numbers["host_copies"]

    @property
    def blocking_copies(self) -> int:
        """How many of these copies the host waited for, because they were not ``non_blocking``."""
        return self._numbers["blocking_copies"]

    @property
    def allocations(self) -> int:
        """The number of storages that were allocated on the device."""
        return self._numbers["allocations"]

    def add(self, kind: str, what: str) -> None:
        """Count something that the calling thread does."""
        self._numbers[kind] += 1
        lines = self.lines.setdefault(kind, [])
        if len(lines) < _SHOWN_LINES:
            lines.append(f"{what} by {caller()}")

    def __repr__(self) -> str:
        kinds = (
            "\n  ".join([f"\n{kind}: {number}, the first:", *self.lines[kind]])
            for kind, number in sorted(self._numbers.items())
        )
        return f"Counts({''.join(kinds)})"


_active: list[Counts] = []


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count what all threads of this process do with the device inside the block."""
    counts = Counts()
    _active.append(counts)
    try:
        yield counts
    finally:
        _active.remove(counts)


def count(kind: str, what: str) -> None:
    """Count something, wherever somebody counts."""
    for counts in [*_active]:  # another thread may begin to count
        counts.add(kind, what)


def caller() -> str:
    """The lines that asked the device for something, the innermost first."""
    lines: list[str] = []
    for frame, number in traceback.walk_stack(None):
        if len(lines) == _SHOWN_FRAMES:
            break
        module = str(frame.f_globals.get("__name__", ""))
        if not f"{module}.".startswith(_BETWEEN):
            lines.append(f"{frame.f_code.co_filename}:{number} in {frame.f_code.co_name}")
    return " < ".join(lines) or "torch's autograd engine"
