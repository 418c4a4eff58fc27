"""All-reduces of MPI libraries, timed in turns with paceline's; collectives.py --mpi uses it.

python benchmarks/mpi_peers.py [NAME ...]    # installs Open MPI, MPICH and Intel MPI, or those that are named

The libraries are wheels. pyproject.toml has a dependency group for each, with mpi4py, and constraints.txt the
versions. Each has a folder of its own below build/, for two reasons: their files have the same names, and
Lightning does not start in an environment that has mpi4py without an MPI.

Settings: each library has its defaults, except that Open MPI must be allowed to start more ranks than cores,
and to run as root. By default, all three give cores away while they poll, if ranks outnumber cores.

Turns: a library's mpiexec starts its ranks once per number of ranks. Ranks whose turn it is not wait in a
read, MPI's as well as ours, so they use no CPU time. A turn of any side begins with a barrier and a call that
is not timed. Then all sides make the same number of calls. MPI sums in place (MPI.IN_PLACE), in a numpy array
of ordinary memory, as the side "backend" does with an ordinary tensor.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from mpi_rank import Check, Hello, Prepare, RankTurn, TakeTurn, timed

from paceline.errors import BenchError
from paceline.testing import RankPool
from paceline.tools.bench.collective_times import (
    ITEM_BYTES,
    CollectiveCase,
    PreparedCall,
    SecondsBySide,
    check_results,
    prepare,
    sides_of,
)
from paceline.tools.bench.measure import take_turns

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "mpi-peers"
RANK_SCRIPT = Path(__file__).with_name("mpi_rank.py")
# How long ranks may take to start, to answer a command, and to end.
START_SECONDS, ANSWER_SECONDS, END_SECONDS = 60.0, 600.0, 10.0


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library, which may be installed.

    Attributes:
        name: the side's name, that of its dependency group and of its folder.
        title: what it is called.
        file: the library itself. Wheels have a libmpi.so as well, but not all of these can be loaded.
        options: what its mpiexec must be told.
    """

    name: str
    title: str
    file: str
    options: tuple[str, ...] = ()

    @property
    def mpiexec(self) -> Path:
        return self._folder / "bin" / "mpiexec"

    @property
    def is_installed(self) -> bool:
        return self.mpiexec.exists() and (self._packages / "mpi4py").exists()

    @property
    def how_to_install(self) -> str:
        return f"python benchmarks/mpi_peers.py {self.name}"

    def variables(self) -> dict[str, str]:
        """The environment of its ranks: mpi4py, and the library that this is to load."""
        path = os.pathsep.join(filter(None, [str(self._packages), os.environ.get("PYTHONPATH")]))
        library = self._folder / "lib" / self.file
        return {**os.environ, "PYTHONPATH": path, "MPI4PY_LIBMPI": str(library)}

    def install(self) -> None:
        """Install the library and mpi4py by pip, into a folder of their own."""
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--constraint", str(ROOT / "constraints.txt"), "--prefix", str(self._folder)]
        # Also if this environment has one of them.
        subprocess.run([*pip, "--ignore-installed", *groups[self.name]], check=True)  # noqa: S603

    @property
    def _folder(self) -> Path:
        return FOLDER / self.name

    @property
    def _packages(self) -> Path:
        base = {"base": str(self._folder), "platbase": str(self._folder)}
        return Path(sysconfig.get_path("platlib", "posix_prefix", base))


MPI_LIBRARIES = {
    library.name: library
    for library in (
        MpiLibrary("open-mpi", "Open MPI", "libmpi.so.40", ("--allow-run-as-root", "--oversubscribe")),
        MpiLibrary("mpich", "MPICH", "libmpi.so.12"),
        MpiLibrary("intel-mpi", "Intel MPI", "libmpi.so.12"),
    )
}


