"""Worlds that are not one, started for real: each is refused by name, and nobody trains alone."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from launcher_runs import LAUNCHERS, ROOT, SCRIPTS, TORCHRUN, Launch, free_port, run, started
from mpi_wheels import MissingLauncherError

pytestmark = pytest.mark.timeout(200)

JOIN = str(SCRIPTS / "join.py")


@pytest.fixture(params=["mpirun of Open MPI", "mpirun of MPICH"])
def mpi(request: pytest.FixtureRequest) -> Launch:
    return launch_of(request.param)


def launch_of(name: str) -> Launch:
    with ExitStack() as stack:
        try:
            return stack.enter_context(LAUNCHERS[name]())
        except MissingLauncherError as reason:
            pytest.skip(str(reason))


def test_a_world_of_one_under_mpirun_is_refused(mpi: Launch) -> None:
    ended = run([*mpi.command, JOIN], {"RANK": "0", "WORLD_SIZE": "1"})
    assert ended.code != 0
    assert "FellApartError: the world fell apart: RANK=0, WORLD_SIZE=1" in ended.output
    assert "joined" not in ended.output
    assert not ended.left


def test_left_over_variables_that_disagree_end_all_ranks(mpi: Launch) -> None:
    stale = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = run([*mpi.command, JOIN], stale)
    assert ended.code != 0
    assert "DisagreementError: two launchers disagree: RANK=0, WORLD_SIZE=2" in ended.output
    assert "joined" not in ended.output
    assert not ended.left


def test_mpirun_at_the_address_of_torchrun_is_refused() -> None:
    mpi = launch_of("mpirun of Open MPI")
    port = str(free_port())
    options = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    with started([*TORCHRUN, *options, JOIN, "stay"]) as torchrun:
        torchrun.wait_for("rank 0 of 2 joined", "rank 1 of 2 joined")
        ended = run([*mpi.command, JOIN], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert ended.code != 0
    assert "MeetingError: a mixed world meets at one address" in ended.output
    assert f"MASTER_PORT={port}" in ended.output
    assert "started by torchrun" in ended.output
    assert "joined" not in ended.output


def test_a_missing_address_is_named() -> None:
    ended = run([sys.executable, JOIN], {"RANK": "0", "WORLD_SIZE": "2"})
    assert ended.code == 1
    assert "WorldError: MASTER_ADDR is not set (RANK=0, WORLD_SIZE=2)" in ended.output


@pytest.mark.parametrize(("name", "program"), [("pytorchjob", "python"), ("trainjob", "torchrun")])
def test_the_manifests_start_the_example_as_the_table_does(name: str, program: str) -> None:
    manifest = yaml.safe_load((ROOT / f"examples/launchers/{name}.yaml").read_text())
    commands = list(find_commands(manifest))
    assert commands
    assert all(command == [program, "examples/any_launcher.py"] for command in commands)
    assert (ROOT / Path(commands[0][1])).exists()


def find_commands(part: object) -> list[list[str]]:
    """The values of all keys ``command``."""
    if isinstance(part, list):
        return [command for each in part for command in find_commands(each)]
    if not isinstance(part, dict):
        return []
    own = [part["command"]] if "command" in part else []
    return own + [command for each in part.values() for command in find_commands(each)]
