"""The ranks of one host, as a process group of their own, and which hosts there are."""

from collections.abc import Sequence
from typing import Any

from torch import distributed

from paceline.comm.group import Group
from paceline.comm.shm.local_ranks import host_id


def ranks_by_host(group: Group) -> list[list[int]]:
    """The ranks of a group, host by host; every rank calls this at once."""
    return _by_key(group.gather_objects(host_id()))


def ranks_by_member(group: Group, process_group: Any) -> list[list[int]]:
    """The ranks of a group, by the process groups that they are members of; every rank calls this at once."""
    return _by_key(group.gather_objects(tuple(distributed.get_process_group_ranks(process_group))))


def _by_key(keys: Sequence[Any]) -> list[list[int]]:
    found: dict[Any, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    return [*found.values()]


def open_group_of(group: Group, ranks: Sequence[int]) -> Any:
    """A new process group of some of a group's ranks, on the same backend; only these ranks call this."""
    return distributed.new_group(
        group.name_ranks(ranks),
        timeout=group.timeout,
        backend=distributed.get_backend(group.process_group),
        use_local_synchronization=True,
    )
