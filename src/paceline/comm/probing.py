"""What torch.distributed can do on this host, found out by trying."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from paceline.comm.backend.process_group import NAME

_c10d: Any = distributed_c10d  # its type hints leave out much of what it has
# The types that gradients, masks and indices have.
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex128", "complex64"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)


def available_backends() -> dict[str, bool]:
    """Backends by name, and whether this torch has them."""
    names = ("gloo", "nccl", "mpi", "ucc", "xccl", NAME)
    return {name: distributed.is_backend_available(name) for name in names}


def make_gloo_devices(interfaces: Sequence[str]) -> None:
    """Make the devices that a gloo group would make: one per interface, or the default one."""
    gloo = _c10d.ProcessGroupGloo
    for interface in interfaces:
        gloo.create_device(interface=interface)
    if not interfaces:
        gloo.create_default_device()


def reduced_dtypes(backend: str, *, seconds: float) -> dict[str, str | None]:
    """Why a backend's all-reduce refuses each type, or None; every rank calls this at once."""
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
