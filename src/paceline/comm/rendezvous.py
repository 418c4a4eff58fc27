"""Where ranks meet: a process group whose ranks find each other through a file.

A file needs no port, so any number of groups can be opened on one host at the same time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed


@contextmanager
def file_store_group(path: Path, *, rank: int, world: int, backend: str) -> Iterator[None]:
    """Open the default process group, whose ranks meet at the file ``path``; close it at the end."""
    store = distributed.FileStore(str(path), world)  # type: ignore[attr-defined]  # in no __all__ of torch
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        # Whoever ran inside may have closed the group already.
        if distributed.is_initialized():
            distributed.destroy_process_group()
