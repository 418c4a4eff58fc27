"""One rank's life, inside its own process: join the group, answer calls, leave."""

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
from paceline.testing import remote
from paceline.testing.mailbox import Mailbox

# Tells a rank to write down its stacks and end.
END_SIGNAL = signal.SIGUSR1

# The single bytes on the socket between a caller and a rank.
CALL = b"c"
ANSWER = b"a"


@dataclass(frozen=True)
class Setup:
    """What a rank takes over from its caller, so that the fork server's own surroundings do not show."""

    world: int
    backend: str | None
    directory: str
    environ: dict[str, str]
    path: list[str]

    @classmethod
    def of_caller(cls, *, world: int, backend: str | None) -> "Setup":
        """The surroundings of the process that asks for ranks."""
        return cls(world, backend, str(Path.cwd()), dict(os.environ), list(sys.path))

    def adopt(self) -> None:
        """Put the caller's surroundings in place of the fork server's."""
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path


def live(rank: int, mailbox: Mailbox, channel: socket.socket) -> None:
    """Join the group, answer the caller's calls until it hangs up, and leave the group."""
    setup: Setup = remote.load(mailbox.setup.read_bytes())
    setup.adopt()
    torch.set_num_threads(1)
    _print_whole_lines()
    with mailbox.stacks(rank).open("wb", buffering=0) as stacks, ExitStack() as group:
        _write_stacks_at_the_end(stacks)
        _answer(remote.outcome_of(_join, group, setup, rank, mailbox), rank, mailbox, channel)
        while channel.recv(1):
            _answer(remote.outcome_of(_run_call, rank, mailbox), rank, mailbox, channel)


def _join(stack: ExitStack, setup: Setup, rank: int, mailbox: Mailbox) -> None:
    if setup.backend is not None:
        group = file_store_group(mailbox.store, rank=rank, world=setup.world, backend=setup.backend)
        stack.enter_context(group)


def _run_call(rank: int, mailbox: Mailbox) -> object:
    call: remote.Call = remote.load(mailbox.call.read_bytes())
    return call.run(rank)


def _answer(outcome: remote.Outcome, rank: int, mailbox: Mailbox, channel: socket.socket) -> None:
    mailbox.answer(rank).write_bytes(remote.pack(outcome))
    channel.sendall(ANSWER)


def _print_whole_lines() -> None:
    """Print line by line, so that nothing is lost when the rank is killed, and ranks' lines do not mix."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _write_stacks_at_the_end(file: FileIO) -> None:
    """Write every thread's Python stack on a crash, and on END_SIGNAL, which then ends the process."""
    faulthandler.enable(file, all_threads=True)
    # With chain=True the signal's default action follows the dump. So the end of the process says that
    # the dump is complete, and unlike for SIGABRT, that default writes no core file.
    faulthandler.register(END_SIGNAL, file, all_threads=True, chain=True)
