"""Runs a training script on real ranks, plants a fault in it, and notes what each rank says and when."""

import contextlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fault_judge import Frame, Line, Observed, RankEnd, Where
from fault_list import FAULTS, PAUSE_SECONDS, Fault

from paceline.comm.shm.local_ranks import HOST_VARIABLE
from paceline.testing.hosts import Hosts, enter

SCRIPT = Path(__file__).with_name("fault_script.py")
START_SECONDS = 120.0
GROUP_TIMEOUT_SECONDS = 20.0
DEADLINE_SECONDS = 30.0
FIRST_STEP, LAST_STEP = 15, 30
LINK = "wire"
PORT = 29500


class NotReachedError(RuntimeError):
    """Ranks that ended, or hung, before the fault struck."""


@dataclass(frozen=True)
class Cell:
    """One run: a fault, with a wrapper, on a transport, with a number of ranks."""

    fault: str
    wrapper: str
    transport: str
    world: int

    @property
    def culprit(self) -> int:
        """The rank that is struck: any, but always the same for the same fault and number of ranks."""
        wanted = self.planted.culprit if self.planted is not None else None
        if self.planted is not None and self.planted.hosts_only:
            return self.world - 1
        if isinstance(wanted, int):
            return wanted
        return self._chance().randrange(1 if wanted == "later" else 0, self.world)

    @property
    def step(self) -> int:
        """The step in which it is struck."""
        return self._chance().randint(FIRST_STEP, LAST_STEP)

    @property
    def planted(self) -> Fault | None:
        """The fault; None if all is to go well."""
        return FAULTS.get(self.fault)

    def host(self, rank: int) -> int:
        """The host of a rank: the first has one rank more if the number is odd."""
        return int(rank >= (self.world + 1) // 2) if self.transport == "hosts" else 0

    def _chance(self) -> random.Random:
        return random.Random(f"{self.fault} {self.world}")  # noqa: S311  # no secret


@dataclass
class RankOutput:
    """What one rank has said so far."""

    rank: int
    process: subprocess.Popen[bytes]
    partial: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Run:
    """The processes of a run, and what they have said."""

    cell: Cell
    hosts: Hosts | None
    ranks: list[RankOutput]
    lines: list[Line] = field(default_factory=list)
    done: dict[int, tuple[float, str]] = field(default_factory=dict)
    began: float | None = None
    frames: list[Frame] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)

    def follow(self) -> None:
        """Read what ranks say until all have ended, or until the deadline."""
        start = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for each in self.ranks:
                for pipe in (each.process.stdout, each.process.stderr):
                    assert pipe is not None
                    selector.register(pipe, selectors.EVENT_READ, each)
            while selector.get_map() and not self._is_over(start):
                for key, _ in selector.select(0.05):
                    if not self._read(key.fd, key.data):
                        selector.unregister(key.fileobj)
                self._resume_in_time()
        while any(each.process.poll() is None for each in self.ranks) and not self._is_over(start):
            time.sleep(0.02)  # a process closes its pipes a moment before it has ended

    def observed(self) -> Observed:
        """What was seen; call it after all have ended or were killed."""
        fault = self.cell.planted
        culprits = self._culprits()
        if fault is not None and fault.outside == "cut":
            tells_of = {rank: frozenset(self._on_host(1 - self.cell.host(rank))) for rank in self._all()}
        else:
            tells_of = {rank: culprits for rank in self._all() if rank not in culprits}
        return Observed(
            began=0.0 if self.began is None else self.began,
            culprits=tells_of,
            held=culprits if fault is not None and fault.held else frozenset(),
            where=Where.NOTHING if fault is None else fault.where,
            frames=self.frames,
            tensors=self.tensors,
            lines=self.lines,
            ends=[self._end(each) for each in self.ranks],
        )

    def _is_over(self, start: float) -> bool:
        now = time.monotonic()
        if self.began is not None:
            return now > self.began + DEADLINE_SECONDS or self._is_only_culprit_left()
        return now > start + START_SECONDS

    def _is_only_culprit_left(self) -> bool:
        held = self._culprits() if self.cell.planted is not None and self.cell.planted.held else frozenset()
        return bool(held) and all(
            each.process.poll() is not None for each in self.ranks if each.rank not in held
        )

    def _read(self, fd: int, rank: RankOutput) -> bool:
        """Read what is there; False at the end."""
        data = os.read(fd, 1 << 16)
        # The last line may lack its end.
        *whole, rank.partial[fd] = (rank.partial.get(fd, b"") + (data or b"\n")).split(b"\n")
        now = time.monotonic()
        for text in (each.decode(errors="replace") for each in whole):
            if text.startswith('{"event"'):
                self._hear(rank.rank, json.loads(text))
            elif text:
                self.lines.append(Line(rank.rank, now, text))
        return bool(data)

    def _hear(self, rank: int, event: Mapping[str, Any]) -> None:
        if event["event"] == "done":
            self.done[rank] = (event["seconds"], event["digest"])
        else:
            self.began = event["seconds"]
            self.frames = [Frame(**each) for each in event["frames"]]
            self.tensors = event["tensors"]
            self._act_from_outside()

    def _act_from_outside(self) -> None:
        fault = self.cell.planted
        if fault is not None and fault.outside == "cut":
            assert self.hosts is not None
            command = ["ip", "-n", self.hosts.names[1], "link", "set", LINK, "down"]
            subprocess.run(command, check=True, timeout=10)  # noqa: S603  # ours
            self.began = time.monotonic()
        if fault is not None and fault.outside == "stop":
            self.began = time.monotonic()
            for rank in self._culprits():
                self._signal(rank, signal.SIGSTOP)

    def _resume_in_time(self) -> None:
        fault = self.cell.planted
        if fault is None or fault.outside != "resume" or self.began is None:
            return
        if time.monotonic() > self.began + PAUSE_SECONDS:
            self._signal(self.cell.culprit, signal.SIGCONT)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        if self.ranks[rank].process.poll() is None:
            os.kill(self.ranks[rank].process.pid, number)

    def _culprits(self) -> frozenset[int]:
        fault = self.cell.planted
        if fault is not None and fault.outside == "stop":
            return frozenset(self._on_host(1))
        return frozenset() if fault is None else frozenset([self.cell.culprit])

    def _on_host(self, host: int) -> list[int]:
        return [rank for rank in self._all() if self.cell.host(rank) == host]

    def _all(self) -> Sequence[int]:
        return range(self.cell.world)

    def _end(self, rank: RankOutput) -> RankEnd:
        code = rank.process.returncode
        done, digest = self.done.get(rank.rank, (None, None))
        return RankEnd(code if rank.rank not in self.killed else None, done, digest)

    def end(self) -> None:
        """Kill the processes that are left, by their ids."""
        for each in self.ranks:
            if each.process.poll() is None:
                self.killed.add(each.rank)
                each.process.kill()
            each.process.wait()
            for pipe in (each.process.stdout, each.process.stderr):
                assert pipe is not None
                pipe.close()


