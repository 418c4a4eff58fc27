"""Two hosts: a rank that does not come, or is killed, is named on the other host too."""

import logging
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.errors import PacelineError
from paceline.testing import RanksError, rank_answers, run_ranks
from paceline.testing.hosts import Hosts
from paceline.watch import watcher


class Log(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        with self._file.open("a") as file:
            file.write(f"{record.getMessage()}\n")


def late(rank: int, hosts: Hosts, notes: Path) -> None:
    watcher.LEAST_SECONDS = 1.0
    logging.getLogger("paceline").addHandler(Log(notes / str(rank)))
    with hosts.group(rank, world=4, host=rank // 2):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        for step in range(4):
            if step == 2:
                time.sleep(2.5)
            if step == 3 and rank == 1:
                until = time.monotonic() + 60
                while not all(_is_told(notes / str(other)) for other in (0, 2, 3)):
                    assert time.monotonic() < until
                    time.sleep(0.1)
            ddp(torch.ones(2, 4)).sum().backward()


def _is_told(note: Path) -> bool:
    return note.exists() and "rank 1 is missing: it sleeps or waits at" in note.read_text()


def test_a_late_rank_of_one_host_is_told_on_both_with_its_line(tmp_path: Path) -> None:
    with Hosts() as hosts:
        run_ranks(late, 4, args=(hosts, tmp_path), timeout=100.0, backend=None)
    for rank in (0, 2, 3):
        told = (tmp_path / str(rank)).read_text()
        assert re.search(r"rank 1 is missing: .*test_stalls_between_hosts\.py:\d+ in late", told)


def killed(rank: int, hosts: Hosts, notes: Path) -> None:
    with hosts.group(rank, world=4, host=rank // 2):
        ddp = DistributedDataParallel(nn.BatchNorm1d(4))
        for step in range(4):
            if step == 2:
                time.sleep(2.5)
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                ddp(torch.ones(2, 4)).sum().backward()
            except PacelineError as error:
                (notes / str(rank)).write_text(str(error))
                until = time.monotonic() + 30
                while len([*notes.iterdir()]) < 3 and time.monotonic() < until:
                    time.sleep(0.05)
                os._exit(0)


def test_a_killed_rank_of_one_host_is_named_on_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_answers, "GRACE_SECONDS", 40.0)
    with Hosts() as hosts, pytest.raises(RanksError):
        run_ranks(killed, 4, args=(hosts, tmp_path), timeout=90.0, backend=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "3"]
    for path in tmp_path.iterdir():
        said = path.read_text()
        assert "rank 1 is missing: it has ended" in said, said
