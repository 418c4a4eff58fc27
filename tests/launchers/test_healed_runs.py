"""Runs that go on with fewer ranks, from a checkpoint, or on two hosts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from healed_runs import SCRIPT, SECONDS, check_ended_well, heal, quiet, results

from paceline.comm.shm.local_ranks import HOST_VARIABLE
from paceline.recording.ledger import read_ledger
from paceline.recording.ledger_check import check_ledger
from paceline.testing.hosts import Hosts, why_not


def test_without_spares_the_others_go_on(tmp_path: Path) -> None:
    plan = {"3 0": "backward", "9 0": "optimizer"}
    ran = heal(tmp_path, "--heal", "--spares", "0", "-n", "3", "--record", "record", "--ledger", plan=plan)
    check_ended_well(ran, 1)
    assert "rank 0 was lost (SIGKILL); the others go on without it" in ran.stderr
    assert check_ledger(read_ledger(tmp_path / "record")).is_right


def test_if_all_ranks_are_lost_without_spares_the_run_fails(tmp_path: Path) -> None:
    plan = {"4 0": "forward", "4 1": "forward"}
    ran = heal(tmp_path, "--heal", "--spares", "0", "-n", "2", plan=plan)
    assert (ran.code, ran.left) == (128 + signal.SIGKILL, [])
    assert "SIGKILL" in ran.stderr


def test_a_rank_that_dies_again_and_again_is_left_out(tmp_path: Path) -> None:
    ran = heal(tmp_path, "--heal", "-n", "2", plan={"3 1": "forward"}, options={"dies at start": True})
    check_ended_well(ran, 1)
    assert ran.stderr.count("a spare process takes its place") == 3


def test_workers_of_data_loaders_are_left_neither_by_lost_ranks_nor_by_others(tmp_path: Path) -> None:
    plan = {"4 1": "backward", "12 0": "optimizer"}
    before = set(Path(tempfile.gettempdir()).glob("pymp-*"))
    ran = heal(tmp_path, "--heal", "-n", "2", plan=plan, options={"workers": 1})
    check_ended_well(ran, 2)
    assert set(Path(tempfile.gettempdir()).glob("pymp-*")) <= before


def test_if_all_ranks_are_lost_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    plan = {"9 0": "optimizer", "9 1": "optimizer"}
    ran = heal(tmp_path, "--heal", "--checkpoint", "saved", "--every", "2", "-n", "2", plan=plan)
    check_ended_well(ran, 2)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["training.pt"]


def test_after_the_launcher_was_killed_the_same_command_goes_on(tmp_path: Path) -> None:
    command = ("--heal", "--checkpoint", "saved", "--every", "4", "-n", "2")
    slow = {"pause": 0.1, "says": 9}
    killed = heal(tmp_path, *command, options=slow, sends=[("says", signal.SIGKILL)])
    assert (killed.code, results(killed)) == (-signal.SIGKILL, [])
    ran = heal(tmp_path, "--checkpoint", "saved", "-n", "1")
    check_ended_well(ran, 1)


def test_a_loss_after_the_optimizer_has_no_whole_state_without_a_checkpoint(tmp_path: Path) -> None:
    plan, options = {"5 1": "after optimizer"}, {"collective after optimizer": True}
    ran = heal(tmp_path, "--heal", "-n", "2", plan=plan, options=options)
    assert (ran.code, ran.left) == (1, [])
    assert "Have no collective after optimizer.step()" in ran.stderr


def test_a_loss_after_the_optimizer_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    plan, options = {"5 1": "after optimizer"}, {"collective after optimizer": True}
    ran = heal(
        tmp_path, "--heal", "--checkpoint", "saved", "--every", "2", "-n", "2", plan=plan, options=options
    )
    check_ended_well(ran, 2)


def test_a_block_that_catches_the_error_of_a_lost_rank_does_not_count(tmp_path: Path) -> None:
    plan = {"5 1": "backward"}
    command = ("--heal", "--checkpoint", "saved", "--every", "2", "-n", "2")
    ran = heal(tmp_path, *command, plan=plan, options={"catches": True})
    check_ended_well(ran, 2)


def test_a_rank_that_leaves_the_loop_after_a_lost_step_ends_the_run(tmp_path: Path) -> None:
    plan, options = {"5 1": "forward"}, {"leaves": 5}
    ran = heal(tmp_path, "--heal", "-n", "2", plan=plan, options=options)
    assert (ran.code, ran.left) == (1, [])
    assert "the loop was left though step 5 was lost" in ran.stderr
    assert "rank 0 has ended before the training was over" in ran.stderr


def launch_on(hosts: Hosts, host: int, folder: Path, plan: str) -> "subprocess.Popen[str]":
    """Start the launcher of one host."""
    # Without it each lookup of a name takes ten seconds.
    settings = Path("/etc/netns", hosts.names[host])
    settings.mkdir(parents=True)
    (settings / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.addresses[0]}:29400"]
    meeting += ["--rdzv-conf", f"is_host={1 - host}", "--local-addr", hosts.addresses[host]]
    program = "from paceline.tools.main import main; main()"
    command = [sys.executable, "-c", program, "run", "--heal", "--nnodes", "2", "-n", "2"]
    return subprocess.Popen(
        ["ip", "netns", "exec", hosts.names[host], *command, *meeting, str(SCRIPT)],
        cwd=folder,
        env={**os.environ, "PLAN": plan, "GLOO_SOCKET_IFNAME": "wire", HOST_VARIABLE: hosts.names[host]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_all_ranks_of_one_of_two_hosts_are_replaced(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    plan = json.dumps({"7 0": "backward", "7 1": "forward"})
    with Hosts() as hosts:
        try:
            launchers = [launch_on(hosts, each, tmp_path, plan) for each in (0, 1)]
            said = [launcher.communicate(timeout=SECONDS)[0] for launcher in launchers]
        finally:
            for name in hosts.names:
                shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert said[0].count("a spare process takes its place") == 2
    ended = sorted(line for each in said for line in re.findall(r"rank \d of \d: .*", each))
    assert ended == [f"rank {rank} of 4: {quiet()}" for rank in range(4)]
