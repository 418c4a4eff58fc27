"""A rank of an MPI library that all-reduces when it is told to; benchmarks/mpi_peers.py starts it.

mpiexec -n N python benchmarks/mpi_rank.py SOCKET

Ranks of MPI poll while they wait for each other, so each uses a core in every call of MPI. Between turns a
rank therefore waits for its next command in a read from the socket, which uses no CPU time.

It imports neither torch nor paceline, so that it starts quickly.
"""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np

# Whole numbers below this are reduced when a result is checked, so that their sums are exact in any order.
CHECK_PERIOD = 1000


@dataclass(frozen=True)
class Hello:
    """What a rank says first."""

    rank: int
    version: str


@dataclass(frozen=True)
class Prepare:
    """Have ready an array of this many float32 numbers; the answer is whether its sum was right."""

    count: int


@dataclass(frozen=True)
class TakeTurn:
    """Make calls in a row; the answer is a RankTurn."""

    calls: int


@dataclass(frozen=True)
class Check:
    """Reduce known numbers; the answer is whether the sum was right."""


@dataclass(frozen=True)
class RankTurn:
    """What a turn took on one rank: seconds and CPU seconds (user and system) per call."""

    seconds: float
    cpu: float


def timed(call: Callable[[], object], calls: int) -> RankTurn:
    """Time calls in a row, after one that is not timed: it brings ranks together."""
    call()
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - start
    return RankTurn(seconds / calls, (time.process_time() - cpu) / calls)


class MpiRank:
    """Answers commands: in-place sums of one array over all ranks."""

    def __init__(self, mpi: Any) -> None:
        self._in_place = mpi.IN_PLACE
        self._ranks = mpi.COMM_WORLD
        self._data = np.zeros(0, np.float32)

    def answer(self, command: object) -> object:
        """Do what the command says."""
        match command:
            case Prepare(count):
                # The next array may take the place of this one.
                self._data = np.zeros(0, np.float32)
                self._data = np.empty(count, np.float32)
                return self._sum_is_right()
            case TakeTurn(calls):
                self._ranks.Barrier()
                return timed(self._all_reduce, calls)
            case Check():
                return self._sum_is_right()
            case _:
                raise ValueError(f"not a command (given: {command})")

    def _all_reduce(self) -> None:
        self._ranks.Allreduce(self._in_place, self._data)

    def _sum_is_right(self) -> bool:
        """Whether a sum of known numbers is right; the array then holds zeros, whose sums are zeros."""
        parts = [np.roll(np.arange(CHECK_PERIOD, dtype=np.float32), rank) for rank in range(self._ranks.size)]
        self._data[:] = np.resize(parts[self._ranks.rank], self._data.size)
        self._all_reduce()
        is_right = bool((self._data == np.resize(sum(parts), self._data.size)).all())
        self._data.fill(0)
        return is_right


def version(mpi: Any) -> str:
    """The version of the library: the first number with a point in what it says about itself."""
    found = re.search(r"\d+(\.\d+)+", mpi.Get_library_version())
    return found[0] if found else "of unknown version"


def serve(commands: Connection, mpi: Any) -> None:
    """Answer commands until the benchmark has no more, or has ended."""
    rank = MpiRank(mpi)
    commands.send(Hello(mpi.COMM_WORLD.rank, version(mpi)))
    while True:
        try:
            command = commands.recv()
        except EOFError:
            return
        commands.send(rank.answer(command))


def main() -> None:
    from mpi4py import MPI  # only here: whoever imports this module need not have an MPI

    with Client(sys.argv[1], "AF_UNIX") as commands:
        serve(commands, MPI)


if __name__ == "__main__":
    # The benchmark has the same classes, by the name under which it imports this file.
    from mpi_rank import main as main_of_module

    main_of_module()
