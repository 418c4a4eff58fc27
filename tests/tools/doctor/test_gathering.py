"""Facts are gathered within deadlines, whatever other processes do."""

import os
import time
from pathlib import Path

import pytest
from torch import distributed

from paceline.comm.group import Group, default_process_group
from paceline.testing import RankPool
from paceline.tools.doctor import host_resources
from paceline.tools.doctor.connections import connect_to_all, listening
from paceline.tools.doctor.findings import Severity
from paceline.tools.doctor.host_checks import gather_script
from paceline.tools.doctor.host_network import ForkResult, call_in_fork, list_interfaces
from paceline.tools.doctor.rank_measurements import judge_clocks, offset_bounds, read_clocks
from paceline.tools.doctor.rank_program import StoreGather
from paceline.tools.doctor.requested_run import TargetKind


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_call_that_hangs_or_dies_or_raises_does_no_harm() -> None:
    before = children()
    assert call_in_fork(lambda: [1, "a"], seconds=5.0) == ForkResult([1, "a"])
    assert call_in_fork(lambda: {}["key"], seconds=5.0) == ForkResult(problem="'key'")
    assert call_in_fork(lambda: os._exit(3), seconds=5.0) == ForkResult(
        problem="the process that tried it was killed"
    )
    assert call_in_fork(lambda: time.sleep(60), seconds=0.1) == ForkResult(problem="no answer within 0.1 s")
    assert children() == before


def test_a_rank_that_does_not_answer_is_waited_for_until_the_deadline() -> None:
    store = distributed.HashStore()
    StoreGather(store, rank=2, world=3, seconds=0.0).all_gather("facts", {"a": 1})
    assert StoreGather(store, rank=0, world=3, seconds=0.2).all_gather("facts", "own") == [
        "own",
        None,
        {"a": 1},
    ]


def test_a_connection_counts_if_the_right_rank_answers() -> None:
    with listening("127.0.0.1") as listener:
        other = {**listener, "token": "f" * 16}
        assert connect_to_all([listener, other, None]) == [None, "another program answered", None]
    assert connect_to_all([listener]) == ["Connection refused"]


def test_the_loopback_interface_is_there() -> None:
    [lo] = [each for each in list_interfaces() if each.name == "lo"]
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
    ids=["of a parent", "no limit", "no limit, version 1", "version 1"],
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
    monkeypatch.setattr(host_resources, "CGROUPS", tmp_path)
    monkeypatch.setattr(host_resources, "OWN_CGROUPS", tmp_path / "membership")
    assert host_resources.gather_cores().quota == quota


@pytest.mark.parametrize(
    ("target", "kind", "problem"),
    [
        ("json.tool", TargetKind.MODULE, None),
        ("json.nosuch", TargetKind.MODULE, "there is no such module"),
        ("nosuch.json", TargetKind.MODULE, "a package that contains it cannot be imported"),
        ("sh", TargetKind.PROGRAM, None),
        ("./nosuch", TargetKind.PROGRAM, "there is no such program"),
        (".", TargetKind.SCRIPT, "there is no such file"),
    ],
)
def test_targets(
    target: str, kind: TargetKind, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = gather_script(target, kind)
    assert found is None if problem is None else found is not None and found.reason.startswith(problem)


def readings(rank: int) -> list[tuple[float, float]]:
    return read_clocks(Group(default_process_group()), clock=lambda: time.time() + 5 * rank)


def test_a_rank_whose_clock_is_ahead_is_found(pool: RankPool) -> None:
    by_rank = pool.run(readings)
    bounds = offset_bounds(by_rank[1], by_rank[0])
    assert bounds.least <= 5 <= bounds.most
    [finding] = judge_clocks(by_rank, ["a", "b"])
    assert finding.severity is Severity.FAULT
    assert "b is ahead of a by" in finding.found
