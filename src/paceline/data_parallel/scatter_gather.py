"""Scatter nested inputs over devices, and gather nested outputs back.

Both are plain differentiable torch operations (chunk, copy, cat), so gradients of any order flow through
them. On one device scatter makes views and copies nothing.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from typing_extensions import deprecated

from paceline.errors import (
    DeviceError,
    DimensionError,
    MissingKeyError,
    NothingError,
    ShapeError,
    StructureError,
)
from paceline.tensors import devices as dev
from paceline.tensors import tree
from paceline.tensors.devices import DeviceLike
from paceline.tensors.tree import Container, KeyPath

T = TypeVar("T", dict[Any, Any], list[Any], tuple[Any, ...])
# Makes one tensor of the tensors found at the same path in all outputs.
Combine = Callable[[Sequence[torch.Tensor], KeyPath], torch.Tensor]


@overload
def scatter(
    inputs: torch.Tensor, target_gpus: Iterable[DeviceLike], dim: int = ...
) -> tuple[torch.Tensor, ...]: ...
@overload
def scatter(inputs: T, target_gpus: Iterable[DeviceLike], dim: int = ...) -> list[T]: ...
@overload
def scatter(inputs: Any, target_gpus: Iterable[DeviceLike], dim: int = ...) -> Sequence[Any]: ...
def scatter(inputs: Any, target_gpus: Iterable[DeviceLike], dim: int = 0) -> Sequence[Any]:
    """Cut every tensor into near-equal chunks along ``dim``, one per device.

    A tensor gives a tuple, with fewer chunks than devices if the dimension is short. A container gives a
    list of containers of its type. Anything else, an empty container, and an object of the user's that holds
    no tensor are shared by reference.

    Raises:
        StructureError: if two tensors of the structure give different numbers of chunks.
    """
    return _scatter_root(inputs, dev.resolve_all(target_gpus), dim, "inputs")


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Iterable[DeviceLike],
    dim: int = 0,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Scatter positional and keyword arguments; the shorter result is filled up with empty ones."""
    devices = dev.resolve_all(target_gpus)
    positional = _scatter_root(inputs, devices, dim, "inputs") if inputs else []
    keyword = _scatter_root(kwargs, devices, dim, "kwargs") if kwargs else []
    count = max(len(positional), len(keyword))
    return (
        (*positional, *(() for _ in range(count - len(positional)))),
        (*keyword, *({} for _ in range(count - len(keyword)))),
    )


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Combine the outputs of all replicas on the target device (``'cpu'`` or ``-1`` for the CPU).

    Tensors are concatenated along ``dim``; 0-dim tensors become a vector. Containers must agree in type,
    length and keys. None stays None; numbers, strings and shared objects must be the same on all replicas.

    Raises:
        StructureError: if the outputs' structures differ; the message names the path.
        ShapeError: if tensors cannot be concatenated; the message names the path.
    """
    device = dev.CPU if target_device == -1 else dev.resolve(target_device)
    return gather_with(cat(device, dim), outputs)


@deprecated(
    "`is_namedtuple` is deprecated, please use the python checks instead",
    category=FutureWarning,
)
def is_namedtuple(obj: Any) -> bool:
    """Whether the object's type was made by collections.namedtuple or typing.NamedTuple."""
    return tree.is_namedtuple(obj)


def gather_with(combine: Combine, outputs: Sequence[Any]) -> Any:
    """Walk the outputs of all replicas together, and combine the tensors at each path."""
    if len(outputs) == 0:
        raise NothingError("nothing to gather (outputs: [])")
    return _gather(outputs, None, combine)


def cat(device: torch.device, dim: int) -> Combine:
    """Concatenate along ``dim``; scalars become a vector."""

    def combine(tensors: Sequence[torch.Tensor], path: KeyPath) -> torch.Tensor:
        if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
            warnings.warn(
                # torch's text, because users filter this warning by it.
                "Was asked to gather along dimension 0, but all input tensors were scalars; "
                "will instead unsqueeze and return a vector.",
                stacklevel=2,
            )
            return torch.stack(_all_on(device, tensors, path))
        _check_shapes(tensors, path, dim)
        return torch.cat(_all_on(device, tensors, path), dim)

    return combine


