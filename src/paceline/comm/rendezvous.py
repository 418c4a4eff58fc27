"""Opens process groups, whose ranks meet at a file, at an address, or as torchrun's environment says.

A file needs no port, so any number of groups can be opened on one host at the same time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from paceline.comm.group import Group, default_process_group

_c10d: Any = distributed_c10d  # its type hints leave out much of what it has


@contextmanager
def file_store_group(path: Path, *, rank: int, world: int, backend: str) -> Iterator[None]:
    """Open the default process group, whose ranks meet at the file ``path``; close it at the end."""
    store = distributed.FileStore(str(path), world)  # type: ignore[attr-defined]  # in no __all__ of torch
    with _default_group(store, rank=rank, world=world, backend=backend):
        yield


@contextmanager
def tcp_store_group(address: str, port: int, *, rank: int, world: int, backend: str) -> Iterator[None]:
    """Open the default process group, whose ranks meet at rank 0's address; close it at the end."""
    store = distributed.TCPStore(address, port, world, is_master=rank == 0)  # type: ignore[attr-defined]  # as above
    with _default_group(store, rank=rank, world=world, backend=backend):
        # Connecting may take a while. A rank that is done first must not leave while another still tries.
        distributed.barrier()
        yield


def rendezvous_from_environment(*, seconds: float) -> tuple[Any, int, int]:
    """The store where the launched ranks meet, this rank, and the number of ranks."""
    found: tuple[Any, int, int] = next(_c10d.rendezvous("env://", timeout=timedelta(seconds=seconds)))
    return found


@contextmanager
def gloo_group(store: Any, *, rank: int, world: int, seconds: float) -> Iterator[Group]:
    """Open the default group on gloo, with a timeout; close it at the end."""
    prefixed = _c10d.PrefixStore("doctor/gloo", store)
    timeout = timedelta(seconds=seconds)
    with _default_group(prefixed, rank=rank, world=world, backend="gloo", timeout=timeout):
        yield Group(default_process_group())


@contextmanager
def pair_group(ranks: tuple[int, int], *, seconds: float) -> Iterator[Group | None]:
    """Open a group of two ranks; all ranks call this at once, and the other ranks get None."""
    process_group = distributed.new_group(list(ranks), timeout=timedelta(seconds=seconds), backend="gloo")
    if distributed.get_rank() not in ranks:
        yield None
        return
    yield Group(process_group)
    distributed.destroy_process_group(process_group)


@contextmanager
def _default_group(
    store: Any, *, rank: int, world: int, backend: str, timeout: timedelta | None = None
) -> Iterator[None]:
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        yield
    finally:
        # What ran inside may have closed the group already.
        if distributed.is_initialized():
            distributed.destroy_process_group()
