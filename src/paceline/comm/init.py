"""``paceline.init``: opens the default process group of whichever launcher started the process."""

import os
import sys
import weakref
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from paceline.comm.backend.process_group import NAME
from paceline.comm.launcher_claims import Launcher
from paceline.comm.launchers import LaunchedWorld, find_world, where_ranks_wait
from paceline.comm.meeting import Meeting, tell_waiting_ranks
from paceline.comm.membership import Membership, own_membership
from paceline.errors import DeviceError, FellApartError, OptionError, WorldError
from paceline.tensors.devices import CPU, accelerator_type, all_accelerators, current_device

_distributed: Any = distributed  # its type hints leave out the stores
# The meetings that this process has joined.
_joined: set[str] = set()
# The store of the last meeting. It is kept, because rank 0 would give up its port with it.
_kept: dict[tuple[str | None, int | None, bool], Any] = {}


@dataclass(frozen=True)
class LaunchedRank:
    """What ``paceline.init`` found.

    Attributes:
        rank: this process's rank.
        world_size: the number of ranks.
        local_rank: this process's number among the ranks of its host; if the group was open already and no
            variable says it, the rank.
        device: the device to train on.
        launcher: the name of the launcher.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    launcher: str


def init(*, backend: str | None = None, timeout: timedelta | None = None) -> LaunchedRank:
    """Open the default process group, whichever launcher started this process.

    It takes rank, world and address from the variables of torchrun, ``paceline run``, Open MPI, MPICH, Slurm,
    Kubeflow or Ray. Without a launcher, the process is a world of one. It makes the accelerator of this local
    rank the current device, sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
    and says on rank 0 what it found. If the group is open already, it is taken as it is.

    Under ``paceline run --heal`` the group has this rank alone, until ``paceline.Run`` meets the others.

    Args:
        backend: as in ``init_process_group``. By default, ``"cpu:paceline"`` without an accelerator, and
            otherwise gloo with the accelerator's own.
        timeout: how long to wait for other ranks, here and in collectives; torch's default if None.

    Raises:
        OptionError: if the timeout is not a positive timedelta, or a group is open with another backend.
        WorldError: if the launchers' variables describe no world, or several.
        MeetingError: if the ranks cannot meet, or are not of one world.
    """
    _check_timeout(timeout)
    if distributed.is_initialized():
        return _take_open_group(backend)
    if (membership := own_membership()) is not None:
        return _open_alone(membership, backend, timeout)
    world = _find_world()
    limit = timeout or distributed.constants.default_pg_timeout
    world, store, device = _meet(world, limit)
    backend = backend or _backend_for(device)
    distributed.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )
    _export(world)
    if world.rank == 0:
        sys.stderr.write(f"paceline: {describe(world)}; backend {backend}, device {device}\n")
        sys.stderr.flush()
    assert world.local_rank is not None
    return LaunchedRank(world.rank, world.size, world.local_rank, device, world.launcher.value)


def _open_alone(membership: Membership, backend: str | None, timeout: timedelta | None) -> LaunchedRank:
    """In a run that is healed, a rank is alone until ``paceline.Run`` meets the others.

    A rank that takes another's place comes while the others train, and they wait for it in ``Run`` only.
    """
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device, problem = _choose_device(local_rank)
    if problem is not None:
        raise DeviceError(problem)
    membership.open_alone(backend or _backend_for(device), timeout)
    return LaunchedRank(rank, size, local_rank, device, "paceline run --heal")


def _find_world() -> LaunchedWorld:
    """What the launcher says; if it says something wrong here, ranks on which it does not are told."""
    starter = _starter()
    try:
        return find_world(os.environ, starter=starter)
    except WorldError as error:
        _kept.clear()  # no longer a store in which somebody may wait
        if (place := where_ranks_wait(os.environ, starter=starter)) is not None:
            tell_waiting_ranks(place, str(error), joined=_joined)
        raise


def describe(world: LaunchedWorld) -> str:
    """What was found, and where."""
    if world.launcher is Launcher.NONE:
        return "no launcher, one rank"
    sources = world.sources or {}
    found = f"{world.size} rank{'s' * (world.size > 1)}, started by {world.launcher.value}"
    if world.launcher is not Launcher.VARIABLES:
        found += f" ({sources['rank']}, {sources['size']})"
    if world.address is None:
        return found
    where = dict.fromkeys((sources["address"], sources["port"]))
    return f"{found}; they meet at {world.address} port {world.port} ({', '.join(where)})"


def _check_timeout(timeout: object) -> None:
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise OptionError(f"timeout must be a positive timedelta (timeout: {timeout!r})")


def _take_open_group(backend: str | None) -> LaunchedRank:
    rank, size, opened = distributed.get_rank(), distributed.get_world_size(), distributed.get_backend()
    if backend is not None and not _names(backend) & _names(opened):
        raise OptionError(
            f"the default process group is open already, with another backend (open: {opened}, "
            f"backend: {backend}); call init without it"
        )
    try:
        found = find_world(os.environ, starter=_starter())
    except WorldError as error:
        if isinstance(error, FellApartError) and error.size == size:
            raise  # the script has opened the world that fell apart
        found = LaunchedWorld(Launcher.NONE)  # the group was opened by someone who knew better
    if size == 1 < found.size:
        raise WorldError(
            f"the world fell apart: the open process group has 1 rank, but {found.launcher.value} started "
            f"{found.size} ({describe(found)}); open it with their number, or let paceline.init do it"
        )
    is_same = (found.rank, found.size) == (rank, size)
    local_rank = found.local_rank if is_same and found.local_rank is not None else rank
    return LaunchedRank(rank, size, local_rank, current_device(), found.launcher.value)


def _names(backend: str) -> set[str]:
    """The backends of a text such as "cpu:gloo,cuda:nccl"."""
    return {pair.rpartition(":")[2] for pair in backend.split(",")}


def _meet(world: LaunchedWorld, limit: timedelta) -> tuple[LaunchedWorld, Any, torch.device]:
    """Meet the other ranks, and choose the device; an error of one rank is raised on all of them."""
    if world.size == 1:
        world = replace(world, local_rank=world.local_rank or 0, local_size=1)
        device, problem = _choose_device(world.local_rank or 0)
        if problem is not None:
            raise DeviceError(problem)
        return world, _distributed.HashStore(), device
    where = (world.address, world.port, world.rank == 0)
    kept = weakref.ref(_kept[where]) if where in _kept else lambda: None
    meeting = Meeting(world, seconds=limit.total_seconds(), joined=_joined, store=_kept.pop(where, None))
    _kept.clear()
    try:
        world, device = _meet_in(meeting, world)
    except BaseException:
        # Wrappers of an earlier group may hold that store, and with it rank 0's port.
        if meeting.store is not None and meeting.store is kept():
            _kept[where] = meeting.store
        meeting.close()
        raise
    _kept[where] = meeting.store
    return world, meeting.group_store(), device


def _meet_in(meeting: Meeting, world: LaunchedWorld) -> tuple[LaunchedWorld, torch.device]:
    meeting.call_the_roll()
    if world.local_rank is None:
        local_rank, local_size = meeting.local_place()
        world = replace(world, local_rank=local_rank, local_size=local_size)
    assert world.local_rank is not None
    device, problem = _choose_device(world.local_rank)
    meeting.agree("devices", problem)
    return world, device


def _choose_device(local_rank: int) -> tuple[torch.device, str | None]:
    """The device of a local rank, which becomes the current one, and what is wrong with it."""
    try:
        devices = all_accelerators()
        if not devices:
            return CPU, None
        # Launchers may let each rank see its own device only.
        index = 0 if len(devices) == 1 else local_rank
        if index >= len(devices):
            names = ", ".join(map(str, devices))
            return CPU, f"more ranks than devices on this host (local rank: {local_rank}, devices: {names})"
        torch.accelerator.set_device_index(index)
    except Exception as error:  # for the other ranks too, which would wait
        return CPU, f"the device of local rank {local_rank} cannot be used: {error!r}"
    return devices[index], None


def _backend_for(device: torch.device) -> str:
    """The accelerator's own backend beside gloo; without one, ours, which uses shared memory on one host."""
    if device == CPU:
        return f"cpu:{NAME}"
    try:
        own = distributed.get_default_backend_for_device(device)
    except ValueError:
        own = None
    if own is None or not distributed.is_backend_available(own):
        return "gloo"
    return f"cpu:gloo,{accelerator_type()}:{own}"


def _export(world: LaunchedWorld) -> None:
    """Set the variables of torchrun that libraries read."""
    if world.size == 1:
        return  # a launcher that this process starts would find them, and take them for its own
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": world.address,
        "MASTER_PORT": world.port,
    }
    os.environ.update({name: str(value) for name, value in values.items() if value is not None})


def _starter() -> str:
    """Identifies the process that started all ranks of this host: the closest one without PMI's variables."""
    pid = os.getppid()
    try:
        while b"\0PMI_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(_stat(pid)[1])
        return f"{pid}.{_stat(pid)[19]}"  # with the time when it started, because pids are used again
    except OSError:  # of another user, or no /proc
        return str(pid)


def _stat(pid: int) -> list[str]:
    """The fields of a process's state, without its name, which may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
