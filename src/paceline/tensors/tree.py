"""Nested structures: opened one level at a time, rebuilt as the same type, and named by path.

A structure is any nest of tuples, lists, dicts, namedtuples, dataclasses and types registered with
``torch.utils._pytree``; whatever is none of these is a leaf.
"""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

# torch 2.13: the registry that register_pytree_node fills. There is no public way to open one level.
from torch.utils._pytree import SUPPORTED_NODES as _REGISTERED
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey

# Path pieces from the root: (parent path, key). A linked list, because most paths are never shown.
Path = tuple[Any, Any] | None


class Field(str):
    """A path piece that is reached as an attribute."""

    __slots__ = ()


class Node(NamedTuple):
    """One container, opened.

    Attributes:
        keys: where each child is.
        children: what is there.
        rebuild: makes a container of the same kind from new children.
        context: what two containers must have in common to be walked in step.
        by_key: whether children are found by key, whatever their order.
    """

    keys: Sequence[Any]
    children: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    context: object = None
    by_key: bool = False


def open_node(obj: Any) -> Node | None:
    """The container opened one level; None for a leaf."""
    kind = type(obj)
    if kind is tuple or kind is list:
        return Node(range(len(obj)), obj, kind)
    if kind is dict or kind is OrderedDict:
        keys = list(obj)
        return Node(keys, list(obj.values()), lambda new: kind(zip(keys, new, strict=True)), by_key=True)
    if isinstance(obj, torch.Tensor):
        return None
    if kind in _REGISTERED:
        return _open_registered(obj, kind)
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
    """The same structure with every leaf changed; a container in which nothing changed is kept as it is."""
    node = open_node(obj)
    if node is None:
        return change(obj)
    children = [map_leaves(change, child) for child in node.children]
    return obj if all(map(is_, children, node.children)) else node.rebuild(children)


def is_namedtuple(obj: object) -> bool:
    """Whether the object's type was made by collections.namedtuple or typing.NamedTuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def _open_rarer(obj: Any, kind: type) -> Node | None:
    if is_namedtuple(obj):
        return Node([*map(Field, obj._fields)], obj, kind._make)  # type: ignore[attr-defined]
    if isinstance(obj, tuple | list):
        return Node(range(len(obj)), obj, _sequence_type(kind))
    if isinstance(obj, dict):
        return _open_mapping(obj)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return _open_dataclass(obj)
    return None


def _sequence_type(kind: Any) -> Any:
    """The type itself if it is built as tuple or list are, else the plain one, as torch gives."""
    plain: Any = tuple if issubclass(kind, tuple) else list
    is_plain = kind.__new__ is plain.__new__ and kind.__init__ is plain.__init__
    return kind if is_plain else plain


def _open_mapping(obj: dict[Any, Any]) -> Node:
    keys = list(obj)

    def rebuild(children: Sequence[Any]) -> Any:
        # Not the constructor: a Counter's, say, would count the pairs.
        like = copy.copy(obj)
        for key, child in zip(keys, children, strict=True):
            like[key] = child
        return like

    return Node(keys, list(obj.values()), rebuild, by_key=True)


def _open_registered(obj: Any, kind: type) -> Node:
    definition = _REGISTERED[kind]
    flat, context = definition.flatten_fn(obj)
    children = list(flat)
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
    match entry:
        case MappingKey(key):
            return key
        case SequenceKey(index):
            return index
        case GetAttrKey(name):
            return Field(name)
    return entry


def _open_dataclass(obj: Any) -> Node:
    names = [Field(field.name) for field in dataclasses.fields(obj) if hasattr(obj, field.name)]

    def rebuild(children: Sequence[Any]) -> Any:
        # Not the constructor: it may compute, check, or not take every field.
        like = obj.__new__(type(obj))
        if hasattr(obj, "__dict__"):
            vars(like).update(vars(obj))
        for name, child in zip(names, children, strict=True):
            object.__setattr__(like, name, child)
        return like

    return Node(names, [getattr(obj, name) for name in names], rebuild, context=names)
