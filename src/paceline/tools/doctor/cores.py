"""Cores, and the threads that ranks would run on them."""

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.tools.doctor.asked import Asked
from paceline.tools.doctor.finding import Finding, fault, notice, ok
from paceline.tools.run import agent

CHECK = "cores and threads"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Cores:
    """What may be used.

    Attributes:
        machine: cores that there are.
        allowed: cores that this process may run on.
        quota: so many cores' time the control group gives; None for all of it.
        settings: environment variables that set a number of threads.
    """

    machine: int
    allowed: int
    quota: float | None
    settings: dict[str, str]

    @property
    def usable(self) -> float:
        """How many cores' time there is."""
        return self.allowed if self.quota is None else min(self.allowed, self.quota)


def gather() -> Cores:
    """Look at what this process may use."""
    settings = {name: os.environ[name] for name in THREADS if name in os.environ}
    return Cores(os.cpu_count() or 1, agent.cores(), _quota(), settings)


def _quota() -> float | None:
    """The least that a control group on the way to the root gives."""
    found = [quota for folder in _groups() if (quota := _quota_in(folder)) is not None]
    return min(found, default=None)


def _groups() -> list[Path]:
    try:
        lines = MEMBERSHIP.read_text().splitlines()
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
    """In either version's files; both have none for all of the time."""
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota.strip() in ("max", "-1") else int(quota) / int(period)


def judge(cores: Cores, asked: Asked) -> Finding:
    """Say whether the ranks of this host have a core for each of their threads."""
    data = {**vars(cores), "ranks": asked.ranks}
    best = max(1, int(cores.usable) // asked.ranks)
    told = cores.settings.get("OMP_NUM_THREADS")
    if told is not None and not (told.isdecimal() and int(told) > 0):
        found = f"OMP_NUM_THREADS is not a number of threads (OMP_NUM_THREADS: {told!r})"
        return fault(CHECK, found, f"export OMP_NUM_THREADS={best}", **data)
    # Where nothing is set, the cores are shared out when ranks are started.
    threads = max(1, cores.allowed // asked.ranks) if told is None else int(told)
    wanted = f"{asked.ranks} ranks x {threads} threads on {cores.usable:g} cores"
    if threads > best:
        found = f"threads are oversubscribed ({wanted})"
        return fault(CHECK, found, f"export OMP_NUM_THREADS={best}", **data)
    if asked.ranks > cores.usable:
        return notice(
            CHECK, f"ranks share cores ({wanted})", f"paceline run -n {int(cores.usable) or 1} …", **data
        )
    return ok(CHECK, wanted, **data)
