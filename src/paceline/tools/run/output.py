"""What ranks print, on its way to the screen and to files."""

import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from paceline.tools.run.console import Console, Sink, Source
from paceline.tools.run.lines import Lines
from paceline.tools.run.status import Status

TICK_SECONDS = 0.1
# A prompt, or a line that grows slowly, is shown after this.
QUIET_SECONDS = 0.3
# A progress bar is drawn anew this often where it is, and this often if it needs a new line each time.
REDRAW_SECONDS = 0.2
REPEAT_SECONDS = 5.0


class Stream:
    """One stream of a rank: a pipe with a name, through which everything comes that is printed to it."""

    def __init__(self, pipe: Path, source: Source, *, log: Path | None, is_shown: bool) -> None:
        os.mkfifo(pipe)
        # Open in both directions it has no end, whoever opens and closes it.
        self.descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._source = source
        self._lines = Lines()
        self._log: BinaryIO | None = log.open("wb", buffering=0) if log is not None else None
        self._is_shown = is_shown
        self._changed_at = self._shown_at = 0.0
        self._last_shown = ""

    def pump(self, console: Console) -> bool:
        """Take what has come; whether there was anything."""
        try:
            data = os.read(self.descriptor, 2**16)
        except BlockingIOError:
            return False
        self._keep(data)
        self._changed_at = time.monotonic()
        self._show(console, self._lines.feed(data))
        return True

    def _keep(self, data: bytes) -> None:
        """Write to the file too; a full disk ends that, and not the run."""
        if self._log is not None:
            with suppress(OSError):
                self._log.write(data)

    def show_unfinished(self, console: Console) -> None:
        """Show a line that has waited for its end long enough."""
        text, now = self._lines.unfinished, time.monotonic()
        if not self._is_shown or not text or text == self._last_shown:
            return
        if self._lines.is_redrawn:
            in_place = console.can_go_on(self._source) and self._source.sink.is_terminal
            is_due = now - self._shown_at >= (REDRAW_SECONDS if in_place else REPEAT_SECONDS)
        else:
            is_due = now - self._changed_at >= QUIET_SECONDS
        if is_due:
            console.unfinished(self._source, text)
            self._shown_at, self._last_shown = now, text

    def close(self, console: Console) -> None:
        """Show what has no end of line, and let go of the pipe and the file."""
        self._show(console, self._lines.feed(b"", final=True))
        os.close(self.descriptor)
        if self._log is not None:
            self._log.close()

    def _show(self, console: Console, lines: list[str]) -> None:
        """Show whole lines, all at once; but not again one that was there when another rank spoke."""
        if not self._is_shown or not lines:
            return
        is_there = bool(lines[0]) and lines[0] == self._last_shown and not console.can_go_on(self._source)
        self._last_shown = ""
        if new := lines[is_there:]:
            console.line(self._source, f"\n{self._source.prefix}".join(new))


class Output:
    """The thread that takes what ranks print, and sees when they end.

    Args:
        status: tells how the run goes.
    """

    def __init__(self, status: Status) -> None:
        self._status = status
        self._console = Console()
        self._selector = selectors.DefaultSelector()
        self._streams: list[Stream] = []
        self._is_finishing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="paceline-output", daemon=True)
        self._thread.start()

    def add(self, stream: Stream) -> None:
        """Take what comes through ``stream``, from now on."""
        with self._lock:
            self._streams.append(stream)
        self._selector.register(stream.descriptor, selectors.EVENT_READ, lambda: stream.pump(self._console))

    def when_ended(self, pid: int, call: Callable[[], None]) -> None:
        """Call ``call``, in the output's thread, when the process has ended."""
        life = os.pidfd_open(pid)

        def ended() -> None:
            self._selector.unregister(life)
            os.close(life)
            call()

        self._selector.register(life, selectors.EVENT_READ, ended)

    def say(self, sink: Sink, text: str) -> None:
        """Write words of our own, on lines of their own."""
        with self._lock:
            self._console.close_line()
            sink.write(f"{text}\n")

    def finish(self) -> None:
        """Show all that the ranks, which have ended, have printed."""
        self._is_finishing.set()
        self._thread.join()
        for stream in self._streams:
            stream.close(self._console)
        self._console.close_line()
        if (told := self._status.last()) is not None:
            self._status.sink.write(f"{told}\n")
        for key in list(self._selector.get_map().values()):
            if key.fd not in {stream.descriptor for stream in self._streams}:
                os.close(key.fd)
        self._selector.close()

    def _run(self) -> None:
        while not self._is_finishing.is_set():
            ready = self._selector.select(TICK_SECONDS)
            with self._lock:
                for key, _ in ready:
                    key.data()
                for stream in self._streams:
                    stream.show_unfinished(self._console)
                self._tell_status()
        for stream in self._streams:
            with suppress(OSError):
                while stream.pump(self._console):
                    pass

    def _tell_status(self) -> None:
        sink, told = self._status.sink, self._status.due()
        if sink.is_terminal and not self._console.has_status:
            told = self._status.told  # a rank's words have taken its place
        if told is None:
            return
        if sink.is_terminal:
            self._console.status(sink, told)
        else:
            self._console.close_line()
            sink.write(f"{told}\n")
