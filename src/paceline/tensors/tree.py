"""Nested structures: opened one level at a time, rebuilt as the same type, and named by path.

A structure is any nest of tuples, lists, dicts, namedtuples, dataclasses and types registered with
``torch.utils._pytree``; whatever is none of these is a leaf.
"""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

# torch 2.13: the registry that register_pytree_node fills. There is no public way to open one level.
from torch.utils._pytree import SUPPORTED_NODES as _REGISTERED

# Path pieces from the root: (parent path, key). A linked list, because most paths are never shown.
Path = tuple[Any, Any] | None


class Field(str):
    """A path piece that is reached as an attribute."""

    __slots__ = ()


class Node(NamedTuple):
    """One container, opened: the children under their keys, and how to build its like from new children."""

    keys: Sequence[Any]
    children: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    context: object = None


def open_node(obj: Any) -> Node | None:
    """The container opened one level; None for a leaf, and for a container without children."""
    kind = type(obj)
    if kind is tuple or kind is list:
        return Node(range(len(obj)), obj, kind) if obj else None
    if kind is dict or kind is OrderedDict:
        return _open_mapping(obj)
    if isinstance(obj, torch.Tensor):
        return None
    return _open_rarer(obj, kind)


def show(path: Path, root: str) -> str:
    """The path as Python would write it, such as ``outputs[1]['loss']``."""
    pieces = []
    while path is not None:
        path, key = path
        pieces.append(f".{key}" if isinstance(key, Field) else f"[{key!r}]")
    return root + "".join(reversed(pieces))


def leaves(obj: Any) -> Iterator[Any]:
    """Every leaf, in order."""
    node = open_node(obj)
    if node is None:
        yield obj
    else:
        for child in node.children:
            yield from leaves(child)


def map_leaves(change: Callable[[Any], Any], obj: Any) -> Any:
    """The same structure with every leaf changed."""
    node = open_node(obj)
    if node is None:
        return change(obj)
    return node.rebuild([map_leaves(change, child) for child in node.children])


def is_namedtuple(obj: object) -> bool:
    """Whether the object's type was made by collections.namedtuple or typing.NamedTuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def _open_rarer(obj: Any, kind: type) -> Node | None:
    if is_namedtuple(obj):
        return Node([*map(Field, obj._fields)], obj, kind._make) if obj else None  # type: ignore[attr-defined]
    if kind in _REGISTERED:
        return _open_registered(obj, kind)
    if isinstance(obj, tuple | list):
        return Node(range(len(obj)), obj, kind) if obj else None
    if isinstance(obj, dict):
        return _open_mapping(obj)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return _open_dataclass(obj)
    return None


def _open_mapping(obj: dict[Any, Any]) -> Node | None:
    if not obj:
        return None
    keys, kind = list(obj), type(obj)
    return Node(keys, list(obj.values()), lambda children: kind(zip(keys, children, strict=True)))


def _open_registered(obj: Any, kind: type) -> Node | None:
    definition = _REGISTERED[kind]
    flat, context = definition.flatten_fn(obj)
    children = list(flat)
    if not children:
        return None
    return Node(
        _registered_keys(obj, definition, len(children)),
        children,
        lambda new: definition.unflatten_fn(list(new), context),
        context,
    )


def _registered_keys(obj: Any, definition: Any, count: int) -> Sequence[Any]:
    if definition.flatten_with_keys_fn is None:
        return range(count)
    entries: Iterable[Any] = definition.flatten_with_keys_fn(obj)[0]
    return [_plain_key(entry) for entry, _ in entries]


def _plain_key(entry: Any) -> Any:
    # torch's entries carry their key as .key (mappings), .idx (sequences) or .name (attributes).
    for attribute in ("key", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return Field(getattr(entry, "name", entry))


def _open_dataclass(obj: Any) -> Node | None:
    names = [Field(field.name) for field in dataclasses.fields(obj) if hasattr(obj, field.name)]
    if not names:
        return None

    def rebuild(children: Sequence[Any]) -> Any:
        # Not the constructor: it may compute, check, or not take every field.
        like = copy.copy(obj)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(like, name, child)
        return like

    return Node(names, [getattr(obj, name) for name in names], rebuild)
