"""A signal handler that raises while a rank waits: every rank loses the step, or none does."""

import random
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import distributed, nn
from wrappers import be_impatient

from paceline import DistributedDataParallel, PeerError
from paceline.testing import RankPool

STEPS = 12
# In these functions a rank waits for others, in shared memory and on a process group.
WAITS = ("libc.py sleep", "pending.py _wait_looking_around")


class PlannedError(Exception):
    pass


class PlannedRuntimeError(RuntimeError):
    pass


class PlannedBaseError(BaseException):
    pass


KINDS = (KeyboardInterrupt, PlannedError, PlannedRuntimeError, PlannedBaseError)


def place_of(thread: int) -> str:
    code = sys._current_frames()[thread].f_code
    return f"{code.co_filename.rpartition('/')[2]} {code.co_name}"


def interrupt_in_wait(thread: int, after: float) -> threading.Thread:
    """Send a signal to a thread once it waits for other ranks, some time later."""

    def watch() -> None:
        until = time.monotonic() + 0.5
        while time.monotonic() < until and place_of(thread) not in WAITS:
            time.sleep(0.0005)
        time.sleep(after)
        if place_of(thread) in WAITS:
            signal.pthread_kill(thread, signal.SIGALRM)

    watcher = threading.Thread(target=watch)
    watcher.start()
    return watcher


def interrupted(rank: int, kind: type[BaseException], transport: Any) -> list[str]:
    be_impatient()

    def raise_it(*_: object) -> None:
        raise kind("by a signal")

    ddp = DistributedDataParallel(nn.Linear(64, 64).double(), transport=transport)
    chance = random.Random(7)
    before = signal.signal(signal.SIGALRM, raise_it)
    outcomes = []
    for step in range(STEPS):
        ddp.zero_grad()
        after, delay = chance.uniform(0, 0.03), chance.choice([0.01, 0.02, 0.04])
        if step % 3 == 2:  # in these it certainly waits
            after, delay = 0.0, 0.3
        loss = ddp(torch.ones(1, 64, dtype=torch.float64)).sum()
        watcher = interrupt_in_wait(threading.get_ident(), after) if rank == 1 and step > 1 else None
        raised = False
        try:
            if rank == 0:
                time.sleep(delay)
            loss.backward()
            if watcher is not None:
                watcher.join()
        except (kind, PeerError):
            raised = True
        if watcher is not None:
            watcher.join()
        lost = all(parameter.grad is None for parameter in ddp.parameters())
        for parameter in ddp.parameters():
            assert lost or (parameter.grad is not None and parameter.grad.eq(1).all()), "wrong gradients"
        outcomes.append("lost" if lost else "interrupted" if raised else "fine")
    signal.signal(signal.SIGALRM, before)
    distributed.barrier()
    return outcomes


@pytest.mark.parametrize("transport", ["auto", "c10d"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_interrupted_is_lost_on_every_rank_or_on_none(
    ranks: RankPool, kind: type[BaseException], transport: str
) -> None:
    everyone = ranks.run(interrupted, kind, transport)
    for step in zip(*everyone, strict=True):
        assert len({outcome == "lost" for outcome in step}) == 1, everyone
    assert any(outcome != "fine" for outcome in everyone[1])
