"""How the run goes: on a terminal a line below what ranks print, elsewhere a line from time to time."""

import io
import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from paceline.tools.run.console import Sink
from paceline.tools.run.progress import RunProgress

# How often it is told, in seconds.
ON_A_TERMINAL, ELSEWHERE = 0.5, 10.0


class Status:
    """Tells the pace.

    Args:
        sink: where it is told.
        look: finds the pace; None if there is nothing to tell.
        columns: how wide the terminal is.

    Attributes:
        told: what was told last.
    """

    def __init__(
        self, sink: Sink, look: Callable[[], RunProgress | None], columns: Callable[[], int]
    ) -> None:
        self.sink = sink
        self._look = look
        self._columns = columns
        self._pace: RunProgress | None = None
        self.told: str | None = None
        self._next = 0.0

    def due(self) -> str | None:
        """What is to be told now, if anything."""
        now = time.monotonic()
        if now < self._next:
            return None
        first, self._next = not self._next, now + (ON_A_TERMINAL if self.sink.is_terminal else ELSEWHERE)
        if first and not self.sink.is_terminal:  # there is hardly anything to tell yet
            return None
        return self._tell(self._look())

    def last(self) -> str | None:
        """What is told at the end, to stay."""
        if self.sink.is_terminal:
            self._pace = None  # what was told of it is gone from the screen
        return self._tell(self._look())

    def _tell(self, pace: RunProgress | None) -> str | None:
        if pace is None or pace == self._pace:
            return None
        self._pace = pace
        self.told = self._drawn(pace) if self.sink.is_terminal else f"paceline: {pace}"
        return self.told

    def _drawn(self, pace: RunProgress) -> str:
        """One line, no wider than the terminal."""
        screen = Console(
            file=io.StringIO(),
            force_terminal=self.sink.has_colour,
            no_color=not self.sink.has_colour,
            width=max(20, self._columns() - 1),
        )
        text = Text()
        for number, part in enumerate(pace.parts()):
            text.append(" · " if number else "", style="dim").append(part, style="" if number else "bold")
        text.truncate(screen.width, overflow="ellipsis")
        with screen.capture() as captured:
            screen.print(text, end="")
        return captured.get()