def stack(device: torch.device) -> Combine:
    """Stack along a new first dimension."""

    def combine(tensors: Sequence[torch.Tensor], path: KeyPath) -> torch.Tensor:
        _check_shapes(tensors, path)
        return torch.stack(_all_on(device, tensors, path))

    return combine


def weighted_mean(device: torch.device, rows: Sequence[int]) -> Combine:
    """The mean over replicas, each weighted by its number of rows."""
    weights = [count / sum(rows) for count in rows] if any(rows) else [1 / len(rows)] * len(rows)

    def combine(tensors: Sequence[torch.Tensor], path: KeyPath) -> torch.Tensor:
        _check_shapes(tensors, path)
        terms = [
            tensor * weight for tensor, weight in zip(_all_on(device, tensors, path), weights, strict=True)
        ]
        return torch.stack(terms).sum(0)

    return combine


class _Chunker:
    """Cuts tensors into one chunk per device, and checks that all tensors give the same number of chunks."""

    def __init__(self, devices: tuple[torch.device, ...], dim: int, root: str) -> None:
        self.devices = devices
        self._dim = dim
        self._root = root
        self._only_device = devices[0] if devices.count(devices[0]) == len(devices) else None
        self._first: tuple[KeyPath, int] | None = None
        self.tensors = 0

    def chunk(self, tensor: torch.Tensor, path: KeyPath) -> tuple[torch.Tensor, ...]:
        self.tensors += 1
        try:
            chunks: tuple[torch.Tensor, ...] = tensor.chunk(len(self.devices), self._dim)
        except (IndexError, RuntimeError) as error:
            what = f"{tree.format_path(path, self._root)} cannot be scattered"
            kind = DimensionError if isinstance(error, IndexError) else ShapeError
            raise kind(f"{what} along dimension {self._dim} ({_describe(tensor)})") from error
        if self._first is None:
            self._first = (path, len(chunks))
        elif self._first[1] != len(chunks):
            raise StructureError(self._uneven(self._first, (path, len(chunks))))
        if tensor.device == self._only_device:
            return chunks
        try:
            return tuple(map(dev.send, chunks, self.devices))
        except RuntimeError as error:
            route = f"from {tensor.device} to {', '.join(map(str, self.devices))}"
            raise DeviceError(f"{tree.format_path(path, self._root)} cannot be moved ({route})") from error

    def _uneven(self, *chunked: tuple[KeyPath, int]) -> str:
        counts = ", ".join(f"{tree.format_path(path, self._root)}: {count}" for path, count in chunked)
        return f"inputs give different numbers of chunks along dimension {self._dim} ({counts})"


def _scatter_root(obj: Any, devices: tuple[torch.device, ...], dim: int, root: str) -> Sequence[Any]:
    chunker = _Chunker(devices, dim, root)
    return chunker.chunk(obj, None) if isinstance(obj, torch.Tensor) else _scatter(obj, None, chunker)


def _scatter(obj: Any, path: KeyPath, chunker: _Chunker) -> list[Any]:
    container = tree.open_container(obj)
    if container is None or not container.children:
        return [obj] * len(chunker.devices)
    tensors_before = chunker.tensors
    scattered = [
        chunker.chunk(child, (path, key))
        if isinstance(child, torch.Tensor)
        else _scatter(child, (path, key), chunker)
        for key, child in zip(container.keys, container.children, strict=True)
    ]
    if chunker.tensors == tensors_before and not isinstance(obj, tuple | list | dict):
        # An object of the user's that holds no tensor is one for all replicas, as it is with torch.
        return [obj] * len(chunker.devices)
    # Without a tensor a child gives one entry per device. With tensors it may give fewer; all give the same.
    return [*map(container.rebuild, zip(*scattered, strict=False))]


def _gather(outputs: Sequence[Any], path: KeyPath, combine: Combine) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        _check_types(outputs, path, lambda output: isinstance(output, torch.Tensor))
        return combine(outputs, path)
    container = tree.open_container(first)
    if container is None:
        return _same_value(outputs, path)
    _check_types(outputs, path, lambda output: type(output) is type(first))
    if container.by_key:
        return _gather_by_key(outputs, path, container, combine)
    containers = [container, *(cast("Container", tree.open_container(output)) for output in outputs[1:])]
    _check_containers(containers, path, type(first).__name__)
    children = zip(*(each.children for each in containers), strict=True)
    return container.rebuild(
        [_gather(same, (path, key), combine) for key, same in zip(container.keys, children, strict=True)]
    )


