"""Shared memory: the room in /dev/shm, and files without a name."""

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.tools.doctor.finding import Finding, fault, notice, ok

CHECK = "shared memory"
FOLDER = Path("/dev/shm")  # noqa: S108 - it is what is looked at
MIB = 2**20
# A data loader's worker needs so much for one batch of pictures; with less, ranks die by SIGBUS.
LEAST = 32 * MIB
# What containers get unless more is asked for.
SCANTY = 64 * MIB
WANTED = "8g"


@dataclass(frozen=True)
class Memory:
    """Shared memory as it is, in bytes; ``problem`` is why a nameless file could not be had."""

    total: int | None
    free: int | None
    problem: str | None


def gather() -> Memory:
    """Look at the room, and try to get some."""
    problem = _try_nameless()
    try:
        room = os.statvfs(FOLDER)
    except OSError:
        return Memory(None, None, problem)
    return Memory(room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, problem)


def _try_nameless() -> str | None:
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


def judge(memory: Memory) -> Finding:
    """Say whether ranks and their data loaders can share memory."""
    data = {**vars(memory)}
    if memory.total is None or memory.free is None:
        return fault(
            CHECK,
            "there is no /dev/shm, which data loaders need",
            f"sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o size={WANTED} tmpfs /dev/shm",
            **data,
        )
    room = f"free: {memory.free // MIB} MiB of {memory.total // MIB}"
    enlarge = f"sudo mount -o remount,size={WANTED} /dev/shm    # a container: docker run --shm-size={WANTED}"
    if memory.free < LEAST:
        if memory.total >= 4 * LEAST:
            enlarge = "ls -lS /dev/shm | head    # remove what nobody uses"
        return fault(CHECK, f"{FOLDER} is full ({room})", enlarge, **data)
    if memory.problem is not None:
        found = f"no shared memory without a name, so ranks need room in {FOLDER} ({memory.problem})"
        return notice(CHECK, found, **data)
    if memory.total <= SCANTY:
        return notice(CHECK, f"{FOLDER} is small for data loaders ({room})", enlarge, **data)
    return ok(CHECK, f"{FOLDER} has room ({room}), nameless files work", **data)
