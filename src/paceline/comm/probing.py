"""What a host's torch.distributed can do, found out by trying."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from paceline.comm.backend.process_group import NAME
from paceline.comm.group import Group

_c10d: Any = distributed_c10d  # declares little of what it has
# In which gradients, masks and indices come.
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex128", "complex64"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)


def available_backends() -> dict[str, bool]:
    """Backends by name, and whether this torch has them."""
    names = ("gloo", "nccl", "mpi", "ucc", "xccl", NAME)
    return {name: distributed.is_backend_available(name) for name in names}


def make_gloo_devices(interfaces: Sequence[str]) -> None:
    """Make the devices that a gloo group would make, by interface; without any, the one it would choose."""
    gloo = _c10d.ProcessGroupGloo
    for interface in interfaces:
        gloo.create_device(interface=interface)
    if not interfaces:
        gloo.create_default_device()


def meet(*, seconds: float) -> tuple[Any, int, int]:
    """Where the launched ranks meet, this rank, and how many there are."""
    met: tuple[Any, int, int] = next(_c10d.rendezvous("env://", timeout=timedelta(seconds=seconds)))
    return met


@contextmanager
def gloo_group(store: Any, *, rank: int, world: int, seconds: float) -> Iterator[Group]:
    """The default group, on gloo, whose ranks wait for each other so long at most."""
    prefixed = _c10d.PrefixStore("doctor/gloo", store)
    timeout = timedelta(seconds=seconds)
    distributed.init_process_group("gloo", store=prefixed, rank=rank, world_size=world, timeout=timeout)
    try:
        yield Group(_c10d._get_default_group())
    finally:
        distributed.destroy_process_group()


@contextmanager
def pair_group(ranks: tuple[int, int], *, seconds: float) -> Iterator[Group | None]:
    """A group of two ranks, which all ranks open at once; None on the others."""
    process_group = distributed.new_group(list(ranks), timeout=timedelta(seconds=seconds), backend="gloo")
    if distributed.get_rank() not in ranks:
        yield None
        return
    yield Group(process_group)
    distributed.destroy_process_group(process_group)


def reduced_dtypes(backend: str, *, seconds: float) -> dict[str, str | None]:
    """Types of element, and why a backend's all-reduce refuses them; every rank does this at once."""
    group = distributed.new_group(backend=backend, timeout=timedelta(seconds=seconds))
    try:
        return {name: _refusal(getattr(torch, name), group) for name in DTYPES}
    finally:
        distributed.destroy_process_group(group)


def _refusal(dtype: torch.dtype, group: Any) -> str | None:
    tensor = torch.ones(2).to(dtype)
    try:
        distributed.all_reduce(tensor, group=group)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None
