"""Which launcher started a process, from its variables alone."""

import re
from typing import Any

import pytest

from paceline.comm.launcher_claims import Launcher
from paceline.comm.launchers import (
    LOOPBACK,
    LaunchedWorld,
    find_world,
    first_host,
    port_of,
    where_ranks_wait,
)
from paceline.errors import DisagreementError, FellApartError, WorldError

Variables = dict[str, str]


def variables(**values: Any) -> Variables:
    return {name: str(value) for name, value in values.items()}


def torchrun(rank: int = 1, size: int = 2, **more: Any) -> Variables:
    return variables(
        RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size, GROUP_RANK=0, GROUP_WORLD_SIZE=1,
        MASTER_ADDR="first", MASTER_PORT=29500, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=3,
        TORCHELASTIC_USE_AGENT_STORE="True",
    ) | variables(**more)  # fmt: skip


def by_hand(rank: int = 1, size: int = 2, **more: Any) -> Variables:
    return variables(RANK=rank, WORLD_SIZE=size, MASTER_ADDR="first", MASTER_PORT=29500, **more)


def open_mpi(rank: int = 1, size: int = 2, local_size: int | None = None, **more: Any) -> Variables:
    local_size = size if local_size is None else local_size
    return variables(
        OMPI_COMM_WORLD_RANK=rank, OMPI_COMM_WORLD_SIZE=size, OMPI_COMM_WORLD_LOCAL_RANK=rank % local_size,
        OMPI_COMM_WORLD_LOCAL_SIZE=local_size, PMIX_NAMESPACE="prterun-vm-7@1", **more,
    )  # fmt: skip


def mpich(rank: int = 1, size: int = 2, local_size: int | None = None, **more: Any) -> Variables:
    local_size = size if local_size is None else local_size
    return variables(
        PMI_RANK=rank,
        PMI_SIZE=size,
        MPI_LOCALRANKID=rank % local_size,
        MPI_LOCALNRANKS=local_size,
        **more,
    )


def allocation(tasks: int, nodes: int = 1) -> Variables:
    """What a batch script itself sees."""
    return variables(
        SLURM_JOB_ID=7, SLURM_NTASKS=tasks, SLURM_JOB_NUM_NODES=nodes, SLURM_PROCID=0, SLURM_NODEID=0,
        SLURM_TASKS_PER_NODE=tasks,
    )  # fmt: skip


def slurm(rank: int = 1, size: int = 2, node: int = 0, tasks: str = "2", **more: Any) -> Variables:
    return allocation(size) | variables(
        SLURM_STEP_ID=0, SLURM_PROCID=rank, SLURM_STEP_NUM_TASKS=size, SLURM_LOCALID=0, SLURM_NODEID=node,
        SLURM_STEP_TASKS_PER_NODE=tasks, SLURM_STEP_NODELIST="pl[07-08]",
    ) | variables(**more)  # fmt: skip


def found(environment: Variables) -> LaunchedWorld:
    return find_world(environment, starter="42.1000")


def refused(environment: Variables, *parts: str, error: type[WorldError] = WorldError) -> None:
    with pytest.raises(error) as raised:
        found(environment)
    assert type(raised.value) is error
    for part in parts:
        assert part in str(raised.value)


# --- what is found ---


def test_no_variables_are_a_world_of_one() -> None:
    world = found({"PATH": "/bin", "MASTER_ADDR": "left over"})
    assert (world.launcher, world.rank, world.size, world.address) == (Launcher.NONE, 0, 1, None)


def test_torchrun() -> None:
    world = found(torchrun())
    assert (world.launcher, world.rank, world.size) == (Launcher.TORCHRUN, 1, 2)
    assert (world.local_rank, world.local_size) == (1, 2)
    assert (world.address, world.port) == ("first", 29500)
    assert world.is_agent_listening
    assert world.sources is not None
    assert world.sources["rank"] == "RANK"
    assert world.sources["port"] == "MASTER_PORT"


def test_paceline_run_is_told_from_torchrun() -> None:
    assert found(torchrun(PACELINE_RUN_FOLDER="/tmp/x")).launcher is Launcher.PACELINE_RUN


def test_variables_set_by_hand_or_by_an_operator_need_no_local_rank() -> None:
    world = found(by_hand())
    assert (world.launcher, world.rank, world.size, world.local_rank) == (Launcher.VARIABLES, 1, 2, None)
    assert not world.is_agent_listening


@pytest.mark.parametrize("name", ["RAY_RAYLET_PID", "RAY_JOB_ID"])
def test_a_worker_of_ray_is_recognised_also_inside_a_job_of_slurm(name: str) -> None:
    world = found(by_hand(rank=0, size=8, LOCAL_RANK=0, **{name: "1"}) | slurm(rank=1))
    assert (world.launcher, world.rank, world.size) == (Launcher.RAY, 0, 8)


