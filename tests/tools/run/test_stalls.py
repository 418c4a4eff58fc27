"""A stall in the launcher's live line: read from the ranks' pages, with the ranks' own words."""

import io
import re
import time
from pathlib import Path

import pytest
from running import paceline, script

from paceline.tools.run.console import Destination, StatusLine
from paceline.tools.run.stalls import Stall, find_stall
from paceline.watch.rank_page import Moment, RankPage, Told

SECOND = 10**9


def stalled_page(folder: Path, rank: int, *, seconds: int, beat: int = 0) -> RankPage:
    page, now = RankPage(rank, folder), time.monotonic_ns()
    page.beat(now - beat * SECOND, usual_step=0, thread=0)
    page.tell(Told(Moment.STALLED, 3, now - seconds * SECOND, f"rank 3 is missing, says {rank}"))
    return page


def test_the_longest_stall_is_found(tmp_path: Path) -> None:
    stalled_page(tmp_path, 0, seconds=7)
    stalled_page(tmp_path, 1, seconds=9)
    found = find_stall(tmp_path)
    assert found is not None
    assert (found.rank, found.text) == (3, "rank 3 is missing, says 1")
    assert 9 <= found.seconds < 30


def test_what_a_dead_rank_said_and_what_is_over_is_no_stall(tmp_path: Path) -> None:
    stalled_page(tmp_path, 0, seconds=60, beat=30)
    stalled_page(tmp_path, 1, seconds=9).tell(Told())
    assert find_stall(tmp_path) is None
    assert find_stall(tmp_path / "nowhere") is None


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("screen", [True, False])
def test_a_stall_is_in_the_status_line_or_told_once(monkeypatch: pytest.MonkeyPatch, screen: bool) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    missing = "rank 1 is missing"
    stalls = iter([Stall(1, 6.0, missing), Stall(1, 17.0, missing), None, Stall(1, 6.0, "again")])
    stream = Screen() if screen else io.StringIO()
    status = StatusLine(Destination(stream), lambda: None, lambda: 80, lambda: next(stalls))
    told = []
    for now in (0.0, 20.0, 31.0, 42.0, 100.0)[int(screen) :]:
        monkeypatch.setattr("paceline.tools.run.console.time.monotonic", lambda now=now: now + 1)
        told.append(status.due())
    if screen:
        assert told[:2] == [f"stalled for {seconds} s · rank 1 is missing" for seconds in (6, 17)]
    else:
        assert told == [
            None,
            "paceline: stalled for 6 s: rank 1 is missing",
            None,
            None,
            "paceline: stalled for 6 s: again",
        ]


SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from paceline import DistributedDataParallel
from paceline.tools.run.stalls import Stall, find_stall
from paceline.watch import watcher

watcher.LEAST_SECONDS = 1.0
torch.distributed.init_process_group("gloo")
ddp = DistributedDataParallel(nn.Linear(4, 4))
until = time.monotonic() + 60
for step in range(3):
    if step == 2 and int(os.environ["RANK"]) == 1:
        while find_stall(Path(os.environ["PACELINE_RECORD"])) is None and time.monotonic() < until:
            time.sleep(0.1)
    ddp(torch.ones(2, 4)).sum().backward()
print(find_stall(Path(os.environ["PACELINE_RECORD"])) or "no stall is left")
torch.distributed.destroy_process_group()
"""


def test_ranks_and_launcher_use_the_same_pages(tmp_path: Path) -> None:
    ran = paceline(
        "run", "-n", "2", "--record", "acts", script(tmp_path, SCRIPT), folder=tmp_path, timeout=110.0
    )
    assert ran.code == 0, ran.stderr
    assert "rank 1 is missing: it sleeps or waits at" in ran.stderr
    assert re.search(r"script\.py:1[789] in <module>", ran.stderr)
    assert {path.name for path in (tmp_path / "acts").glob("*.status")} == {"rank0.status", "rank1.status"}
