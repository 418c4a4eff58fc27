"""The launcher's terminal or log: lines of several ranks, never mixed, and a status line below them."""

import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

import rich.console
from rich.text import Text

from paceline.tools.run.progress import RunProgress
from paceline.tools.run.stalls import FindStall, Stall

# Readable on dark and on light backgrounds: green, blue, magenta, cyan, yellow, red.
COLOURS = (32, 34, 35, 36, 33, 31)
ERASE_LINE = "\r\x1b[K"
# How often the status is updated, in seconds.
ON_A_TERMINAL, ELSEWHERE = 0.5, 10.0
# Reading the progress takes at most one part in so many of the time.
_LEAST_BREAK = 20


class Destination:
    """The launcher's standard output or standard error."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        # A program may have replaced sys.stdout by an object without isatty.
        self.is_terminal = bool(getattr(stream, "isatty", lambda: False)())
        self.has_colour = self.is_terminal and "NO_COLOR" not in os.environ

    def write(self, text: str) -> None:
        """Write and flush. After the first error the ranks go on, and their output is dropped."""
        if self._stream is None:
            return
        try:
            self._stream.write(self._encodable(self._stream, text))
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads, the disk is full, the terminal or the file is closed
            self._stream = None

    def _encodable(self, stream: TextIO, text: str) -> str:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)


@dataclass(frozen=True)
class Source:
    """One stream of one rank, and where it goes."""

    rank: int
    destination: Destination

    @property
    def prefix(self) -> str:
        """What its lines begin with."""
        label = f"[{self.rank}]"
        if not self.destination.has_colour:
            return f"{label} "
        return f"\x1b[{COLOURS[self.rank % len(COLOURS)]}m{label}\x1b[0m "


class Console:
    """Writes whole lines; the last line may be unfinished, or the status line."""

    def __init__(self) -> None:
        # The source whose unfinished line is last, and what is shown of it.
        self._unfinished: Source | None = None
        self._shown = ""
        self._status: Destination | None = None

    def status(self, destination: Destination, text: str) -> None:
        """Show the status line on a terminal, unless an unfinished line is in its place."""
        if self._unfinished is None:
            destination.write(f"{ERASE_LINE}{text}")
            self._status = destination

    @property
    def has_status(self) -> bool:
        """Whether the status line is visible."""
        return self._status is not None

    def line(self, source: Source, text: str) -> None:
        """Show a whole line."""
        # Text and line end in one write: the command of another host may use the same terminal.
        self._write(source, text, end="\n")
        self._unfinished, self._shown = None, ""

    def unfinished(self, source: Source, text: str) -> None:
        """Show a line so far; the source can continue it until another one has something to show."""
        self._write(source, text)

    def can_continue(self, source: Source) -> bool:
        """Whether the last line is an unfinished one of this source."""
        return self._unfinished is source

    def end_line(self) -> None:
        """Make whatever comes next begin on a new line."""
        self._erase_status()
        if self._unfinished is not None:
            self._unfinished.destination.write("\n")
        self._unfinished, self._shown = None, ""

    def _erase_status(self) -> None:
        if self._status is not None:
            self._status.write(ERASE_LINE)
            self._status = None

    def _write(self, source: Source, text: str, *, end: str = "") -> None:
        self._erase_status()
        if self._unfinished is source and text.startswith(self._shown):
            source.destination.write(text[len(self._shown) :] + end)
        elif self._unfinished is source and source.destination.is_terminal:
            source.destination.write(f"{ERASE_LINE}{source.prefix}{text}{end}")
        else:
            self.end_line()
            source.destination.write(f"{source.prefix}{text}{end}")
        self._unfinished, self._shown = source, text


class StatusLine:
    """How fast the run is: the last line of a terminal, elsewhere a line every few seconds.

    Args:
        destination: where it is shown.
        read_progress: reads the progress from the ranks' recordings; None if there is nothing to show.
        read_whole: the same of the whole run, for its end.
        columns: the width of the terminal.
        find_stall: tells which rank others wait for, if they wait long.

    Attributes:
        text: what was shown last.
    """

    def __init__(
        self,
        destination: Destination,
        read_progress: Callable[[], RunProgress | None],
        columns: Callable[[], int],
        find_stall: FindStall = lambda: None,
        read_whole: Callable[[], RunProgress | None] | None = None,
    ) -> None:
        self._read_whole = read_whole or read_progress
        self._find_stall = find_stall
        self._stalled_since: float | None = None
        self.destination = destination
        self._read_progress = read_progress
        self._columns = columns
        self._progress: RunProgress | None = None
        self.text: str | None = None
        self._next = 0.0

    def due(self) -> str | None:
        """What is to be shown now, if anything."""
        now = time.monotonic()
        if now < self._next:
            return None
        is_first, self._next = (
            not self._next,
            now + (ON_A_TERMINAL if self.destination.is_terminal else ELSEWHERE),
        )
        if is_first and not self.destination.is_terminal:  # there is hardly anything to show yet
            return None
        if (stall := self._find_stall()) is not None:
            return self._show_stall(stall, now)
        self._stalled_since = None
        progress = self._read_progress()
        # Ranks need the cores: what takes long, because there are many steps, is done less often.
        self._next = max(self._next, now + _LEAST_BREAK * (time.monotonic() - now))
        return self._update(progress)

    def _show_stall(self, stall: Stall, now: float) -> str | None:
        """A stall is in the status line of a terminal; elsewhere it is told once."""
        since, before = now - stall.seconds, self._stalled_since
        self._stalled_since = since
        self._progress = None  # to be shown again afterwards
        if self.destination.is_terminal:
            self.text = self._styled([f"stalled for {stall.seconds:.0f} s", stall.text])
            return self.text
        is_new = before is None or since > before + ELSEWHERE
        return f"paceline: stalled for {stall.seconds:.0f} s: {stall.text}" if is_new else None

    def last(self) -> str | None:
        """What is shown at the end, to stay."""
        if self.destination.is_terminal:
            self._progress = None  # what was shown has been erased
        return self._update(self._read_whole())

    def _update(self, progress: RunProgress | None) -> str | None:
        if progress is None or progress == self._progress:
            return None
        self._progress = progress
        self.text = (
            self._styled(progress.parts()) if self.destination.is_terminal else f"paceline: {progress}"
        )
        return self.text

    def _styled(self, parts: Sequence[str]) -> str:
        """One line, not wider than the terminal."""
        screen = rich.console.Console(
            file=io.StringIO(),
            force_terminal=self.destination.has_colour,
            no_color=not self.destination.has_colour,
            width=max(20, self._columns() - 1),
        )
        text = Text()
        for number, part in enumerate(parts):
            text.append(" · " if number else "", style="dim").append(part, style="" if number else "bold")
        text.truncate(screen.width, overflow="ellipsis")
        with screen.capture() as captured:
            screen.print(text, end="")
        return captured.get()
