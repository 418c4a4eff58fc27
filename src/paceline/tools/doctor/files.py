"""How many files a process may have open."""

import resource
from dataclasses import dataclass

from paceline.tools.doctor.asked import Asked
from paceline.tools.doctor.finding import Finding, fault, ok

CHECK = "file limit"
# Python, torch, pipes and a script's own files take fewer than so many;
OWN = 128
# and each other rank so many: a socket in every group, or a pipe, for the agent.
EACH_RANK = 8
PLENTY = 65536


@dataclass(frozen=True)
class Limit:
    """A process's limit, and how high it may put it itself; -1 for no limit."""

    soft: int
    hard: int


def gather() -> Limit:
    """Look at this process's limit, which ranks inherit."""
    return Limit(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge(limit: Limit, asked: Asked) -> Finding:
    """Say whether so many ranks can connect to each other."""
    needed = OWN + EACH_RANK * asked.world
    data = {**vars(limit), "needed": needed}
    if limit.soft != resource.RLIM_INFINITY and limit.soft < needed:
        found = f"too few files may be open (limit: {limit.soft}, needed: {needed})"
        return fault(CHECK, found, _fix(limit, needed), **data)
    return ok(CHECK, f"{limit.soft} files may be open (needed: {needed})", **data)


def _fix(limit: Limit, needed: int) -> str:
    wanted = max(PLENTY, needed)
    if limit.hard == resource.RLIM_INFINITY or limit.hard >= wanted:
        return f"ulimit -n {wanted}"
    if limit.hard >= needed:
        return f"ulimit -n {limit.hard}"
    return f"echo '* - nofile {wanted}' | sudo tee -a /etc/security/limits.conf    # and log in again"