class MpiRanks:
    """Running ranks of an MPI library, each waiting for a command."""

    def __init__(self, library: MpiLibrary, world: int) -> None:
        self._library = library
        self._ranks: list[Connection] = []
        with ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="mpi-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._output = folder / "output"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(folder / "socket"))
            listener.listen(world)
            self._process = self._start(world, folder / "socket")
            stack.callback(self._end_process)
            self.title = self._meet(listener, world, stack)
            self._stack = stack.pop_all()

    def all_answers(self, command: object) -> list[Any]:
        """Tell all ranks to do something; what each answered, in rank order."""
        try:
            for rank in self._ranks:
                rank.send(command)
            return [self._received(rank) for rank in self._ranks]
        except (EOFError, OSError) as error:
            raise self._error(f"a rank ended ({error!r})") from error

    def prepare(self, case: CollectiveCase) -> None:
        """Have tensors of the case's size ready, and check a result."""
        self._require_right(Prepare(case.size // ITEM_BYTES))

    def turn(self, calls: int) -> list[RankTurn]:
        """What a turn took on each rank."""
        return self.all_answers(TakeTurn(calls))

    def check(self) -> None:
        """Check a result."""
        self._require_right(Check())

    def close(self) -> None:
        """End the ranks: they get no more commands."""
        self._stack.close()

    def _start(self, world: int, address: Path) -> "subprocess.Popen[bytes]":
        mpiexec = [str(self._library.mpiexec), *self._library.options, "-n", str(world)]
        command = [*mpiexec, sys.executable, str(RANK_SCRIPT), str(address)]
        with self._output.open("wb") as output:
            return subprocess.Popen(  # noqa: S603
                command,
                env=self._library.variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _meet(self, listener: socket.socket, world: int, stack: ExitStack) -> str:
        """Wait until every rank has said hello; returns the library's name and version."""
        until = time.monotonic() + START_SECONDS
        listener.settimeout(0.5)
        met: dict[int, Connection] = {}
        version = ""
        while len(met) < world:
            if self._process.poll() is not None or time.monotonic() > until:
                raise self._error("its ranks did not start")
            try:
                rank = Connection(listener.accept()[0].detach())
            except TimeoutError:
                continue
            stack.callback(rank.close)
            hello = self._received(rank)
            assert isinstance(hello, Hello)
            met[hello.rank], version = rank, hello.version
        if sorted(met) != list(range(world)):
            raise self._error("its ranks do not know each other")
        self._ranks = [met[rank] for rank in range(world)]
        return f"{self._library.title} {version}"

    def _received(self, rank: Connection) -> object:
        if not rank.poll(ANSWER_SECONDS):
            raise self._error(f"no answer in {ANSWER_SECONDS:g} s")
        return rank.recv()

    def _require_right(self, command: object) -> None:
        if not all(self.all_answers(command)):
            raise self._error("a sum is wrong")

    def _error(self, what: str) -> BenchError:
        said = self._output.read_text(errors="replace").strip()
        return BenchError(f"{what} (side: {self._library.name}); its ranks printed:\n{said}")

    def _end_process(self) -> None:
        """Wait until all ranks have ended by themselves; if they do not, mpiexec is to end them."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(END_SECONDS)


@contextmanager
def started(names: Sequence[str], world: int) -> Iterator[dict[str, MpiRanks]]:
    """The ranks of these libraries, by name; they end with the block."""
    with ExitStack() as stack:
        peers = {}
        for name in names:
            peers[name] = MpiRanks(MPI_LIBRARIES[name], world)
            stack.callback(peers[name].close)
        yield peers


def installed(names: Sequence[str]) -> list[str]:
    """Those of the libraries that are installed; says of the others how to install them."""
    for name in names:
        if not MPI_LIBRARIES[name].is_installed:
            print(
                f"left out: {name} (install it with `{MPI_LIBRARIES[name].how_to_install}`)", file=sys.stderr
            )
    return [name for name in names if MPI_LIBRARIES[name].is_installed]


@dataclass(frozen=True)
class SideTimes:
    """Seconds per call of the slowest rank, and CPU seconds per call of all ranks together, one per round."""

    seconds: SecondsBySide
    cpu: SecondsBySide


def time_beside_mpi(
    pool: RankPool,
    peers: Mapping[str, MpiRanks],
    case: CollectiveCase,
    sides: Sequence[str],
    *,
    rounds: int,
    calls: int,
) -> SideTimes:
    """Time our sides on the pool's ranks and MPI's on theirs, in turns."""
    ours = sides_of(case.collective, sides)
    turns: dict[str, list[list[RankTurn]]] = {side: [] for side in (*ours, *peers)}

    def take_turn(side: str) -> None:
        taken = peers[side].turn(calls) if side in peers else pool.run(turn_on_rank, side, calls)
        turns[side].append(taken)

    pool.run(prepare_on_rank, case, ours)
    for peer in peers.values():
        peer.prepare(case)
    take_turns({side: partial(take_turn, side) for side in turns}, rounds=rounds, warmups=1)
    pool.run(finish_on_rank, case)
    for peer in peers.values():
        peer.check()
    counted = {side: taken[1:] for side, taken in turns.items()}
    return SideTimes(
        {side: [max(rank.seconds for rank in turn) for turn in taken] for side, taken in counted.items()},
        {side: [sum(rank.cpu for rank in turn) for turn in taken] for side, taken in counted.items()},
    )


@dataclass(frozen=True)
class KeptCalls:
    """What a rank of ours keeps from one turn to the next."""

    calls: dict[str, PreparedCall]
    digests: dict[str, bytes]
    stack: ExitStack


# On a rank of ours: the calls of the case that is being timed.
_kept: list[KeptCalls] = []


def prepare_on_rank(rank: int, case: CollectiveCase, sides: Sequence[str]) -> None:
    with ExitStack() as stack:
        calls = {side: prepare(side, case, stack) for side in sides}
        digests = check_results(rank, case, without_memcpy(calls))
        _kept.append(KeptCalls(calls, digests, stack.pop_all()))


def turn_on_rank(_: int, side: str, calls: int) -> RankTurn:
    dist.barrier()
    return timed(_kept[0].calls[side].call, calls)


def finish_on_rank(rank: int, case: CollectiveCase) -> None:
    kept = _kept.pop()
    with kept.stack:
        after = check_results(rank, case, without_memcpy(kept.calls))
        assert after == kept.digests, f"a result differs from the same one before ({case})"


def without_memcpy(calls: Mapping[str, PreparedCall]) -> dict[str, PreparedCall]:
    """The calls that have a result to check."""
    return {side: call for side, call in calls.items() if side != "memcpy"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Install MPI libraries for collectives.py --mpi.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(MPI_LIBRARIES)}")
    names = parser.parse_args().names or [*MPI_LIBRARIES]
    if unknown := {*names} - {*MPI_LIBRARIES}:
        parser.error(f"a name is one of {', '.join(MPI_LIBRARIES)} (given: {', '.join(sorted(unknown))})")
    for name in names:
        MPI_LIBRARIES[name].install()
        print(f"installed: {name}")


if __name__ == "__main__":
    main()
