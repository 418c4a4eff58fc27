"""Slurm for real: a batch script, two nodes, and worlds that fall apart."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_runs import ROOT, SCRIPTS, SECONDS, TORCHRUN, free_port, ranks_of, run, sha256_in

pytestmark = pytest.mark.timeout(200)

JOIN = str(SCRIPTS / "join.py")
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def submit(batch: Path, cluster: dict[str, str], tmp_path: Path, *options: str) -> tuple[str, str]:
    """Run a batch script to its end; how it ended, and its output."""
    output = tmp_path / "output"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | cluster | {"PATH": path}

    def ask(*command: str) -> str:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=SECONDS
        ).stdout

    job = ask("sbatch", "--parsable", f"--output={output}", *options, str(batch)).strip()
    until, state = time.monotonic() + SECONDS, ""
    while state not in ENDS:  # sbatch could wait, but looks seldom
        assert time.monotonic() < until, f"the job has not ended: {state}"
        time.sleep(0.1)
        [state] = re.findall(r"JobState=(\w+)", ask("scontrol", "show", "job", job))
    return state, output.read_text()


def test_the_batch_script_of_the_page_trains_on_two_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    state, output = submit(ROOT / "examples/launchers/slurm.sbatch", cluster, tmp_path)
    assert state == "COMPLETED", output
    assert ranks_of(output) == [f"rank {rank} of 4, local rank {rank % 2}, on cpu" for rank in range(4)]
    assert sha256_in(output) is not None
    assert "they meet at 127.0.0.1" in output  # the first node's name
    assert "(SLURM_STEP_NODELIST, job" in output


def test_a_batch_script_without_srun_is_refused(cluster: dict[str, str], tmp_path: Path) -> None:
    batch = tmp_path / "no_srun.sbatch"
    batch.write_text(f"#!/bin/bash\n{sys.executable} {JOIN}\n")
    state, output = submit(batch, cluster, tmp_path, "--ntasks=2")
    assert state == "FAILED"
    assert "WorldError: this process would train alone" in output
    assert "SLURM_NTASKS=2" in output


def test_nodes_that_form_worlds_of_their_own_are_refused(cluster: dict[str, str]) -> None:
    ended = run(["srun", "-N2", *TORCHRUN, "--standalone", "--nproc-per-node=1", JOIN], cluster)
    assert ended.code != 0
    assert ended.output.count("FellApartError: nodes formed worlds of their own") == 2
    assert "Slurm started this command 2 times (SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=2)" in ended.output
    assert "joined" not in ended.output


def test_torchrun_on_each_node_meets(cluster: dict[str, str]) -> None:
    meet = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    ]
    ended = run(["srun", "-N2", *TORCHRUN, *meet, JOIN], cluster)
    assert ended.code == 0, ended.output
    assert "rank 0 of 2 joined" in ended.output
    assert "rank 1 of 2 joined" in ended.output


def test_pmi_beside_slurms_own_variables_changes_nothing(cluster: dict[str, str]) -> None:
    ended = run(["srun", "--mpi=pmi2", "-n2", sys.executable, JOIN], cluster)
    assert ended.code == 0, ended.output
    assert "started by Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS)" in ended.output
