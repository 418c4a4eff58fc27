"""What each launcher's variables claim about this process, and whether the claims fit together.

Note [Inner and outer launchers]. Several launchers may have left variables. Those closest to the process are
used: torchrun's before those of an MPI, and those before Slurm's, because people start torchrun with mpirun
or srun, and mpirun inside a job of Slurm. The launchers further out say how many processes they started. If
that does not fit, each process would train in a world of its own, so it is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from paceline.errors import DisagreementError, FellApartError, WorldError

Environment = Mapping[str, str]

# Ray sets them in its workers.
_RAY = ("RAY_RAYLET_PID", "RAY_JOB_ID")
# Python refuses to read numbers of thousands of digits, with an error of its own.
_NUMBER = r"[0-9]{1,10}"


class Launcher(Enum):
    """What started the process; the value is its name in messages."""

    TORCHRUN = "torchrun"
    PACELINE_RUN = "paceline run"
    RAY = "Ray"
    VARIABLES = "RANK and WORLD_SIZE"
    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    SLURM = "Slurm"
    NONE = "no launcher"

    @property
    def has_agent(self) -> bool:
        """Whether an agent of torch started the process: it gives out ranks anew at each restart."""
        return self in (Launcher.TORCHRUN, Launcher.PACELINE_RUN)


@dataclass(frozen=True)
class Claim:
    """What one launcher's variables say.

    Attributes:
        launcher: whose variables they are.
        rank: this process's rank.
        size: the number of ranks.
        local_rank: its number among the ranks of its host; None if there is no such variable.
        local_size: the number of ranks of its host; None if there is no such variable.
        names: the variable of each value.
    """

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    names: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.names['rank']}={self.rank}, {self.names['size']}={self.size}"

    @property
    def by(self) -> str:
        """The launcher's name."""
        return self.launcher.value

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are known to be on one host."""
        return self.local_size == self.size

    def agrees_with(self, other: "Claim") -> bool:
        """Whether both say the same rank and number of ranks."""
        return (self.rank, self.size) == (other.rank, other.size)


# Rank, number of ranks, and the same two among the ranks of a host.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def read_claim(environment: Environment) -> Claim | None:
    """The claim of the launcher that started this process; None if no launcher did.

    Raises:
        WorldError: if a claim is wrong, or if claims do not fit together.
    """
    outer = outer_claims(environment)
    if _is_half_set(environment, outer):
        return _innermost(outer)
    inner = _read(environment, Launcher.VARIABLES, _TORCHRUN)
    if inner is not None:
        return _torchrun_like(environment, inner, outer)
    if outer:
        return _innermost(outer)
    _check_alone(environment)
    return None


def number(environment: Environment, name: str, default: int | None = None) -> int:
    """A variable's value as a number; the default if it is not set."""
    if default is not None and name not in environment:
        return default
    value = environment[name]
    if not re.fullmatch(_NUMBER, value):
        raise WorldError(
            f"{name} must be a whole number, 0 or more, of at most 10 digits ({name}: {value[:40]!r})"
        )
    return int(value)


def _read(environment: Environment, launcher: Launcher, names: tuple[str, str, str, str]) -> Claim | None:
    rank, size, local_rank, local_size = names
    given = [name for name in (rank, size) if name in environment]
    if not given:
        return None
    if len(given) == 1:
        [missing] = {rank, size} - {*given}
        raise WorldError(f"{given[0]} is set, but {missing} is not ({given[0]}: {environment[given[0]]!r})")
    claim = Claim(
        launcher,
        number(environment, rank),
        number(environment, size),
        number(environment, local_rank) if local_rank in environment else None,
        _local_size(environment, local_size) if local_size in environment else None,
        dict(zip(("rank", "size", "local_rank", "local_size"), names, strict=True)),
    )
    _check_below(rank, claim.rank, size, claim.size)
    if claim.local_rank is not None:
        _check_below(local_rank, claim.local_rank, size, claim.size)
        if claim.local_size is not None:
            _check_below(local_rank, claim.local_rank, local_size, claim.local_size)
    return claim