def test_a_worker_of_ray_without_a_rank_does_not_take_the_rank_of_the_task_that_started_ray() -> None:
    refused(slurm(RAY_JOB_ID=1), "would train alone", "SLURM_NTASKS=2")
    assert found(slurm(RAY_JOB_ID=1, SLURM_NTASKS=1)).launcher is Launcher.NONE
    assert found(open_mpi(RAY_JOB_ID=1)).launcher is Launcher.OPEN_MPI  # a worker may start mpirun


@pytest.mark.parametrize(
    ("environment", "launcher", "job"),
    [
        (open_mpi(), Launcher.OPEN_MPI, "prterun-vm-7@1"),
        (mpich(), Launcher.MPICH, "42.1000"),
        (slurm(), Launcher.SLURM, "7.0"),
    ],
)
def test_on_one_host_ranks_meet_on_the_loopback_at_a_port_of_the_job(
    environment: Variables, launcher: Launcher, job: str
) -> None:
    world = found(environment)
    assert (world.launcher, world.rank, world.size, world.local_size) == (launcher, 1, 2, 2)
    assert (world.address, world.job, world.port) == (LOOPBACK, job, port_of(job))


def test_an_address_that_is_given_is_used_under_every_launcher() -> None:
    for environment in (open_mpi(), mpich(), slurm()):
        world = found(environment | {"MASTER_ADDR": "there", "MASTER_PORT": "1234"})
        assert (world.address, world.port) == ("there", 1234)


def test_brackets_around_an_address_of_ipv6_are_left_out() -> None:
    assert found(by_hand() | {"MASTER_ADDR": "[::1]"}).address == "::1"


def test_on_several_hosts_slurms_ranks_meet_at_the_first_of_the_step() -> None:
    world = found(slurm(rank=4, size=5, node=2, tasks="2(x2),1"))
    assert (world.address, world.local_size, world.job) == ("pl07", 1, "7.0")
    assert world.sources is not None
    assert world.sources["address"] == "SLURM_STEP_NODELIST"


def test_srun_that_sets_pmi_too_is_slurm() -> None:
    world = found(slurm() | variables(PMI_RANK=1, PMI_SIZE=2))
    assert (world.launcher, world.address, world.local_size) == (Launcher.SLURM, LOOPBACK, 2)


def test_open_mpi_whose_daemons_srun_started_is_open_mpi_on_every_node() -> None:
    daemon = slurm(rank=1, size=2, node=1, tasks="1(x2)")  # agrees with rank 1 by chance
    world = found(daemon | open_mpi(1, 2, local_size=1, MASTER_ADDR="a", MASTER_PORT=1))
    assert (world.launcher, world.job) == (Launcher.OPEN_MPI, "prterun-vm-7@1")


def test_a_batch_script_may_export_the_world_size_alone() -> None:
    assert found(slurm() | {"WORLD_SIZE": "2"}).launcher is Launcher.SLURM
    refused(slurm() | {"WORLD_SIZE": "3"}, "WORLD_SIZE=3", "SLURM_STEP_NUM_TASKS=2", error=DisagreementError)


def test_variables_that_were_copied_from_the_launcher_are_the_launchers() -> None:
    world = found(open_mpi() | variables(RANK=1, WORLD_SIZE=2, LOCAL_RANK=0))
    assert (world.launcher, world.local_rank, world.address) == (Launcher.OPEN_MPI, 0, LOOPBACK)


def test_a_process_per_node_may_start_a_block_of_ranks() -> None:
    assert found(by_hand(rank=5, size=8, LOCAL_RANK=1) | slurm(rank=1)).rank == 5


