"""How tensors found at the same place in the replicas' outputs become one tensor."""

import warnings
from collections.abc import Callable, Sequence

import torch

from paceline.errors import DeviceError, DimensionError, ShapeError
from paceline.tensors import devices as dev
from paceline.tensors import tree
from paceline.tensors.tree import Path

Join = Callable[[Sequence[torch.Tensor], Path], torch.Tensor]


def concatenate(device: torch.device, dim: int) -> Join:
    """One after the other along ``dim``; scalars become a vector."""

    def join(tensors: Sequence[torch.Tensor], path: Path) -> torch.Tensor:
        if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
            warnings.warn(
                # torch's text, because users filter this warning by it.
                "Was asked to gather along dimension 0, but all input tensors were scalars; "
                "will instead unsqueeze and return a vector.",
                stacklevel=2,
            )
            return torch.stack(_on(device, tensors, path))
        _check_fit(tensors, path, dim)
        return torch.cat(_on(device, tensors, path), dim)

    return join


def stack(device: torch.device) -> Join:
    """Side by side, along a new first dimension."""

    def join(tensors: Sequence[torch.Tensor], path: Path) -> torch.Tensor:
        _check_fit(tensors, path)
        return torch.stack(_on(device, tensors, path))

    return join


def mean(device: torch.device, rows: Sequence[int]) -> Join:
    """The mean over replicas, each weighed by its number of rows."""
    shares = [count / sum(rows) for count in rows] if any(rows) else [1 / len(rows)] * len(rows)

    def join(tensors: Sequence[torch.Tensor], path: Path) -> torch.Tensor:
        _check_fit(tensors, path)
        parts = [tensor * share for tensor, share in zip(_on(device, tensors, path), shares, strict=True)]
        return torch.stack(parts).sum(0)

    return join


def where(path: Path, replica: int) -> str:
    """The path inside one replica's output."""
    return f"outputs[{replica}]{tree.show(path, '')}"


def shape(tensor: torch.Tensor) -> str:
    """A tensor's shape and type, for a message."""
    return f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def _on(device: torch.device, tensors: Sequence[torch.Tensor], path: Path) -> list[torch.Tensor]:
    return [_sent(device, tensor, path, replica) for replica, tensor in enumerate(tensors)]


def _sent(device: torch.device, tensor: torch.Tensor, path: Path, replica: int) -> torch.Tensor:
    try:
        return dev.send(tensor, device)
    except RuntimeError as error:
        route = f"from {tensor.device} to {device}"
        raise DeviceError(f"{where(path, replica)} cannot be moved ({route})") from error


def _check_fit(tensors: Sequence[torch.Tensor], path: Path, dim: int | None = None) -> None:
    first = tensors[0]
    if dim is not None and not -first.dim() <= dim < first.dim():
        raise DimensionError(f"{where(path, 0)} has no dimension {dim} to gather along ({shape(first)})")
    for replica, tensor in enumerate(tensors):
        if not _fits(first, tensor, dim):
            along = "" if dim is None else f" along dimension {dim}"
            raise ShapeError(
                f"replicas gave tensors that do not fit together{along} "
                f"({where(path, 0)}: {shape(first)}, {where(path, replica)}: {shape(tensor)})"
            )


def _fits(first: torch.Tensor, tensor: torch.Tensor, dim: int | None) -> bool:
    if tensor.dtype != first.dtype or tensor.dim() != first.dim():
        return False
    free = None if dim is None else dim % first.dim()
    return all(tensor.size(i) == first.size(i) for i in range(first.dim()) if i != free)
