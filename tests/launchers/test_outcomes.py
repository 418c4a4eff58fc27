"""One unedited script under every launcher: ranks start, train to the same bits, and end together."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from launcher_runs import LAUNCHERS, SCRIPTS, TORCHRUN, free_port, outcomes, reference_sha256, run, started
from mpi_wheels import MissingLauncherError

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def sha256() -> str:
    return reference_sha256()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_ranks_start_meet_and_end_together(name: str, sha256: str) -> None:
    with ExitStack() as stack:
        try:
            launch = stack.enter_context(LAUNCHERS[name]())
        except MissingLauncherError as reason:
            pytest.skip(str(reason))
        found = outcomes(launch, sha256)
    assert not any(found.values()), "\n".join(f"{outcome}: {problem}" for outcome, problem in found.items())


def test_ranks_that_torchrun_restarts_meet_again(tmp_path: Path) -> None:
    options = ["--nproc-per-node=2", "--max-restarts=1"]
    ended = run([*TORCHRUN, *options, str(SCRIPTS / "join.py"), "fail-once", str(tmp_path)])
    assert ended.code == 0, ended.output
    assert ended.output.count("rank 1 of 2 joined") == 2


def test_ranks_of_two_nodes_meet_again_after_one_node_has_failed(tmp_path: Path) -> None:
    # Each node counts its own failures: after this, one says that it was restarted, and the other not.
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command = [*TORCHRUN, *options, str(SCRIPTS / "join.py"), "fail-once", str(tmp_path)]
    with started(command) as first, started(command) as second:
        for ended in (first.end(), second.end()):
            assert ended.code == 0, ended.output
            assert len(re.findall(r"rank [01] of 2 joined", ended.output)) == 2
