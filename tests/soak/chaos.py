"""Kills or stops a rank at a random moment, again and again, and checks what the other ranks do.

python tests/soak/chaos.py --rounds 50 --seed 1

Every survivor must raise in time and name the rank. Afterwards nothing of the round may be left: no process,
no file, no memory that somebody holds.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed, nn

from paceline import DistributedDataParallel
from paceline.comm.group import Group
from paceline.comm.shm.collectives import Barrier, Gather, OneShotReduce, as_bytes
from paceline.comm.shm.in_place import TwoShotAllReduce
from paceline.comm.shm.segment import Segment
from paceline.comm.shm.transport import local_ranks_of

# How long ranks wait for each other, once they have begun; until then, for as long as a busy machine needs.
TIMEOUT = 3.0
START = 60.0
# Within this many seconds after that, or after it was killed, the others must miss a rank.
LIMIT = 2.0
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Round:
    """What happens in one round."""

    world: int
    work: str
    way: str
    victim: int
    signal: signal.Signals
    after: float

    @property
    def limit(self) -> float:
        """The seconds after the signal within which every survivor must have raised."""
        return LIMIT + (TIMEOUT if self.signal is signal.SIGSTOP else 0.0)

    @classmethod
    def random(cls, chance: random.Random) -> "Round":
        """A round of random values."""
        world = chance.choice([2, 3, 4])
        return cls(
            world=world,
            work=chance.choice(list(WORK)),
            way=chance.choice(["nameless", "nameless", "named"]),
            victim=chance.randrange(world),
            signal=chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]),
            after=chance.random() * 0.2,
        )


def collectives(chance: random.Random) -> Iterator[None]:
    """Collectives in a channel, until one fails."""
    group = Group(distributed.group.WORLD)
    local_ranks = local_ranks_of(distributed.group.WORLD, group)
    assert local_ranks is not None
    channel = local_ranks.open_channel(group, nbytes=10 << 20, timeout=TIMEOUT)
    assert channel is not None
    block = channel.arena.empty(10 << 18, torch.float32)
    assert block is not None
    while True:
        block.zero_()
        launched = [channel.launch(TwoShotAllReduce(channel, block, torch.Tensor.add_, "sum"))]
        for _ in range(chance.randrange(20)):
            tensor = torch.ones(chance.choice([1, 1000, 1 << 20]))
            launched.append(channel.launch(OneShotReduce(channel, tensor, torch.Tensor.add_, "sum")))
        rows = torch.empty(channel.size, 1000)
        launched.append(channel.launch(Gather(channel, as_bytes(rows[0].clone()), [*map(as_bytes, rows)])))
        for each in launched:
            channel.wait(each)
        channel.run(Barrier(channel))
        yield


def training(_: random.Random) -> Iterator[None]:
    """Steps of two wrappers, until one fails."""
    nets = [nn.Sequential(*[nn.Linear(300, 300) for _ in range(10)]) for _ in range(2)]
    wrappers = [DistributedDataParallel(net, bucket_cap_mb=1) for net in nets]
    for wrapper in wrappers:
        assert wrapper._group.shared is not None
        wrapper._group.shared._channel._timeout = TIMEOUT
    while True:
        for wrapper in wrappers:
            wrapper.zero_grad()
            wrapper(torch.ones(8, 300)).sum().backward()
        yield


WORK = {"collectives": collectives, "training": training}


def be_rank(rank: int, plan: Round, seed: int, store: str, parent: Connection) -> None:
    """Work until something fails; tell the parent when work begins, what failed, and when."""
    torch.set_num_threads(1)
    if plan.way == "named":
        Segment.nameless = refuse  # type: ignore[method-assign]
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, plan.world),
        rank=rank,
        world_size=plan.world,
        timeout=timedelta(seconds=START),
    )
    work = WORK[plan.work](random.Random(seed))
    next(work)
    parent.send("ready")
    try:
        for _ in work:
            pass
    except Exception as error:  # what it is, the parent judges
        parent.send((time.monotonic(), f"{type(error).__name__}: {error}"))
    parent.recv()  # until every rank has raised: the end of this one must not be taken for the cause


def refuse() -> NoReturn:
    raise PermissionError("no memfd in this round")


class Ranks:
    """The processes of one round, all of which are gone in the end."""

    def __init__(self, plan: Round, seed: int, directory: str) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "paceline", __name__])
        self.pipes, self.processes = [], []
        for rank in range(plan.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=be_rank, args=(rank, plan, seed, f"{directory}/store", theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def receive(self, ranks: list[int], seconds: float) -> dict[int, Any]:
        """The next message of each of some ranks that comes within some time."""
        pipes = {self.pipes[rank]: rank for rank in ranks}
        until = time.monotonic() + seconds
        received = {}
        while pipes and (ready := wait(list(pipes), max(0.0, until - time.monotonic()))):
            for pipe in ready:
                rank = pipes.pop(pipe)  # type: ignore[call-overload]
                with contextlib.suppress(EOFError):
                    received[rank] = pipe.recv()  # type: ignore[union-attr]
        return received

    def end(self, victim: int) -> list[str]:
        """Let the survivors end; returns what is wrong with that."""
        for rank, pipe in enumerate(self.pipes):
            if rank != victim:
                with contextlib.suppress(BrokenPipeError):  # it has ended, and its exit code says how
                    pipe.send("end")
        self.processes[victim].kill()
        wrong = []
        for rank, process in enumerate(self.processes):
            process.join(10.0)
            if process.exitcode is None:
                wrong.append(f"rank {rank} does not end")
                process.kill()
                process.join()
            elif rank != victim and process.exitcode:
                wrong.append(f"rank {rank} ended with {process.exitcode}")
        for pipe in self.pipes:
            pipe.close()
        return wrong


def play(plan: Round, seed: int) -> tuple[float, list[str]]:
    """One round: the longest that a survivor took, in seconds, and what was wrong."""
    held_before = held()
    survivors = [rank for rank in range(plan.world) if rank != plan.victim]
    with tempfile.TemporaryDirectory() as directory:
        ranks = Ranks(plan, seed, directory)
        pids = [process.pid for process in ranks.processes]
        wrong, longest = [], 0.0
        if len(ranks.receive(list(range(plan.world)), 60.0)) < plan.world:
            wrong.append("not every rank began")
        else:
            time.sleep(plan.after)
            start = time.monotonic()
            os.kill(pids[plan.victim], plan.signal)
            received = ranks.receive(survivors, plan.limit + 5.0)
            for rank in survivors:
                moment, text = received.get(rank, (float("inf"), "nothing"))
                longest = max(longest, moment - start)
                wrong += judge(plan, rank, moment - start, text)
        wrong += ranks.end(plan.victim)
    return longest, wrong + left_behind(pids, held_before)


def judge(plan: Round, rank: int, seconds: float, text: str) -> list[str]:
    """What is wrong with how a survivor ended."""
    wrong = []
    if seconds > plan.limit:
        wrong.append(f"rank {rank} took {seconds:.1f} s ({text})")
    if named(text) != {plan.victim}:
        wrong.append(f"rank {rank} did not name rank {plan.victim} alone ({text})")
    return wrong


def named(text: str) -> set[int]:
    """The ranks that an error says are missing."""
    found = re.findall(r"rank (\d+) is missing|missing ranks: \[([\d, ]+)\]", text)
    return {int(rank) for alone, listed in found for rank in (alone or listed).split(",")}


def left_behind(pids: list[int], held_before: set[tuple[int, int]]) -> list[str]:
    """What is left of a round."""
    wrong = [f"process {pid} is left" for pid in pids if Path(f"/proc/{pid}").exists()]
    wrong += [f"{path} is left" for path in SHM.glob("paceline-*") if path.owner() == Path.home().owner()]
    return wrong + [f"process {pid} holds a segment" for pid, _ in held() - held_before]


def held() -> set[tuple[int, int]]:
    """Which of our processes have which segments open."""
    found = set()
    for pid in family():
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                if "paceline" in (target := str(file.readlink())) and target.endswith("(deleted)"):
                    found.add((pid, file.stat().st_ino))
    return found


def family() -> set[int]:
    """This process and all that it has started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parts[2])] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    failures = 0
    for number in range(options.rounds):
        plan = Round.random(chance)
        longest, wrong = play(plan, number)
        failures += bool(wrong)
        what = f"{plan.work} on {plan.world} ranks, {plan.way}, {plan.signal.name} to rank {plan.victim}"
        print(f"{number}: {what}: {longest:.2f} s {wrong or 'as expected'}", flush=True)
    print(f"{options.rounds} rounds, {failures} failures")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
