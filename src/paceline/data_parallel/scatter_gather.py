"""Scatter nested inputs over devices, and gather nested outputs back.

Both are plain differentiable torch operations (chunk, move, concatenate), so gradients of any order
flow through them. On one device scatter makes views and copies nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from typing_extensions import deprecated

from paceline.data_parallel.joins import Join, concatenate, shape, where
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
from paceline.tensors.tree import Node, Path

T = TypeVar("T", dict[Any, Any], list[Any], tuple[Any, ...])


@overload
def scatter(
    inputs: torch.Tensor, target_gpus: Iterable[DeviceLike], dim: int = ...
) -> tuple[torch.Tensor, ...]: ...
@overload
def scatter(inputs: T, target_gpus: Iterable[DeviceLike], dim: int = ...) -> list[T]: ...
@overload
def scatter(inputs: Any, target_gpus: Iterable[DeviceLike], dim: int = ...) -> Sequence[Any]: ...
def scatter(inputs: Any, target_gpus: Iterable[DeviceLike], dim: int = 0) -> Sequence[Any]:
    """Cut every tensor into near-equal chunks along ``dim``, one a device.

    A tensor gives a tuple, and fewer chunks than devices when the dimension is short. A container gives a
    list of containers of its type. Anything else, an empty container, and an object of the user's that holds
    no tensor are shared by reference.

    Raises:
        StructureError: if two tensors of the structure give different numbers of chunks.
    """
    return _scatter_all(inputs, dev.resolve_all(target_gpus), dim, "inputs")


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Iterable[DeviceLike],
    dim: int = 0,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Scatter positional and keyword arguments; the side with fewer pieces is filled up with empty ones."""
    devices = dev.resolve_all(target_gpus)
    positional = _scatter_all(inputs, devices, dim, "inputs") if inputs else []
    keyword = _scatter_all(kwargs, devices, dim, "kwargs") if kwargs else []
    count = max(len(positional), len(keyword))
    return (
        (*positional, *(() for _ in range(count - len(positional)))),
        (*keyword, *({} for _ in range(count - len(keyword)))),
    )


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Join one output a replica into one, on the target device (``'cpu'`` or ``-1`` for the CPU).

    Tensors are concatenated along ``dim``; 0-dim tensors become a vector. Containers must agree in type,
    length and keys. None stays None; numbers, strings and shared objects must be the same on all replicas.

    Raises:
        StructureError: if the outputs' structures differ; the message names the path.
        ShapeError: if tensors cannot be concatenated; the message names the path.
    """
    device = dev.CPU if target_device == -1 else dev.resolve(target_device)
    return gather_with(outputs, concatenate(device, dim))


@deprecated(
    "`is_namedtuple` is deprecated, please use the python checks instead",
    category=FutureWarning,
)
def is_namedtuple(obj: Any) -> bool:
    """Whether the object's type was made by collections.namedtuple or typing.NamedTuple."""
    return tree.is_namedtuple(obj)


def gather_with(outputs: Sequence[Any], join: Join) -> Any:
    """Walk one output a replica in step, and join the tensors found at the same place."""
    if len(outputs) == 0:
        raise NothingError("nothing to gather (outputs: [])")
    return _gather(outputs, None, join)


class _Cutter:
    """Cuts tensors for a list of devices, and sees that all give the same number of chunks."""

    def __init__(self, devices: tuple[torch.device, ...], dim: int, root: str) -> None:
        self.devices = devices
        self._dim = dim
        self._root = root
        self._only = devices[0] if devices.count(devices[0]) == len(devices) else None
        self._first: tuple[Path, int] | None = None
        self.cuts = 0

    def cut(self, tensor: torch.Tensor, path: Path) -> tuple[torch.Tensor, ...]:
        self.cuts += 1
        try:
            chunks: tuple[torch.Tensor, ...] = tensor.chunk(len(self.devices), self._dim)
        except (IndexError, RuntimeError) as error:
            what = f"{tree.show(path, self._root)} cannot be scattered"
            kind = DimensionError if isinstance(error, IndexError) else ShapeError
            raise kind(f"{what} along dimension {self._dim} ({shape(tensor)})") from error
        if self._first is None:
            self._first = (path, len(chunks))
        elif self._first[1] != len(chunks):
            raise StructureError(self._uneven(self._first, (path, len(chunks))))
        if tensor.device == self._only:
            return chunks
        try:
            return tuple(map(dev.send, chunks, self.devices))
        except RuntimeError as error:
            route = f"from {tensor.device} to {', '.join(map(str, self.devices))}"
            raise DeviceError(f"{tree.show(path, self._root)} cannot be moved ({route})") from error

    def _uneven(self, *cuts: tuple[Path, int]) -> str:
        counts = ", ".join(f"{tree.show(path, self._root)}: {count}" for path, count in cuts)
        return f"inputs give different numbers of chunks along dimension {self._dim} ({counts})"