def _local_size(environment: Environment, name: str) -> int | None:
    """The number of this host's ranks; Slurm lists that of each node, and writes 2,2,2,1 as ``2(x3),1``."""
    if name != "SLURM_STEP_TASKS_PER_NODE":
        return number(environment, name)
    node = number(environment, "SLURM_NODEID", 0)
    for part in environment[name].split(","):
        if (found := re.fullmatch(rf"({_NUMBER})(?:\(x({_NUMBER})\))?", part)) is None:
            raise WorldError(f"{name} must be a list such as 2(x3),1 ({name}: {environment[name]!r})")
        nodes = int(found[2] or 1)
        if node < nodes:
            return int(found[1])
        node -= nodes
    return None


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise WorldError(f"{name} must be less than {limit_name} ({name}: {value}, {limit_name}: {limit})")


def outer_claims(environment: Environment) -> list[Claim]:
    """What launchers other than torchrun say, from the inside out."""
    claims = [
        _read(environment, Launcher.OPEN_MPI, _OPEN_MPI),
        _read(environment, Launcher.MPICH, _MPICH),
        _read(environment, Launcher.SLURM, _SLURM) if _is_task_of_srun(environment) else None,
    ]
    return [claim for claim in claims if claim is not None]


def _is_task_of_srun(environment: Environment) -> bool:
    """Whether srun's variables are about this process, not about the allocation, or the task that is Ray."""
    return "SLURM_STEP_ID" in environment and not _is_worker_of_ray(environment)


def _is_worker_of_ray(environment: Environment) -> bool:
    return any(name in environment for name in _RAY)


def _innermost(claims: list[Claim]) -> Claim:
    """The claim to use, after the others have been compared with it; see Note [Inner and outer launchers]."""
    inner = claims[0]
    for outer in claims[1:]:
        if outer.size > inner.size:
            raise _fell_apart(inner, outer)
        # Neither MPI starts the other, but Slurm starts both.
        if outer.launcher is Launcher.MPICH and outer.size > 1 and not inner.agrees_with(outer):
            raise _disagreement(inner, outer)
    # srun sets PMI's variables too, if it is asked to. Its own say more about the hosts. Not with Open MPI:
    # its daemons are tasks of srun, and agree with its ranks on some nodes by chance.
    if inner.launcher is Launcher.MPICH and claims[-1].agrees_with(inner):
        return claims[-1]
    return inner


def _is_half_set(environment: Environment, outer: list[Claim]) -> bool:
    """Whether only one of RANK and WORLD_SIZE is set, to what another launcher says too.

    Batch scripts often export WORLD_SIZE, for scripts that take their rank from Slurm.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if len(given) != 1 or not outer:
        return False
    inner, [name] = _innermost(outer), given
    value = number(environment, name)
    if value != (inner.rank if name == "RANK" else inner.size):
        raise DisagreementError(
            f"two launchers disagree: {name}={value}, but {inner.by} says {inner}; unset {name}"
        )
    return True


# --- torchrun's variables, which others set too ---


def _torchrun_like(environment: Environment, inner: Claim, outer: list[Claim]) -> Claim:
    """The claim of torchrun's variables, with the name of who set them."""
    if "TORCHELASTIC_RUN_ID" in environment:
        _check_agents(environment, inner, outer)
        is_ours = "PACELINE_RUN_FOLDER" in environment
        return replace(inner, launcher=Launcher.PACELINE_RUN if is_ours else Launcher.TORCHRUN)
    if _is_worker_of_ray(environment):
        return replace(inner, launcher=Launcher.RAY)  # its workers are not processes of what started Ray
    _check_ranks_per_node(environment, inner)
    for claim in outer:
        _check_copied(inner, claim)
    # Scripts copy the variables of their launcher, and so does paceline.init.
    for claim in outer:
        if claim.agrees_with(inner):
            return claim if inner.local_rank is None else replace(claim, local_rank=inner.local_rank)
    return inner