def test_an_empty_variable_is_not_set() -> None:
    assert found({"RANK": "", "WORLD_SIZE": "", "SLURM_STEP_ID": ""}).launcher is Launcher.NONE


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("vm", "vm"),
        ("a,b", "a"),
        ("node[07-09,12],login", "node07"),
        ("node[3,1]", "node3"),
        ("rack[1-2]-node[005-009].site", "rack1-node005.site"),
        ("127.0.0.[1-2]", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_node_list(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", ",a", "[", "]a"])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(WorldError, match="set MASTER_ADDR"):
        first_host(text)


def test_the_port_of_a_job_is_outside_of_those_for_outgoing_connections() -> None:
    ports = {port_of(f"{job}.0") for job in range(2000)}
    assert len(ports) > 1800  # few jobs share a port
    assert 1024 < min(ports) <= max(ports) < 32768


# --- worlds that fell apart ---


@pytest.mark.parametrize("outer", [open_mpi(), mpich(), slurm()])
def test_a_world_of_one_inside_a_launcher_that_started_several_is_refused(outer: Variables) -> None:
    parts = ("fell apart", "RANK=0, WORLD_SIZE=1", "started 2")
    refused(by_hand(rank=0, size=1) | outer, *parts, error=FellApartError)


def test_each_task_of_srun_that_starts_an_mpi_of_its_own_is_refused() -> None:
    one = ("fell apart", "OMPI_COMM_WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=2")
    refused(slurm() | open_mpi(0, 1), *one, error=FellApartError)
    two = ("one of 2", "PMI_SIZE=2", "SLURM_STEP_NUM_TASKS=4")
    refused(slurm(size=4, tasks="4") | mpich(0, 2), *two, error=FellApartError)


def test_mpirun_inside_an_allocation_is_not() -> None:
    assert found(allocation(2) | open_mpi()).launcher is Launcher.OPEN_MPI
    assert found(slurm(rank=0, size=1, tasks="1") | open_mpi()).launcher is Launcher.OPEN_MPI


@pytest.mark.parametrize(("tasks", "nodes"), [(2, 1), (1, 2)])
def test_a_batch_script_without_srun_is_refused(tasks: int, nodes: int) -> None:
    refused(allocation(tasks, nodes), f"SLURM_NTASKS={tasks}", f"SLURM_JOB_NUM_NODES={nodes}", "srun")


def test_a_batch_script_of_one_task_is_a_world_of_one_and_so_is_one_that_says_so() -> None:
    assert found(allocation(1)).size == 1
    assert found(allocation(2) | variables(RANK=0, WORLD_SIZE=1)).size == 1


@pytest.mark.parametrize("outer", [open_mpi(), mpich(), slurm()])
def test_nodes_that_formed_worlds_of_their_own_are_refused(outer: Variables) -> None:
    parts = ("GROUP_WORLD_SIZE=1", "started this command 2 times", "set PET_NNODES=1 (")
    refused(outer | torchrun(), "worlds of their own", *parts, error=FellApartError)
    assert found(outer | torchrun(GROUP_WORLD_SIZE=2)).launcher is Launcher.TORCHRUN


def test_torchrun_on_one_node_of_an_allocation_of_several_is_refused() -> None:
    parts = ("SLURM_JOB_NUM_NODES=2", "--standalone")
    refused(allocation(2, nodes=2) | torchrun(), *parts, error=FellApartError)
    assert found(allocation(8) | torchrun()).size == 2
    step = slurm(rank=0, size=1, tasks="1") | {"SLURM_JOB_NUM_NODES": "2"}  # one of several runs in a job
    assert found(step | torchrun()).size == 2


def test_elastic_nodes_may_be_fewer_if_the_variable_says_so() -> None:
    assert found(slurm() | torchrun(PET_NNODES="1:2")).size == 2
    for nodes in ("2", "2:4"):
        refused(torchrun(PET_NNODES=nodes), "GROUP_WORLD_SIZE=1", f"PET_NNODES={nodes}", error=FellApartError)
    refused(torchrun(PET_NNODES="two"), "PET_NNODES: 'two'")


def test_kubeflows_variables_without_torchrun_are_refused() -> None:
    refused(variables(PET_NNODES=2), "PET_NNODES=2", "Start the script with torchrun")
    refused(variables(PET_NNODES=1, PET_NPROC_PER_NODE=2), "PET_NPROC_PER_NODE=2")
    refused(by_hand(PET_NNODES=2, PET_NPROC_PER_NODE=2), "PET_NPROC_PER_NODE=2", "RANK=1, WORLD_SIZE=2")
    assert found(variables(PET_NNODES=1, PET_NPROC_PER_NODE="auto")).size == 1
    assert found(by_hand(PET_NNODES=2, PET_NPROC_PER_NODE="auto")).size == 2


# --- bad input ---


@pytest.mark.parametrize("outer", [open_mpi(0), mpich(0), slurm(0)])
def test_two_launchers_that_disagree_are_refused(outer: Variables) -> None:
    refused(by_hand(1) | outer, "disagree", "RANK=1, WORLD_SIZE=2", error=DisagreementError)
    refused(by_hand(0, 8) | outer, "disagree", "WORLD_SIZE=8", error=DisagreementError)


def test_two_mpis_that_disagree_are_refused() -> None:
    refused(open_mpi(0) | mpich(1), "OMPI_COMM_WORLD_RANK=0", "PMI_RANK=1", error=DisagreementError)


def test_a_missing_address_is_named() -> None:
    refused(variables(RANK=0, WORLD_SIZE=2), "MASTER_ADDR is not set", "MASTER_PORT")
    refused(variables(RANK=0, WORLD_SIZE=2, MASTER_ADDR="a"), "MASTER_PORT is not set")
    for environment in (open_mpi(local_size=1), mpich(local_size=1)):
        refused(environment, "MASTER_ADDR is not set", "do not tell where rank 0 is", "MASTER_PORT")
    refused(mpich(local_size=1, MASTER_ADDR="a"), "MASTER_PORT is not set")


@pytest.mark.parametrize(("rank", "node"), [(0, 1), (2, 0)])
def test_a_rank_0_that_is_not_on_the_first_node_needs_an_address(rank: int, node: int) -> None:
    environment = slurm(rank=rank, size=4, node=node, tasks="2(x2)")  # each is the first task of its node
    refused(environment, f"SLURM_NODEID: {node}, SLURM_PROCID: {rank}", "set MASTER_ADDR")
    assert where_ranks_wait(environment, starter="") == ("pl07", port_of("7.0"))
    assert found(environment | {"MASTER_ADDR": "a"}).address == "a"


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (by_hand(LOCAL_RANK=7), ("first", 29500)),
        (by_hand(0, 8) | open_mpi(), ("first", 29500)),
        (torchrun(PET_NNODES=2), ("first", 29500)),
        (variables(RANK=0, WORLD_SIZE=2) | mpich(), (LOOPBACK, port_of("42.1000"))),
        (by_hand() | {"MASTER_ADDR": "a..b"}, None),
        (by_hand() | {"MASTER_PORT": "http"}, None),
        (variables(RANK=0, WORLD_SIZE=2), None),
    ],
)
def test_others_may_wait_for_a_process_that_is_refused(environment: Variables, place: Any) -> None:
    with pytest.raises(WorldError):
        found(environment)
    assert where_ranks_wait(environment, starter="42.1000") == place


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (by_hand() | {"RANK": "one"}, "RANK"),
        (by_hand() | {"RANK": "-1"}, "RANK"),
        (by_hand() | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE"),
        (by_hand() | {"LOCAL_RANK": "²"}, "LOCAL_RANK"),
        (by_hand() | {"MASTER_PORT": "http"}, "MASTER_PORT"),
        (by_hand() | {"MASTER_PORT": "65536"}, "MASTER_PORT"),
        (by_hand() | {"MASTER_PORT": "0"}, "MASTER_PORT"),
        (torchrun(GROUP_WORLD_SIZE="x"), "GROUP_WORLD_SIZE"),
        (open_mpi() | {"OMPI_COMM_WORLD_SIZE": "all"}, "OMPI_COMM_WORLD_SIZE"),
        (mpich() | {"MPI_LOCALNRANKS": "x"}, "MPI_LOCALNRANKS"),
        (slurm(tasks="2(3)"), "SLURM_STEP_TASKS_PER_NODE"),
        (by_hand() | {"MASTER_ADDR": "a..b"}, "MASTER_ADDR"),
        (allocation(1) | {"SLURM_NTASKS": "x"}, "SLURM_NTASKS"),
    ],
)
def test_what_is_not_a_number_is_named(environment: Variables, name: str) -> None:
    value = environment[name]
    with pytest.raises(WorldError, match=re.escape(f"({name}: ")) as raised:
        found(environment)
    assert value in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (by_hand(), "RANK"),
        (by_hand(), "MASTER_PORT"),
        (slurm(), "SLURM_STEP_TASKS_PER_NODE"),
        (torchrun(), "PET_NNODES"),
    ],
)
def test_a_number_of_thousands_of_digits_is_named(environment: Variables, name: str) -> None:
    refused(environment | {name: "9" * 5000}, f"{name}: '999")


def test_a_list_of_very_many_nodes_takes_no_memory() -> None:
    assert found(slurm(rank=4, size=5, node=2, tasks="2(x9999999999),1")).local_size == 2


@pytest.mark.parametrize("environment", [by_hand(2), open_mpi(2), mpich(2), slurm(2), by_hand(0, 0)])
def test_a_rank_must_be_less_than_the_world(environment: Variables) -> None:
    refused(environment, "must be less than")


def test_a_local_rank_must_be_less_than_the_ranks_of_the_host() -> None:
    refused(torchrun(LOCAL_RANK=1, LOCAL_WORLD_SIZE=1), "LOCAL_RANK must be less than LOCAL_WORLD_SIZE")
    refused(by_hand(LOCAL_RANK=2), "LOCAL_RANK must be less than WORLD_SIZE")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE"])
def test_half_of_a_pair_is_refused(name: str) -> None:
    refused({name: "1"}, f"{name} is set, but", "is not")
