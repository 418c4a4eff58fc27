"""Ranks that live and do not come: told while others wait, with rank, line and state, and when it is over."""

import ctypes
import itertools
import logging
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO

import pytest
import torch
from torch import distributed, nn

from paceline import DistributedDataParallel
from paceline.errors import StepError
from paceline.testing import run_ranks
from paceline.watch import watcher
from paceline.watch.rank_page import Moment


class Log(logging.Handler):
    """Keeps what is told, and makes a file as soon as that has some words, so that the stall may end."""

    def __init__(self, words: str, told: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._words = re.compile(words)
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if self._words.search(self.texts[-1]):
            self._told.touch()


def sleep(told: Path) -> None:
    while not told.exists():
        time.sleep(0.1)


def loop(told: Path) -> None:
    while not told.exists():
        pass


def send_when_told(told: Path, signum: int) -> None:
    """Have a child send this process a signal: it cannot help itself."""
    pid = os.getpid()
    if os.fork() == 0:
        until = time.monotonic() + 60
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(pid, signum)
        os._exit(0)


def stop(told: Path) -> None:
    send_when_told(told, signal.SIGCONT)
    os.kill(os.getpid(), signal.SIGSTOP)


def pause_in_c(told: Path) -> None:
    signal.signal(signal.SIGUSR2, lambda *_: None)
    send_when_told(told, signal.SIGUSR2)
    ctypes.PyDLL(None).pause()  # holds Python's lock


def lock(told: Path) -> None:
    never = threading.Lock()
    never.acquire()
    threading.Thread(target=lambda: (sleep(told), never.release())).start()
    never.acquire()


class SlowFile:
    def __init__(self, file: IO[bytes], told: Path) -> None:
        self._file = file
        self._told = told

    def write(self, data: bytes) -> int:
        sleep(self._told)
        return self._file.write(data)

    def flush(self) -> None:
        pass


def save(told: Path) -> None:
    with tempfile.TemporaryFile() as file:
        torch.save(torch.ones(3), SlowFile(file, told))  # type: ignore[arg-type]


def train(rank: int, stall: Callable[[Path], None], words: str, told: Path, transport: str) -> list[str]:
    watcher.LEAST_SECONDS, watcher.TICK_SECONDS = 1.0, 0.2
    log = Log(words, told)
    logging.getLogger("paceline").addHandler(log)
    ddp = DistributedDataParallel(nn.Linear(4, 4), transport=transport)  # type: ignore[arg-type]
    for step in range(6):
        if step == 4 and rank == 1:
            stall(told)
        ddp(torch.ones(2, 4)).sum().backward()
    until = time.monotonic() + 20
    while rank == 0 and "has come" not in "".join(log.texts) and time.monotonic() < until:
        time.sleep(0.1)
    distributed.barrier()
    return log.texts


HERE = r"at \S*test_stalls\.py:\d+ in "
STALLS = [
    (sleep, f"it sleeps or waits {HERE}sleep "),
    (loop, f"it is busy on a CPU {HERE}loop "),
    (stop, r"it is stopped by a signal, last seen \d+ s ago at "),
    (pause_in_c, f"it is in C code that holds Python's lock {HERE}pause_in_c "),
    (lock, f"it sleeps or waits {HERE}lock "),
    (save, f"it sleeps or waits {HERE}sleep .it reads or writes a checkpoint"),
]


@pytest.mark.parametrize("transport", ["auto", "c10d"])
@pytest.mark.parametrize(("stall", "words"), STALLS, ids=[stall.__name__ for stall, _ in STALLS])
def test_a_rank_that_does_not_come_is_told_with_its_line_and_state(
    stall: Callable[[Path], None], words: str, transport: str, tmp_path: Path
) -> None:
    args = (stall, words, tmp_path / "told", transport)
    waiting, stalled = run_ranks(train, args=args, timeout=90.0)
    *told, last = waiting
    assert re.search(words, told[-1])
    for text in told:
        start = (
            r"paceline: rank 0 has waited \d+ s for bucket 0 \(bias, weight\) of step 4; rank 1 is missing: "
        )
        assert re.match(start, text)
    end = r"paceline: rank 0 waited \d+ s for bucket 0 of step 4; rank 1 has come"
    assert re.fullmatch(end, last)
    assert stalled == []


def test_the_message_is_repeated_at_growing_intervals(tmp_path: Path) -> None:
    told = tmp_path / "told"
    waiting, _ = run_ranks(
        train, args=(sleep, r"rank 0 has waited ([2-9]|\d\d+) s", told, "auto"), timeout=90.0
    )
    seconds = [int(re.findall(r"waited (\d+) s", text)[0]) for text in waiting[:-1]]
    assert len(seconds) >= 2
    assert all(later >= 2 * earlier - 1 for earlier, later in itertools.pairwise(seconds))


def wait_for_buffers(rank: int, told: Path) -> list[str]:
    watcher.LEAST_SECONDS, watcher.TICK_SECONDS = 1.0, 0.2
    log = Log("rank 0 is missing", told)
    logging.getLogger("paceline").addHandler(log)
    ddp = DistributedDataParallel(nn.BatchNorm1d(4))
    for step in range(3):
        if step == 2 and rank == 0:
            sleep(told)
        ddp(torch.ones(2, 4)).sum().backward()
    distributed.barrier()
    return log.texts


def test_a_wait_for_module_buffers_is_told(tmp_path: Path) -> None:
    _, waiting = run_ranks(wait_for_buffers, args=(tmp_path / "told",), timeout=60.0)
    assert re.match(
        r"paceline: rank 1 has waited \d+ s for the module buffers of step 2; rank 0 is missing: it sleeps",
        waiting[0],
    )


def healthy(rank: int, told: Path) -> list[str]:
    log = Log("", told)
    logging.getLogger("paceline").addHandler(log)
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    time.sleep(3.0 * rank)  # a slow first step
    for step in range(200):
        if step % 100 == 50 and rank == 0:
            time.sleep(2.0)  # an evaluation, or a checkpoint
        ddp(torch.ones(2, 4)).sum().backward()
    distributed.barrier()
    return log.texts


def test_healthy_steps_are_not_told(tmp_path: Path) -> None:
    assert run_ranks(healthy, args=(tmp_path / "told",), timeout=60.0) == [[], []]


def fork_and_train(_: int) -> tuple[list[str], int]:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    ddp(torch.ones(2, 4)).sum().backward()
    page = watcher._process.page
    child = os.fork()
    if child == 0:
        names = [thread.name for thread in threading.enumerate()]
        os._exit(0 if names == ["MainThread"] and watcher._process.page is None else 1)
    _, status = os.waitpid(child, 0)
    assert watcher._process.page is page
    return [thread.name for thread in threading.enumerate()], status


def test_a_forked_child_has_neither_page_nor_thread() -> None:
    for names, status in run_ranks(fork_and_train, timeout=60.0):
        assert "paceline-watcher" in names
        assert status == 0


def lose_a_step_and_go_on(rank: int) -> tuple[Moment, Moment]:
    group = distributed.new_group(timeout=timedelta(seconds=2))
    ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    ddp(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        time.sleep(4.5)
    with pytest.raises(StepError):
        ddp(torch.ones(2, 4)).sum().backward()
    page = watcher._process.page
    assert page is not None
    failed = page.told.moment
    distributed.barrier()
    until = time.monotonic() + 20
    while page.told.moment is not Moment.NOTHING and time.monotonic() < until:
        ddp(torch.ones(2, 4))
    return failed, page.told.moment


def test_a_rank_that_goes_on_after_a_lost_step_may_be_named_again() -> None:
    [waiting, _] = run_ranks(lose_a_step_and_go_on, timeout=60.0)
    assert waiting == (Moment.FAILED, Moment.NOTHING)
