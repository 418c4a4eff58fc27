"""How facts are gathered: under deadlines, and whatever the other side does."""

import os
import time
from pathlib import Path

import pytest
from torch import distributed

from paceline.comm.group import Group, default_process_group
from paceline.testing import RankPool
from paceline.tools.doctor import clocks, cores, network, reach, script
from paceline.tools.doctor.asked import Target
from paceline.tools.doctor.board import Board
from paceline.tools.doctor.finding import Severity
from paceline.tools.doctor.probe import Outcome, attempt


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_call_that_hangs_or_dies_or_raises_does_no_harm() -> None:
    before = children()
    assert attempt(lambda: [1, "a"], seconds=5.0) == Outcome([1, "a"])
    assert attempt(lambda: {}["key"], seconds=5.0) == Outcome(problem="'key'")
    assert attempt(lambda: os._exit(3), seconds=5.0) == Outcome(
        problem="the process that tried it was killed"
    )
    assert attempt(lambda: time.sleep(60), seconds=0.1) == Outcome(problem="no answer within 0.1 s")
    assert children() == before


def test_a_rank_that_says_nothing_is_not_waited_for_for_ever() -> None:
    store = distributed.HashStore()
    Board(store, rank=2, world=3, seconds=0.0).share("facts", {"a": 1})
    assert Board(store, rank=0, world=3, seconds=0.2).share("facts", "own") == ["own", None, {"a": 1}]


def test_a_connection_counts_if_the_right_one_answers() -> None:
    with reach.listening("127.0.0.1") as place:
        other = {**place, "token": "f" * 16}
        assert reach.try_all([place, other, None]) == [None, "somebody else answered", None]
    assert reach.try_all([place]) == ["Connection refused"]


def test_the_loopback_interface_is_there() -> None:
    [lo] = [each for each in network.interfaces() if each.name == "lo"]
    assert lo.addresses[0] == "127.0.0.1"
    assert lo.is_up
    assert lo.is_loopback


@pytest.mark.parametrize(
    ("membership", "written", "quota"),
    [
        ("0::/job/rank", {"job/cpu.max": "150000 100000", "job/rank/cpu.max": "max 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        (
            "2:cpu,cpuacct:/job",
            {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"},
            None,
        ),
        (
            "2:cpu,cpuacct:/job\n0::/",
            {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"},
            2.0,
        ),
    ],
    ids=["of a parent", "none", "none of the old kind", "old kind"],
)
def test_the_quota_of_control_groups(
    membership: str,
    written: dict[str, str],
    quota: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in {"membership": membership, **written}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "membership")
    assert cores.gather().quota == quota


@pytest.mark.parametrize(
    ("target", "kind", "problem"),
    [
        ("json.tool", Target.MODULE, None),
        ("json.nosuch", Target.MODULE, "there is no such module"),
        ("nosuch.json", Target.MODULE, "a package on the way to it cannot be imported"),
        ("sh", Target.PROGRAM, None),
        ("./nosuch", Target.PROGRAM, "there is no such program"),
        (".", Target.SCRIPT, "there is no such file"),
    ],
)
def test_targets(
    target: str, kind: Target, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = script.gather(target, kind).problem
    assert found is None if problem is None else found is not None and found.startswith(problem)


def look(rank: int) -> list[tuple[float, float]]:
    return clocks.look(Group(default_process_group()), clock=lambda: time.time() + 5 * rank)


def test_a_rank_whose_clock_is_ahead_is_found(pool: RankPool) -> None:
    looks = pool.run(look)
    bounds = clocks.bounds(looks[1], looks[0])
    assert bounds.least <= 5 <= bounds.most
    [finding] = clocks.judge(looks, ["a", "b"])
    assert finding.severity is Severity.FAULT
    assert "b is ahead of a by" in finding.found