def _scatter_all(obj: Any, devices: tuple[torch.device, ...], dim: int, root: str) -> Sequence[Any]:
    cutter = _Cutter(devices, dim, root)
    return cutter.cut(obj, None) if isinstance(obj, torch.Tensor) else _scatter(obj, None, cutter)


def _scatter(obj: Any, path: Path, cutter: _Cutter) -> list[Any]:
    node = tree.open_node(obj)
    if node is None or not node.children:
        return [obj] * len(cutter.devices)
    cuts = cutter.cuts
    columns = [
        cutter.cut(child, (path, key))
        if isinstance(child, torch.Tensor)
        else _scatter(child, (path, key), cutter)
        for key, child in zip(node.keys, node.children, strict=True)
    ]
    if cutter.cuts == cuts and not isinstance(obj, tuple | list | dict):
        # An object of the user's that holds no tensor is one for all replicas, as it is with torch.
        return [obj] * len(cutter.devices)
    # Columns without a tensor are as long as the list of devices, the others may be shorter, all alike.
    return [*map(node.rebuild, zip(*columns, strict=False))]


def _gather(outputs: Sequence[Any], path: Path, join: Join) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        _check_alike(outputs, path, lambda output: isinstance(output, torch.Tensor))
        return join(outputs, path)
    node = tree.open_node(first)
    if node is None:
        return _same(outputs, path)
    _check_alike(outputs, path, lambda output: type(output) is type(first))
    if node.by_key:
        return _gather_by_key(outputs, path, node, join)
    nodes = [node, *(cast("Node", tree.open_node(output)) for output in outputs[1:])]
    _check_in_step(nodes, path, type(first).__name__)
    columns = zip(node.keys, zip(*(one.children for one in nodes), strict=True), strict=True)
    return node.rebuild([_gather(column, (path, key), join) for key, column in columns])


def _gather_by_key(outputs: Sequence[Any], path: Path, node: Node, join: Join) -> Any:
    if any(len(output) != len(node.keys) for output in outputs):
        counts = ", ".join(f"{where(path, i)}: {len(output)}" for i, output in enumerate(outputs))
        raise StructureError(f"All dicts must have the same number of keys ({counts})")
    for replica, output in enumerate(outputs):
        for key in node.keys:
            if key not in output:
                raise MissingKeyError(
                    f"{where(path, replica)} lacks the key {key!r} that {where(path, 0)} has"
                )
    return node.rebuild([_gather([out[key] for out in outputs], (path, key), join) for key in node.keys])


def _same(outputs: Sequence[Any], path: Path) -> Any:
    first = outputs[0]
    for replica, output in enumerate(outputs):
        if not _equal(first, output):
            raise StructureError(
                f"replicas gave different values that are not tensors ({where(path, 0)}: {first!r:.80}, "
                f"{where(path, replica)}: {output!r:.80}); return tensors, or gather a 'list'"
            )
    return first


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other) or bool(one != one and other != other)  # NaN is the same on all replicas
    except Exception:  # an array's comparison, say, is no single truth
        return False


def _check_alike(outputs: Sequence[Any], path: Path, fits: Callable[[Any], bool]) -> None:
    for replica, output in enumerate(outputs):
        if not fits(output):
            raise StructureError(
                f"replicas gave different types ({where(path, 0)}: {type(outputs[0]).__name__}, "
                f"{where(path, replica)}: {type(output).__name__})"
            )


def _check_in_step(nodes: Sequence[Node], path: Path, kind: str) -> None:
    first = nodes[0]
    for replica, node in enumerate(nodes):
        if len(node.children) != len(first.children):
            raise StructureError(
                f"replicas gave {kind}s of different lengths "
                f"({where(path, 0)}: {len(first.children)}, {where(path, replica)}: {len(node.children)})"
            )
        if not _equal(node.context, first.context):
            raise StructureError(
                f"replicas gave {kind}s that differ outside their tensors "
                f"({where(path, 0)}: {first.context!r:.80}, {where(path, replica)}: {node.context!r:.80})"
            )
