"""The ranks of this host as their agent sees them started: their streams, their folder, their end."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import to_map

from paceline.recording.reader import delete_recording
from paceline.recording.recorder import FOLDER_VARIABLE
from paceline.tools.run import processes, worker
from paceline.tools.run.console import Sink, Source
from paceline.tools.run.failures import Failure, was_ended
from paceline.tools.run.output import Output, Stream
from paceline.tools.run.worker import FOLDER


class Streams(LogsSpecs):
    """Gives each rank pipes to print to, and the environment that is ours to give."""

    def __init__(
        self,
        folder: Path,
        output: Output,
        sinks: tuple[Sink, Sink],
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
        self._sinks = sinks
        self._environment = environment

    @property
    def folder(self) -> Path:
        """Where the ranks that were started last write down what they have to tell."""
        return self._folder / str(self._attempt)

    @property
    def root_log_dir(self) -> str:
        """Where output is kept, as torch's agent asks for it."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The pipes of ranks that are about to be started, whose environment is ``envs``."""
        # Counted here: the agent's count leaves out starts for hosts that come or go.
        self._attempt += 1
        self.folder.mkdir()
        # Of an earlier run or attempt.
        delete_recording(Path(self._environment[FOLDER_VARIABLE]))
        destination = LogsDest()
        for local, environment in envs.items():
            rank = int(environment["RANK"])
            environment.update(self._environment, **{FOLDER: str(self.folder)})
            errors = str(self.folder / f"{rank}.error")
            destination.error_files[local] = environment["TORCHELASTIC_ERROR_FILE"] = errors
            shown = self._shown(local, len(envs))
            destination.stdouts[local] = self._open(rank, "stdout", self._sinks[0], is_shown=Std.OUT in shown)
            destination.stderrs[local] = self._open(rank, "stderr", self._sinks[1], is_shown=Std.ERR in shown)
        return destination

    def _shown(self, local: int, ranks: int) -> Std:
        """Which streams of a rank of this host go to the screen."""
        if self._local_ranks_filter and local not in self._local_ranks_filter:
            return Std.NONE
        return Std.ALL & ~to_map(self._redirects, ranks)[local]

    def _open(self, rank: int, name: str, sink: Sink, *, is_shown: bool) -> str:
        pipe = self.folder / f"{rank}.{name}"
        self._output.add(Stream(pipe, Source(rank, sink), log=self._log(rank, name), is_shown=is_shown))
        return str(pipe)

    def _log(self, rank: int, name: str) -> Path | None:
        if self._root_log_dir is None:
            return None
        folder = Path(self._root_log_dir) / f"rank-{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / (f"{name}.{self._attempt}.log" if self._attempt else f"{name}.log")


class Ranks:
    """The processes of one attempt, by rank, and what is known of their end."""

    def __init__(self, output: Output, folder: Callable[[], Path], *, adopts_all: bool) -> None:
        self._output = output
        self._folder = folder
        self._adopted_by = os.getpid() if adopts_all else None
        self._strangers = frozenset(processes.table())
        self._sessions: set[int] = set()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended_at: dict[int, float] = {}
        self._asked_at: float | None = None

    def started(self, running: Mapping[int, "subprocess.Popen[bytes]"]) -> None:
        """A new attempt's processes, each the leader of its session."""
        self._running, self._ended_at, self._asked_at = dict(running), {}, None
        for rank, process in running.items():
            self._sessions.add(process.pid)
            self._output.when_ended(process.pid, lambda rank=rank: self._has_ended(rank))  # type: ignore[misc]

    def asked_to_end(self) -> None:
        """From now on, ranks may end because they are asked to."""
        self._asked_at = self._asked_at or time.time()

    def end(self, *, at_once: bool = False) -> None:
        """End all that ranks have started, and the ranks."""
        processes.end(self._left, at_once=at_once)

    def failures(self) -> list[Failure]:
        """The ranks of the last attempt that did not end well."""
        codes = {rank: process.poll() for rank, process in self._running.items()}
        return [self._failure(rank, code) for rank, code in codes.items() if code]

    def _left(self) -> set[int]:
        mark = f"{FOLDER}={self._folder()}"
        return processes.left_by(
            self._sessions, mark=mark, adopted_by=self._adopted_by, strangers=self._strangers
        )

    def _has_ended(self, rank: int) -> None:
        self._ended_at[rank] = time.time()

    def _failure(self, rank: int, code: int) -> Failure:
        note = self._note(rank)
        code = note.get("code", code)
        at = note.get("time") or self._ended_at.get(rank) or time.time()
        return Failure(
            rank=rank,
            host=socket.gethostname(),
            pid=self._running[rank].pid,
            time=at,
            exit_code=code,
            kind=note.get("kind", ""),
            message=note.get("message", ""),
            trace=note.get("trace", "") or self._crash(rank),
            roots=note.get("roots", ()),
            was_ended=was_ended(code, at=at, asked_at=self._asked_at),
        )

    def _note(self, rank: int) -> dict[str, Any]:
        try:
            note: dict[str, Any] = json.loads((self._folder() / f"{rank}.json").read_text())
        except FileNotFoundError:
            return {}
        return note

    def _crash(self, rank: int) -> str:
        try:
            words = (self._folder() / f"{rank}.crash").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "".join(line for line in words.splitlines(keepends=True) if worker.__file__ not in line)