def run_cell(cell: Cell) -> Run:
    """Run one cell, to its end."""
    with _hosts(cell) as hosts, _store(hosts) as port:
        run = Run(cell, hosts, [])
        try:
            for rank in range(cell.world):
                run.ranks.append(RankOutput(rank, _start(cell, rank, hosts, port)))
            run.follow()
        finally:
            run.end()
    if run.began is None and cell.planted is not None:
        said = "\n".join(f"rank {line.rank}: {line.text}" for line in run.lines)
        codes = [each.process.returncode for each in run.ranks]
        raise NotReachedError(f"the fault was not reached ({cell}, exit codes: {codes}):\n{said}")
    return run


def _start(cell: Cell, rank: int, hosts: Hosts | None, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SCRIPT), "--fault", cell.fault, "--step", str(cell.step)]
    command += ["--culprit", str(cell.culprit), "--wrapper", cell.wrapper, "--transport", cell.transport]
    command += ["--timeout", str(GROUP_TIMEOUT_SECONDS)]
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(cell.world),
        "MASTER_ADDR": "127.0.0.1" if hosts is None else hosts.addresses[0],
        "MASTER_PORT": str(port),
        # As under torchrun: the store is not on a rank.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo" if hosts is None else LINK,
        "PYTHONUNBUFFERED": "1",
    }
    if hosts is not None:
        name = hosts.names[cell.host(rank)]
        command = ["ip", "netns", "exec", name, *command]
        variables[HOST_VARIABLE] = name
    if cell.wrapper != "paceline":
        variables["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return subprocess.Popen(  # noqa: S603  # ours
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _hosts(cell: Cell) -> contextlib.AbstractContextManager[Hosts | None]:
    return Hosts() if cell.transport == "hosts" else contextlib.nullcontext()


@contextlib.contextmanager
def _store(hosts: Hosts | None) -> Iterator[int]:
    """A store for the ranks, on the first host; yields its port."""
    made: list[Any] = []

    def make() -> None:
        if hosts is not None:
            enter(hosts.names[0])  # this thread alone
        port = 0 if hosts is None else PORT
        made.append(
            dist.TCPStore(  # type: ignore[attr-defined]  # in no __all__ of torch
                "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
            )
        )

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    [store] = made
    yield store.port
