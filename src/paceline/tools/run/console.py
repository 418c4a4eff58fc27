"""Lines of several ranks on one screen, none of them cut by another's."""

import os
from dataclasses import dataclass
from typing import TextIO

# Readable on dark and on light: green, blue, magenta, cyan, yellow, red.
COLOURS = (32, 34, 35, 36, 33, 31)
ERASE_LINE = "\r\x1b[K"


class Sink:
    """Where text ends up: the standard output or the standard error of whoever started the ranks."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        # Whatever stands for a stream in a program may lack this.
        self.is_terminal = bool(getattr(stream, "isatty", lambda: False)())
        self.has_colour = self.is_terminal and "NO_COLOR" not in os.environ

    def write(self, text: str) -> None:
        """Write and show at once. When that can no longer be done, ranks go on, and their words are lost."""
        if self._stream is None:
            return
        try:
            self._stream.write(self._encodable(self._stream, text))
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads, the disk is full, the terminal is gone, it was closed
            self._stream = None

    def _encodable(self, stream: TextIO, text: str) -> str:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)


@dataclass(frozen=True)
class Source:
    """One stream of one rank, and where it goes."""

    rank: int
    sink: Sink

    @property
    def prefix(self) -> str:
        """What its lines begin with."""
        label = f"[{self.rank}]"
        if not self.sink.has_colour:
            return f"{label} "
        return f"\x1b[{COLOURS[self.rank % len(COLOURS)]}m{label}\x1b[0m "


class Console:
    """The screen: whole lines, at most one line that its source may still go on with, or a status below."""

    def __init__(self) -> None:
        self._open: Source | None = None
        self._shown = ""
        self._status: Sink | None = None

    def status(self, sink: Sink, text: str) -> None:
        """Show a line that goes when there is another; on a terminal, and not below an unfinished line."""
        if self._open is None:
            sink.write(f"{ERASE_LINE}{text}")
            self._status = sink

    @property
    def has_status(self) -> bool:
        """Whether the status is on the screen."""
        return self._status is not None

    def line(self, source: Source, text: str) -> None:
        """Show a whole line."""
        # Its end in the same write: another host's command may have this screen too.
        self._go_on(source, text, end="\n")
        self._open, self._shown = None, ""

    def unfinished(self, source: Source, text: str) -> None:
        """Show a line so far; it can be gone on with until another source has something to show."""
        self._go_on(source, text)

    def can_go_on(self, source: Source) -> bool:
        """Whether the last line on the screen is an unfinished one of this source."""
        return self._open is source

    def close_line(self) -> None:
        """Have whatever comes next begin a line."""
        self._take_status_away()
        if self._open is not None:
            self._open.sink.write("\n")
        self._open, self._shown = None, ""

    def _take_status_away(self) -> None:
        if self._status is not None:
            self._status.write(ERASE_LINE)
            self._status = None

    def _go_on(self, source: Source, text: str, *, end: str = "") -> None:
        self._take_status_away()
        if self._open is source and text.startswith(self._shown):
            source.sink.write(text[len(self._shown) :] + end)
        elif self._open is source and source.sink.is_terminal:
            source.sink.write(f"{ERASE_LINE}{source.prefix}{text}{end}")
        else:
            self.close_line()
            source.sink.write(f"{source.prefix}{text}{end}")
        self._open, self._shown = source, text
