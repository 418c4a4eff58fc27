"""Counts what a program does with the toy device that takes time on a real one, and says who did it."""

import contextlib
import traceback
from collections.abc import Iterator

_KINDS = ("reads", "waits", "host_copies", "blocking_copies", "allocations")
_SHOWN_LINES = 5
_SHOWN_FRAMES = 3
# A frame of these packages does not say who asked for something.
_BETWEEN = ("torch.", "paceline.testing.", "contextlib.", "threading.")


class Counts:
    """What was done inside a block of ``counting``."""

    def __init__(self) -> None:
        # Lists, because threads can append to them at the same time.
        self._done: dict[str, list[str]] = {kind: [] for kind in _KINDS}

    @property
    def reads(self) -> int:
        """How often the host read values of the device, for which it has to wait."""
        return len(self._done["reads"])

    @property
    def waits(self) -> int:
        """How often the host waited for a stream, an event or the device."""
        return len(self._done["waits"])

    @property
    def host_copies(self) -> int:
        """The number of copies from the host to the device."""
        return len(self._done["host_copies"])

    @property
    def blocking_copies(self) -> int:
        """How many of these copies the host waited for, because they were not ``non_blocking``."""
        return len(self._done["blocking_copies"])

    @property
    def allocations(self) -> int:
        """The number of storages that were allocated on the device."""
        return len(self._done["allocations"])

    @property
    def lines(self) -> dict[str, list[str]]:
        """Of the first few of each kind: what was done, and by which lines."""
        return {kind: done[:_SHOWN_LINES] for kind, done in self._done.items()}

    def add(self, kind: str, what: str) -> None:
        """Count something that the calling thread does."""
        done = self._done[kind]
        done.append(f"{what} by {caller()}" if len(done) < _SHOWN_LINES else what)

    def __repr__(self) -> str:
        kinds = (
            "\n  ".join([f"\n{kind}: {len(done)}", *self.lines[kind]]) for kind, done in self._done.items()
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
