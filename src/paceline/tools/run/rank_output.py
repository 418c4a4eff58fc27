"""What ranks print: one thread reads it from pipes, shows whole lines on the console and writes log files."""

import codecs
import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import to_map

from paceline.comm.roster import LOST_AFTER_VARIABLE, MEMBER_VARIABLE, first_member
from paceline.recording.reader import delete_recording
from paceline.recording.recorder import FOLDER_VARIABLE
from paceline.tools.run.console import Console, Destination, Source, StatusLine
from paceline.tools.run.worker import FOLDER
from paceline.watch.rank_page import delete_pages

TICK_SECONDS = 0.1
# A prompt, or a line that grows slowly, is shown after this time.
QUIET_SECONDS = 0.3
# How often a progress bar is redrawn in place, and how often if each update needs a new line.
REDRAW_SECONDS = 0.2
REPEAT_SECONDS = 5.0
# A longer line is shown in pieces.
LONGEST_LINE = 2**16


class LineBuffer:
    """Cuts one stream's bytes into lines. It returns whole lines and keeps the unfinished one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept = ""
        self.is_redrawn = False

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """The lines that ``data`` finishes, without line ends and without text that was overwritten."""
        *lines, rest = (self._kept + self._decoder.decode(data, final)).split("\n")
        self.is_redrawn = "\r" in rest or (self.is_redrawn and not lines)
        shown = [_visible(line) for line in lines]
        if len(rest) > LONGEST_LINE or (final and _visible(rest)):
            shown.append(_visible(rest))
            rest = ""
        # A trailing carriage return is kept: a line feed may follow, and then nothing is overwritten.
        self._kept = _visible(rest) + ("\r" if rest.endswith("\r") else "")
        return shown

    @property
    def unfinished(self) -> str:
        """What can be seen of the line that has no end yet."""
        return _visible(self._kept)


def _visible(line: str) -> str:
    """The part of a line after its last carriage return, which overwrote the rest."""
    return line.rstrip("\r").rpartition("\r")[2]


class RankStream:
    """A rank's standard output or standard error, read from a named pipe."""

    def __init__(self, pipe: Path, source: Source, *, log: Path | None, is_shown: bool) -> None:
        os.mkfifo(pipe)
        # Opened for reading and writing, it never reaches end of file, whoever else opens and closes it.
        self.descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._source = source
        self._lines = LineBuffer()
        self._log: BinaryIO | None = log.open("wb", buffering=0) if log is not None else None
        self._is_shown = is_shown
        self._changed_at = self._shown_at = 0.0
        self._last_shown = ""

    def read(self, console: Console) -> bool:
        """Read what has arrived, log it and show whole lines; whether there was anything."""
        try:
            data = os.read(self.descriptor, 2**16)
        except BlockingIOError:
            return False
        if self._log is not None:
            with suppress(OSError):  # a full disk must not stop the run
                self._log.write(data)
        self._changed_at = time.monotonic()
        self._show(console, self._lines.feed(data))
        return True

    def show_unfinished(self, console: Console) -> None:
        """Show a line without end, once it has waited long enough."""
        text, now = self._lines.unfinished, time.monotonic()
        if not self._is_shown or not text or text == self._last_shown:
            return
        if self._lines.is_redrawn:
            in_place = console.can_continue(self._source) and self._source.destination.is_terminal
            is_due = now - self._shown_at >= (REDRAW_SECONDS if in_place else REPEAT_SECONDS)
        else:
            is_due = now - self._changed_at >= QUIET_SECONDS
        if is_due:
            console.unfinished(self._source, text)
            self._shown_at, self._last_shown = now, text

    def close(self, console: Console) -> None:
        """Show the rest, and close the pipe and the log."""
        self._show(console, self._lines.feed(b"", final=True))
        os.close(self.descriptor)
        if self._log is not None:
            self._log.close()

    def _show(self, console: Console, lines: list[str]) -> None:
        """Show whole lines in one write, but not again a first line that has been shown unfinished."""
        if not self._is_shown or not lines:
            return
        was_shown = bool(lines[0]) and lines[0] == self._last_shown and not console.can_continue(self._source)
        self._last_shown = ""
        if new := lines[was_shown:]:
            console.line(self._source, f"\n{self._source.prefix}".join(new))