def _check_agents(environment: Environment, inner: Claim, outer: list[Claim]) -> None:
    """Refuse nodes that formed worlds of their own: more agents of torch were started than have joined."""
    joined = number(environment, "GROUP_WORLD_SIZE", 1)
    if "PET_NNODES" in environment:
        least, most = _node_range(environment["PET_NNODES"])
        if not least <= joined <= most:
            raise FellApartError(
                f"nodes formed worlds of their own: this world has {joined} (GROUP_WORLD_SIZE={joined}), but "
                f"PET_NNODES={environment['PET_NNODES']}. Start torchrun without --nnodes and --standalone, "
                "so that it takes PET_NNODES",
                size=inner.size,
            )
        return
    nodes = number(environment, "SLURM_JOB_NUM_NODES", 1)
    started = [
        (claim.size, f"{claim.by} started this command {claim.size} times ({claim})") for claim in outer
    ] or [(nodes, f"Slurm gave this job {nodes} nodes (SLURM_JOB_NUM_NODES={nodes})")]
    for count, text in started:
        if joined == 1 < count:
            raise FellApartError(
                f"nodes formed worlds of their own: {text}, but this world has 1 node (GROUP_WORLD_SIZE=1). "
                f"Start torchrun once per node, with --nnodes={count} and the same --rdzv-endpoint, without "
                "--standalone. If one node is enough, set PET_NNODES=1 (an elastic job, with "
                f"--rdzv-backend=c10d, may set 1:{count})",
                size=inner.size,
            )


def _node_range(text: str) -> tuple[int, int]:
    found = re.fullmatch(rf"({_NUMBER})(?::({_NUMBER}))?", text)
    if found is None:
        raise WorldError(f"PET_NNODES must be a number or MIN:MAX (PET_NNODES: {text!r})")
    return int(found[1]), int(found[2] or found[1])


def _check_ranks_per_node(environment: Environment, inner: Claim) -> None:
    """Refuse a plain script where Kubeflow wants several ranks per node: only torchrun starts them."""
    ranks = environment.get("PET_NPROC_PER_NODE", "1")
    if inner.local_rank is None and _is_several(ranks):
        raise WorldError(
            f"PET_NPROC_PER_NODE={ranks} asks for {ranks} ranks per node, but torchrun, which reads it, did "
            f"not start this process ({inner}). Start the script with torchrun"
        )


def _is_several(ranks: str) -> bool:
    """Whether a number of ranks is more than one; it may also be a word such as auto."""
    return re.fullmatch(_NUMBER, ranks) is not None and int(ranks) > 1


def _check_copied(inner: Claim, outer: Claim) -> None:
    """Compare variables that no agent of torch set with those of another launcher."""
    if outer.size == 1 or inner.agrees_with(outer):
        return
    if inner.size < outer.size:
        raise _fell_apart(inner, outer)
    # A process per node may have started a block of ranks each.
    ranks_each, rest = divmod(inner.size, outer.size)
    if inner.local_rank is None or rest or inner.rank // ranks_each != outer.rank:
        raise _disagreement(inner, outer)


def _fell_apart(inner: Claim, outer: Claim) -> FellApartError:
    alone = "alone" if inner.size == 1 else f"one of {inner.size}"
    unset = f"{inner.names['rank']} and {inner.names['size']}"
    return FellApartError(
        f"the world fell apart: {inner} says that this process is {alone}, but {outer.by} started "
        f"{outer.size} ({outer}). Unset {unset}, or start the ranks with one launcher",
        size=inner.size,
    )


def _disagreement(inner: Claim, outer: Claim) -> DisagreementError:
    return DisagreementError(
        f"two launchers disagree: {inner}, but {outer}. Unset the variables of the one that did not start "
        "this process"
    )


def _check_alone(environment: Environment) -> None:
    """Refuse a process without a launcher where several were asked for."""
    tasks, nodes = number(environment, "SLURM_NTASKS", 1), number(environment, "SLURM_JOB_NUM_NODES", 1)
    if max(tasks, nodes) > 1:
        raise WorldError(
            "this process would train alone: Slurm gave the job several tasks or nodes "
            f"(SLURM_NTASKS={tasks}, SLURM_JOB_NUM_NODES={nodes}), but srun did not start it. Start it with "
            "srun; if it is meant to be alone, set RANK=0 WORLD_SIZE=1"
        )
    asked = environment.get("PET_NNODES", "1")
    ranks = environment.get("PET_NPROC_PER_NODE", "1")
    if _node_range(asked)[0] > 1 or _is_several(ranks):
        raise WorldError(
            f"this process would train alone: PET_NNODES={asked}, PET_NPROC_PER_NODE={ranks} ask for several "
            "ranks, but torchrun, which reads them, did not start it. Start the script with torchrun"
        )
