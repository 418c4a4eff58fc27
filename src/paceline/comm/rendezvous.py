"""Where ranks meet: a process group whose ranks find each other through a file, or at an address.

A file needs no port, so any number of groups can be opened on one host at the same time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import distributed


@contextmanager
def file_store_group(path: Path, *, rank: int, world: int, backend: str) -> Iterator[None]:
    """Open the default process group, whose ranks meet at the file ``path``; close it at the end."""
    store = distributed.FileStore(str(path), world)  # type: ignore[attr-defined]  # in no __all__ of torch
    with _group(store, rank=rank, world=world, backend=backend):
        yield


@contextmanager
def tcp_store_group(address: str, port: int, *, rank: int, world: int, backend: str) -> Iterator[None]:
    """The same, whose ranks meet at rank 0's address."""
    store = distributed.TCPStore(address, port, world, is_master=rank == 0)  # type: ignore[attr-defined]  # as above
    with _group(store, rank=rank, world=world, backend=backend):
        # Connecting may take a while, and a rank that is done first must not hang up on one that still tries.
        distributed.barrier()
        yield


@contextmanager
def _group(store: Any, *, rank: int, world: int, backend: str) -> Iterator[None]:
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        # Whoever ran inside may have closed the group already.
        if distributed.is_initialized():
            distributed.destroy_process_group()
