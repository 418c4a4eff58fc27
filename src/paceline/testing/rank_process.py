"""What runs in a rank's process: open the process group, answer calls, close the group."""

import faulthandler
import os
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO, TextIOWrapper
from pathlib import Path

import torch

from paceline.comm.rendezvous import file_store_group
from paceline.testing import messages
from paceline.testing.messages import Call, RankAnswer, RankFiles

# Tells a rank to write its stacks to a file and end.
END_SIGNAL = signal.SIGUSR1

# The single bytes on the socket between a caller and a rank.
CALL = b"c"
ANSWER = b"a"


@dataclass(frozen=True)
class RankSetup:
    """What a rank takes over from its caller, in the place of what it inherits from the fork server."""

    world: int
    backend: str | None
    directory: str
    environ: dict[str, str]
    path: list[str]

    @classmethod
    def of_caller(cls, *, world: int, backend: str | None) -> "RankSetup":
        """Read the working directory, environment and import path of the calling process."""
        return cls(world, backend, str(Path.cwd()), dict(os.environ), list(sys.path))

    def adopt(self) -> None:
        """Use the caller's working directory, environment and import path."""
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path


def serve_calls(rank: int, files: RankFiles, channel: socket.socket) -> None:
    """Open the group, answer the caller's calls until it closes its socket, and close the group."""
    setup: RankSetup = messages.load(files.setup.read_bytes())
    setup.adopt()
    torch.set_num_threads(1)
    _print_whole_lines()
    with files.stacks(rank).open("wb", buffering=0) as stacks, ExitStack() as group:
        _write_stacks_on_signal(stacks)
        _send_answer(messages.answer_of(_open_group, group, setup, rank, files), rank, files, channel)
        while channel.recv(1):
            _send_answer(messages.answer_of(_run_call, rank, files), rank, files, channel)


def _open_group(stack: ExitStack, setup: RankSetup, rank: int, files: RankFiles) -> None:
    if setup.backend is not None:
        group = file_store_group(files.store, rank=rank, world=setup.world, backend=setup.backend)
        stack.enter_context(group)


def _run_call(rank: int, files: RankFiles) -> object:
    call: Call = messages.load(files.call.read_bytes())
    return call.run(rank)


def _send_answer(answer: RankAnswer, rank: int, files: RankFiles, channel: socket.socket) -> None:
    files.answer(rank).write_bytes(messages.pack(answer))
    channel.sendall(ANSWER)


def _print_whole_lines() -> None:
    """Print line by line, so that nothing is lost when the rank is killed, and ranks' lines do not mix."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _write_stacks_on_signal(file: FileIO) -> None:
    """Write every thread's Python stack on a crash, and on END_SIGNAL, which then ends the process."""
    faulthandler.enable(file, all_threads=True)
    # With chain=True the signal's default action follows the dump. So the end of the process says that
    # the dump is complete, and unlike for SIGABRT, that default writes no core file.
    faulthandler.register(END_SIGNAL, file, all_threads=True, chain=True)
