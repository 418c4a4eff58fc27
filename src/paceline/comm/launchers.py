"""What the launcher that started this process says about it, and where its ranks meet.

Nothing here looks at the process itself: ``find_world`` takes a mapping of variables and returns what it
found, or raises a ``WorldError`` that names the variables.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from paceline.comm.launcher_claims import (
    Claim,
    Environment,
    Launcher,
    number,
    outer_claims,
    read_claim,
)
from paceline.errors import WorldError

LOOPBACK = "127.0.0.1"
# Ports that are made from a job's name: below those that Linux gives to outgoing connections.
_PORTS = range(10_000, 32_000)


@dataclass(frozen=True)
class LaunchedWorld:
    """What the variables say about this process.

    Attributes:
        launcher: what started it.
        rank: its rank.
        size: the number of ranks.
        local_rank: its number among the ranks of its host; None if the variables do not say.
        local_size: the number of ranks of its host; None if the variables do not say.
        address: where the ranks meet; None if there is one rank only.
        port: the port there.
        is_agent_listening: whether an agent of torch listens there, and not rank 0.
        job: what the launcher calls the job; None if it has no name.
        sources: where each value comes from: a variable's name, or a description.
    """

    launcher: Launcher
    rank: int = 0
    size: int = 1
    local_rank: int | None = 0
    local_size: int | None = 1
    address: str | None = None
    port: int | None = None
    is_agent_listening: bool = False
    job: str | None = None
    sources: Mapping[str, str] | None = None


class MeetingPlace(NamedTuple):
    """Where ranks meet."""

    address: str
    port: int


def find_world(environment: Environment, *, starter: str) -> LaunchedWorld:
    """What the launcher that started this process says about it.

    Args:
        environment: the process's variables.
        starter: identifies the process that started the ranks of this host, for launchers that give jobs no
            name.

    Raises:
        WorldError: if the variables describe no world, or several.
    """
    environment = _set_variables(environment)
    claim = read_claim(environment)
    if claim is None:
        return LaunchedWorld(Launcher.NONE)
    values = {name: getattr(claim, name) for name in claim.names}
    sources = {name: variable for name, variable in claim.names.items() if values[name] is not None}
    job = _job(environment, claim, starter)
    if claim.size > 1:
        values["address"], sources["address"] = _address(environment, claim)
        values["port"], sources["port"] = _port(environment, job)
        _check_first_node(environment, claim, sources["address"])
    if claim.launcher.has_agent:
        values["is_agent_listening"] = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LaunchedWorld(claim.launcher, **values, job=job, sources=sources)


def where_ranks_wait(environment: Environment, *, starter: str) -> MeetingPlace | None:
    """Where others may wait for a process whose variables are refused; None if the variables do not say."""
    environment = _set_variables(environment)
    try:
        if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
            return MeetingPlace(_host(environment["MASTER_ADDR"]), _port(environment, None)[0])
        for claim in outer_claims(environment):
            port, _ = _port(environment, _job(environment, claim, starter))
            return MeetingPlace(_address(environment, claim)[0], port)
    except WorldError:
        pass
    return None


def first_host(node_list: str) -> str:
    """The first host of a node list in Slurm's short form: ``node[07-09,12],login`` gives ``node07``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", node_list)
    if first is None:
        raise WorldError(f"not a list of nodes (SLURM_STEP_NODELIST: {node_list!r}); set MASTER_ADDR")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def port_of(job: str) -> int:
    """A port that all ranks of a job compute alike, and that another job is unlikely to have."""
    digest = hashlib.sha256(job.encode()).digest()
    return _PORTS[int.from_bytes(digest[:8], "big") % len(_PORTS)]


def _set_variables(environment: Environment) -> Environment:
    """An empty variable counts as one that is not set."""
    return {name: value for name, value in environment.items() if value}


def _job(environment: Environment, claim: Claim, starter: str) -> str | None:
    if claim.launcher is Launcher.SLURM:
        return f"{environment.get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}"
    if claim.launcher is Launcher.OPEN_MPI and "PMIX_NAMESPACE" in environment:
        return environment["PMIX_NAMESPACE"]
    if claim.launcher in (Launcher.OPEN_MPI, Launcher.MPICH) and claim.is_one_host:
        return starter
    return None


def _address(environment: Environment, claim: Claim) -> tuple[str, str]:
    if "MASTER_ADDR" in environment:
        return _host(environment["MASTER_ADDR"]), "MASTER_ADDR"
    is_torchrun_like = claim.names["rank"] == "RANK"
    if claim.is_one_host and not is_torchrun_like:
        return LOOPBACK, "all ranks are on this host"
    if claim.launcher is Launcher.SLURM and "SLURM_STEP_NODELIST" in environment:
        return first_host(environment["SLURM_STEP_NODELIST"]), "SLURM_STEP_NODELIST"
    whose = "" if is_torchrun_like else f", and {claim.by}'s variables do not tell where rank 0 is"
    raise WorldError(
        f"MASTER_ADDR is not set{whose} ({claim}); set MASTER_ADDR to the host of rank 0, and "
        "MASTER_PORT to a free port there, on every rank"
    )


def _check_first_node(environment: Environment, claim: Claim, source: str) -> None:
    """Refuse tasks that were placed by hand, so that nobody would listen at the first node.

    Not only rank 0 sees it, but also the first task of that node, which can tell those that wait there.
    """
    if source != "SLURM_STEP_NODELIST" or "SLURM_NODEID" not in environment:
        return
    node, task = number(environment, "SLURM_NODEID"), number(environment, "SLURM_LOCALID", 1)
    if (node > 0) if claim.rank == 0 else (node, task) == (0, 0):
        raise WorldError(
            "rank 0 is not on the first node of SLURM_STEP_NODELIST "
            f"(SLURM_NODEID: {node}, SLURM_PROCID: {claim.rank}); set MASTER_ADDR to its host, on every rank"
        )


def _host(address: str) -> str:
    """An address as sockets take it, without the brackets that IPv6's have in URLs."""
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    try:
        bare.encode("idna")
    except UnicodeError:
        raise WorldError(f"MASTER_ADDR must be a host's name or address (MASTER_ADDR: {address!r})") from None
    return bare


def _port(environment: Environment, job: str | None) -> tuple[int, str]:
    if "MASTER_PORT" in environment:
        port = number(environment, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise WorldError(f"MASTER_PORT must be from 1 to 65535 (MASTER_PORT: {port})")
        return port, "MASTER_PORT"
    if job is not None:
        return port_of(job), f"job {job}"
    raise WorldError("MASTER_PORT is not set; set it to a free port of rank 0's host, on every rank")
