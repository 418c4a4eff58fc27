"""What ranks need of this host: shared memory, CPU cores for their threads, and open files."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from paceline.tools.doctor.findings import Finding, fault, notice, ok
from paceline.tools.doctor.requested_run import RequestedRun
from paceline.tools.formatting import plural
from paceline.tools.run import agent

MEMORY_CHECK, CORES_CHECK, FILES_CHECK = "shared memory", "cores and threads", "file limit"

SHM = Path("/dev/shm")  # noqa: S108 - the folder is what is checked
MIB = 2**20
# A data loader worker needs about this much for one batch of images; with less, ranks die of SIGBUS.
LEAST_SHM = 32 * MIB
# The default size in containers.
SMALL_SHM = 64 * MIB
WANTED_SHM = "8g"

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")

# Python, torch, pipes and the script's own files need fewer than this,
FILES_PER_PROCESS = 128
# and each rank adds at most this many: a socket in every group, or a pipe to the agent.
FILES_PER_RANK = 8
WANTED_FILES = 65536


@dataclass(frozen=True)
class ShmFacts:
    """Bytes in /dev/shm, None if there is no such folder; ``memfd_problem`` is why memfd_create failed."""

    total: int | None
    free: int | None
    memfd_problem: str | None


def gather_shared_memory() -> ShmFacts:
    """Read the size of /dev/shm, and try to allocate shared memory."""
    problem = _memfd_problem()
    try:
        room = os.statvfs(SHM)
    except OSError:
        return ShmFacts(None, None, problem)
    return ShmFacts(room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, problem)


def _memfd_problem() -> str | None:
    try:
        file = os.memfd_create("paceline-doctor")
    except OSError as error:
        return str(error)
    try:
        os.posix_fallocate(file, 0, MIB)
    except OSError as error:
        return str(error)
    finally:
        os.close(file)
    return None


def judge_shared_memory(memory: ShmFacts) -> Finding:
    """Whether ranks and their data loaders can share memory."""
    data = {**vars(memory)}
    if memory.total is None or memory.free is None:
        mount = f"sudo mkdir -p {SHM} && sudo mount -t tmpfs -o size={WANTED_SHM} tmpfs {SHM}"
        return fault(MEMORY_CHECK, f"there is no {SHM}, which data loaders need", mount, **data)
    room = f"free: {memory.free // MIB} MiB of {memory.total // MIB}"
    enlarge = (
        f"sudo mount -o remount,size={WANTED_SHM} {SHM}    # a container: docker run --shm-size={WANTED_SHM}"
    )
    if memory.free < LEAST_SHM:
        if memory.total >= 4 * LEAST_SHM:
            enlarge = f"ls -lS {SHM} | head    # then remove the files that nobody uses"
        return fault(MEMORY_CHECK, f"{SHM} is full ({room})", enlarge, **data)
    if memory.memfd_problem is not None:
        found = f"memfd_create does not work, so ranks need space in {SHM} ({memory.memfd_problem})"
        return notice(MEMORY_CHECK, found, **data)
    if memory.total <= SMALL_SHM:
        return notice(MEMORY_CHECK, f"{SHM} is small for data loaders ({room})", enlarge, **data)
    return ok(MEMORY_CHECK, f"{SHM} has space ({room}), memfd_create works", **data)


@dataclass(frozen=True)
class CoreFacts:
    """The CPU cores that this process may use.

    Attributes:
        machine: cores of the machine.
        allowed: cores that this process may run on.
        quota: CPU time that the control group allows, in cores; None for no limit.
        settings: environment variables that set a number of threads.
    """

    machine: int
    allowed: int
    quota: float | None
    settings: dict[str, str]

    @property
    def usable(self) -> float:
        """Cores that can be busy all the time."""
        return self.allowed if self.quota is None else min(self.allowed, self.quota)


def gather_cores() -> CoreFacts:
    """Read what this process may use."""
    settings = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    return CoreFacts(os.cpu_count() or 1, agent.available_cores(), _cpu_quota(), settings)


def _cpu_quota() -> float | None:
    """The smallest quota of this process's control group and the groups above it."""
    found = [quota for folder in _cgroup_folders() if (quota := _quota_in(folder)) is not None]
    return min(found, default=None)


def _cgroup_folders() -> list[Path]:
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            root = CGROUPS / "cpu" if controllers else CGROUPS
            own = root / path.strip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return folders


def _quota_in(folder: Path) -> float | None:
    """Read the files of cgroups version 2 or 1; both have a value that means no limit."""
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota.strip() in ("max", "-1") else int(quota) / int(period)


def judge_cores(cores: CoreFacts, run: RequestedRun) -> Finding:
    """Whether there is a core for each thread of this host's ranks."""
    data = {**vars(cores), "ranks": run.ranks}
    best = max(1, int(cores.usable) // run.ranks)
    setting = cores.settings.get("OMP_NUM_THREADS")
    if setting is not None and not (setting.isdecimal() and int(setting) > 0):
        found = f"OMP_NUM_THREADS is not a number of threads (OMP_NUM_THREADS: {setting!r})"
        return fault(CORES_CHECK, found, f"export OMP_NUM_THREADS={best}", **data)
    # Without a setting, paceline run divides the cores among the ranks.
    threads = max(1, cores.allowed // run.ranks) if setting is None else int(setting)
    wanted = f"{plural(run.ranks, 'rank')} x {plural(threads, 'thread')} on {plural(cores.usable, 'core')}"
    if threads > best:
        found = f"threads are oversubscribed ({wanted})"
        return fault(CORES_CHECK, found, f"export OMP_NUM_THREADS={best}", **data)
    if run.ranks > cores.usable:
        fix = f"paceline run -n {int(cores.usable) or 1} …"
        return notice(CORES_CHECK, f"ranks share cores ({wanted})", fix, **data)
    return ok(CORES_CHECK, wanted, **data)


@dataclass(frozen=True)
class FileLimit:
    """How many files a process may open, and how far it may raise that itself; -1 for no limit."""

    soft: int
    hard: int


def gather_file_limit() -> FileLimit:
    """Read this process's limit, which ranks inherit."""
    return FileLimit(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_file_limit(limit: FileLimit, run: RequestedRun) -> Finding:
    """Whether a rank can open a connection to every other rank."""
    needed = FILES_PER_PROCESS + FILES_PER_RANK * run.world_size
    data = {**vars(limit), "needed": needed}
    if limit.soft != resource.RLIM_INFINITY and limit.soft < needed:
        found = f"a process may open too few files (limit: {limit.soft}, needed: {needed})"
        return fault(FILES_CHECK, found, _raise_file_limit(limit, needed), **data)
    return ok(FILES_CHECK, f"a process may open {limit.soft} files (needed: {needed})", **data)


def _raise_file_limit(limit: FileLimit, needed: int) -> str:
    wanted = max(WANTED_FILES, needed)
    if limit.hard == resource.RLIM_INFINITY or limit.hard >= wanted:
        return f"ulimit -n {wanted}"
    if limit.hard >= needed:
        return f"ulimit -n {limit.hard}"
    return f"echo '* - nofile {wanted}' | sudo tee -a /etc/security/limits.conf    # then log in again"
