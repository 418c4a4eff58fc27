"""Where two checkpoints differ: the first tensor or value, and all others."""

import pickle
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.ddp.audit.hashes import as_words
from paceline.errors import RecordingError

_METADATA = ".metadata"  # in each folder that torch.distributed.checkpoint writes


class CheckpointDifference(NamedTuple):
    """A value that is not the same in both checkpoints, and how it differs."""

    name: str
    how: str


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a file, or a folder of ``torch.distributed.checkpoint``."""
    return path.is_file() or (path / _METADATA).is_file()


def load_checkpoint(path: Path) -> Any:
    """What ``torch.save`` or ``torch.distributed.checkpoint`` has written; runs no code from the file.

    Raises:
        RecordingError: the file cannot be read.
    """
    try:
        if path.is_file():
            return torch.load(path, map_location="cpu", weights_only=True)
        # Takes a second to import, which other commands need not wait for.
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "checkpoint.pt"
            dcp_to_torch_save(path, file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise RecordingError(f"the checkpoint cannot be read ({path}: {error})") from error


def checkpoint_differences(first: Any, second: Any) -> list[CheckpointDifference]:
    """What differs, in the order of the first checkpoint; then what only the second has."""
    one, other = dict(_leaves(first)), dict(_leaves(second))
    found = []
    for name, value in one.items():
        how = _compare(value, other[name]) if name in other else "is in the first checkpoint only"
        if how is not None:
            found.append(CheckpointDifference(name, how))
    only = [name for name in other if name not in one]
    return [*found, *(CheckpointDifference(name, "is in the second checkpoint only") for name in only)]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        children: Any = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    else:
        yield name, value
        return
    for key, child in children:
        yield from _leaves(child, f"{name}.{key}" if name else str(key))


def _compare(one: Any, other: Any) -> str | None:
    """How two values differ; None if they do not."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _compare_tensors(one, other)
    if type(one) is type(other) and (one == other or repr(one) == repr(other)):
        return None
    return f"is {_shown(one)} in the first and {_shown(other)} in the second"


def _compare_tensors(one: Tensor, other: Tensor) -> str | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"is {_kind(one)} in the first and {_kind(other)} in the second"
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return _compare_tensors(one.to_dense(), other.to_dense())
    one, other = one.contiguous(), other.contiguous()
    apart = (as_words(one) != as_words(other)).view(one.numel(), -1).any(1) if one.numel() else None
    if apart is None or not apart.any():
        return None
    at = int(apart.nonzero()[0, 0])
    index = [int(each) for each in torch.unravel_index(torch.tensor(at), one.shape)] if one.dim() else []
    values = f"{one.view(-1)[at].item()!r} and {other.view(-1)[at].item()!r}"
    return f"differs in {int(apart.sum()):,} of {one.numel():,} elements, the first at {index}: {values}"


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor ({_kind(value)})"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