class OutputThread:
    """The thread that reads what ranks print, and notices when they end."""

    def __init__(self, status: StatusLine) -> None:
        self._status = status
        self._has_status = True
        self._console = Console()
        self._selector = selectors.DefaultSelector()
        self._streams: list[RankStream] = []
        self._is_finishing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="paceline-output", daemon=True)
        self._thread.start()

    def add(self, stream: RankStream) -> None:
        """Read this stream from now on."""
        with self._lock:
            self._streams.append(stream)
        self._selector.register(stream.descriptor, selectors.EVENT_READ, lambda: stream.read(self._console))

    def call_when_ended(self, pid: int, call: Callable[[], None]) -> None:
        """Call ``call`` in this thread when the process has ended."""
        descriptor = os.pidfd_open(pid)

        def ended() -> None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            call()

        self._selector.register(descriptor, selectors.EVENT_READ, ended)

    def say(self, destination: Destination, text: str) -> None:
        """Write a message of the launcher, on lines of its own."""
        with self._lock:
            self._console.end_line()
            destination.write(f"{text}\n")

    def finish(self) -> None:
        """Show all that the ranks, which have ended, have printed."""
        self._is_finishing.set()
        self._thread.join()
        for stream in self._streams:
            stream.close(self._console)
        self._console.end_line()
        if (text := self._status_text(self._status.last)) is not None:
            self._status.destination.write(f"{text}\n")
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
                self._show_status()
        for stream in self._streams:
            with suppress(OSError):
                while stream.read(self._console):
                    pass

    def _show_status(self) -> None:
        destination, text = self._status.destination, self._status_text(self._status.due)
        stays = not (destination.is_terminal and self._has_status)
        if not stays and not self._console.has_status:
            text = self._status.text  # a rank's output has overwritten it
        if text is None:
            return
        if stays:
            self._console.end_line()
            destination.write(f"{text}\n")
        else:
            self._console.status(destination, text)

    def _status_text(self, tell: Callable[[], str | None]) -> str | None:
        """What the status line has to tell. After its first error, which is told, it is off.

        An error in this thread would leave the ranks waiting: nobody would read what they print.
        """
        if not self._has_status:
            return None
        try:
            return tell()
        except Exception as error:
            self._has_status = False
            return f"paceline: the line about the run's progress is off ({type(error).__name__}: {error})"


class RankLogs(LogsSpecs):
    """Gives each rank pipes to print to and its environment, where torch's agent asks for log files."""

    def __init__(
        self,
        folder: Path,
        output: OutputThread,
        destinations: tuple[Destination, Destination],
        *,
        log_dir: Path | None,
        environment: Mapping[str, str],
        only_logged: Std | dict[int, Std],
        shown_ranks: set[int] | None,
    ) -> None:
        super().__init__(str(log_dir) if log_dir else None, only_logged, Std.NONE, shown_ranks)
        self._folder = folder
        self._attempt = -1
        self._output = output
        self._destinations = destinations
        self._environment = environment

    @property
    def folder(self) -> Path:
        """Where the ranks of the last attempt write their error reports and results."""
        return self._folder / str(self._attempt)

    @property
    def common_environment(self) -> dict[str, str]:
        """The variables that all ranks of the last attempt have in common."""
        return {**self._environment, FOLDER: str(self.folder)}

    @property
    def root_log_dir(self) -> str:
        """The folder for log files, for torch's agent."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Open the pipes of ranks that are about to be started, whose environment is ``envs``."""
        # Counted here: the agent's count leaves out starts for hosts that come or go.
        self._attempt += 1
        self.folder.mkdir()
        record = Path(self._environment[FOLDER_VARIABLE])
        delete_recording(record)  # what an earlier run or attempt has recorded
        delete_pages(record)
        dest = LogsDest()
        stdout, stderr = self._destinations
        for local, environment in envs.items():
            rank = int(environment["RANK"])
            environment.update(self.common_environment)
            if LOST_AFTER_VARIABLE in environment:  # ranks may be replaced
                environment[MEMBER_VARIABLE] = first_member(environment)
            errors = str(self.folder / f"{rank}.error")
            dest.error_files[local] = environment["TORCHELASTIC_ERROR_FILE"] = errors
            shown = self._shown(local, len(envs))
            dest.stdouts[local] = self._open(rank, "stdout", stdout, is_shown=Std.OUT in shown)
            dest.stderrs[local] = self._open(rank, "stderr", stderr, is_shown=Std.ERR in shown)
        return dest

    def _shown(self, local: int, ranks: int) -> Std:
        """Which streams of a rank appear on the console."""
        if self._local_ranks_filter and local not in self._local_ranks_filter:
            return Std.NONE
        return Std.ALL & ~to_map(self._redirects, ranks)[local]

    def _open(self, rank: int, name: str, destination: Destination, *, is_shown: bool) -> str:
        pipe = self.folder / f"{rank}.{name}"
        log = self._log_file(rank, name)
        self._output.add(RankStream(pipe, Source(rank, destination), log=log, is_shown=is_shown))
        return str(pipe)

    def _log_file(self, rank: int, name: str) -> Path | None:
        if self._root_log_dir is None:
            return None
        folder = Path(self._root_log_dir) / f"rank-{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / (f"{name}.{self._attempt}.log" if self._attempt else f"{name}.log")