def _gather_by_key(outputs: Sequence[Any], path: KeyPath, container: Container, combine: Combine) -> Any:
    keys = container.keys
    if any(len(output) != len(keys) for output in outputs):
        counts = ", ".join(f"{_output_path(path, i)}: {len(output)}" for i, output in enumerate(outputs))
        raise StructureError(f"All dicts must have the same number of keys ({counts})")
    for replica, output in enumerate(outputs):
        for key in keys:
            if key not in output:
                raise MissingKeyError(
                    f"{_output_path(path, replica)} lacks the key {key!r} that {_output_path(path, 0)} has"
                )
    return container.rebuild([_gather([out[key] for out in outputs], (path, key), combine) for key in keys])


def _same_value(outputs: Sequence[Any], path: KeyPath) -> Any:
    first = outputs[0]
    for replica, output in enumerate(outputs):
        if not _equal(first, output):
            raise StructureError(
                f"replicas returned different values that are not tensors ({_output_path(path, 0)}: "
                f"{first!r:.80}, {_output_path(path, replica)}: {output!r:.80}); return tensors, or use "
                "gather='list'"
            )
    return first


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other) or bool(one != one and other != other)  # NaN is the same on all replicas
    except Exception:  # the comparison of two arrays, for example, is not a single boolean
        return False


def _check_types(outputs: Sequence[Any], path: KeyPath, matches: Callable[[Any], bool]) -> None:
    for replica, output in enumerate(outputs):
        if not matches(output):
            raise StructureError(
                f"replicas returned different types ({_output_path(path, 0)}: {type(outputs[0]).__name__}, "
                f"{_output_path(path, replica)}: {type(output).__name__})"
            )


def _check_containers(containers: Sequence[Container], path: KeyPath, kind: str) -> None:
    first = containers[0]
    for replica, each in enumerate(containers):
        if len(each.children) != len(first.children):
            raise StructureError(
                f"replicas returned {kind}s of different lengths ({_output_path(path, 0)}: "
                f"{len(first.children)}, {_output_path(path, replica)}: {len(each.children)})"
            )
        if not _equal(each.context, first.context):
            raise StructureError(
                f"replicas returned {kind}s that differ outside their tensors ({_output_path(path, 0)}: "
                f"{first.context!r:.80}, {_output_path(path, replica)}: {each.context!r:.80})"
            )


def _check_shapes(tensors: Sequence[torch.Tensor], path: KeyPath, dim: int | None = None) -> None:
    first = tensors[0]
    if dim is not None and not -first.dim() <= dim < first.dim():
        raise DimensionError(
            f"{_output_path(path, 0)} has no dimension {dim} to gather along ({_describe(first)})"
        )
    for replica, tensor in enumerate(tensors):
        if not _can_combine(first, tensor, dim):
            along = "" if dim is None else f" along dimension {dim}"
            raise ShapeError(
                f"replicas returned tensors that do not fit together{along} ({_output_path(path, 0)}: "
                f"{_describe(first)}, {_output_path(path, replica)}: {_describe(tensor)})"
            )


def _can_combine(first: torch.Tensor, tensor: torch.Tensor, dim: int | None) -> bool:
    if tensor.dtype != first.dtype or tensor.dim() != first.dim():
        return False
    free = None if dim is None else dim % first.dim()
    return all(tensor.size(i) == first.size(i) for i in range(first.dim()) if i != free)


def _all_on(device: torch.device, tensors: Sequence[torch.Tensor], path: KeyPath) -> list[torch.Tensor]:
    moved = []
    for replica, tensor in enumerate(tensors):
        try:
            moved.append(dev.send(tensor, device))
        except RuntimeError as error:
            route = f"from {tensor.device} to {device}"
            raise DeviceError(f"{_output_path(path, replica)} cannot be moved ({route})") from error
    return moved


def _output_path(path: KeyPath, replica: int) -> str:
    return f"outputs[{replica}]{tree.format_path(path, '')}"


def _describe(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
