"""What the launcher knows of the ranks' processes."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.tools.run.rank_processes import RankProcesses


class LateNews:
    """Tells that a process has ended only when it is asked to."""

    def __init__(self) -> None:
        self._news: list[Callable[[], None]] = []

    def call_when_ended(self, _pid: int, tell: Callable[[], None]) -> None:
        self._news.append(tell)

    def tell(self) -> None:
        for tell in self._news:
            tell()


def test_a_rank_that_was_killed_before_the_others_were_stopped_was_not_stopped(tmp_path: Path) -> None:
    news: Any = LateNews()
    processes = RankProcesses(news, lambda: tmp_path, owns_all_children=False)
    ranks = {rank: subprocess.Popen(["sleep", "60"], start_new_session=True) for rank in range(2)}
    processes.started(ranks)
    ranks[1].kill()
    ranks[1].wait()
    processes.asked_to_stop()
    processes.stop()
    ranks[0].wait()
    news.tell()
    found = {each.rank: (each.exit_code, each.was_stopped) for each in processes.failures()}
    assert found == {0: (-signal.SIGTERM, True), 1: (-signal.SIGKILL, False)}


def test_only_ranks_that_ended_before_they_were_asked_to_had_ended_before(tmp_path: Path) -> None:
    news: Any = LateNews()
    processes = RankProcesses(news, lambda: tmp_path, owns_all_children=False)
    is_up = tmp_path / "up"
    commands = ["exit 0", "exit 3", f"trap 'exit 0' TERM; touch {is_up}; while true; do sleep 0.1; done"]
    ranks = {
        rank: subprocess.Popen(["sh", "-c", command], start_new_session=True)
        for rank, command in enumerate(commands)
    }
    processes.started(ranks)
    ranks[0].wait()
    ranks[1].wait()
    while not is_up.exists():
        time.sleep(0.01)
    processes.asked_to_stop()
    processes.stop()
    assert ranks[2].wait() == 0
    news.tell()
    summary = processes.summary(is_one_host=True)
    assert summary is not None
    assert (summary.root_cause.rank, summary.ended_before) == (1, (0,))


def test_the_session_of_a_rank_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    news: Any = LateNews()
    processes = RankProcesses(news, lambda: tmp_path, owns_all_children=False)
    ranks = {rank: subprocess.Popen(["sleep", "60"], start_new_session=True) for rank in range(2)}
    processes.started(ranks)
    ranks[1].kill()
    ranks[1].wait()
    assert [(rank, each.id.pid) for rank, each in processes.running().items()] == [(0, ranks[0].pid)]
    assert {leader.pid for leader in processes._sessions} == {ranks[0].pid}
    processes.stop()
    ranks[0].wait()
    assert processes.running() == {}
    assert processes._sessions == set()
