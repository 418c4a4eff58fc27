"""Nested structures of inputs and outputs: open one level, rebuild the same type, show the path of a leaf.

A structure is any nest of tuples, lists, dicts, namedtuples, dataclasses and types registered with
``torch.utils._pytree``. Everything else is a leaf.
"""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from paceline.torch_private import PYTREE_NODES, GetAttrKey, MappingKey, SequenceKey

# The keys from the root to a leaf: (parent path, key). A linked list, because most paths are never shown.
KeyPath = tuple[Any, Any] | None


class AttributeKey(str):
    """A key that is read as an attribute: ``.x``, not ``['x']``."""

    __slots__ = ()


class Container(NamedTuple):
    """The children of one container, and how to rebuild it.

    Attributes:
        keys: the key of each child.
        children: the children, in the order of their keys.
        rebuild: makes a container of the same type from new children.
        context: what else two containers must have in common to be gathered into one.
        by_key: whether children are looked up by key, whatever their order.
    """

    keys: Sequence[Any]
    children: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    context: object = None
    by_key: bool = False


def open_container(obj: Any) -> Container | None:
    """Open one level of a container; returns None for a leaf."""
    kind = type(obj)
    if kind is tuple or kind is list:
        return Container(range(len(obj)), obj, kind)
    if kind is dict or kind is OrderedDict:
        keys = list(obj)
        return Container(keys, list(obj.values()), lambda new: kind(zip(keys, new, strict=True)), by_key=True)
    if isinstance(obj, torch.Tensor):
        return None
    if kind in PYTREE_NODES:
        return _open_registered(obj, kind)
    return _open_rarer(obj, kind)


def format_path(path: KeyPath, root: str) -> str:
    """The path as Python would write it, such as ``outputs[1]['loss']``."""
    keys = []
    while path is not None:
        path, key = path
        keys.append(f".{key}" if isinstance(key, AttributeKey) else f"[{key!r}]")
    return root + "".join(reversed(keys))


def leaves(obj: Any) -> Iterator[Any]:
    """Every leaf, in order."""
    container = open_container(obj)
    if container is None:
        yield obj
    else:
        for child in container.children:
            yield from leaves(child)


def map_leaves(change: Callable[[Any], Any], obj: Any) -> Any:
    """The same structure with every leaf changed; a container in which nothing changed is kept as it is."""
    container = open_container(obj)
    if container is None:
        return change(obj)
    children = [map_leaves(change, child) for child in container.children]
    return obj if all(map(is_, children, container.children)) else container.rebuild(children)


def is_namedtuple(obj: object) -> bool:
    """Whether the object's type was made by collections.namedtuple or typing.NamedTuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def _open_rarer(obj: Any, kind: type) -> Container | None:
    if is_namedtuple(obj):
        return Container([*map(AttributeKey, obj._fields)], obj, kind._make)  # type: ignore[attr-defined]
    if isinstance(obj, tuple | list):
        return Container(range(len(obj)), obj, _sequence_type(kind))
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


def _open_mapping(obj: dict[Any, Any]) -> Container:
    keys = list(obj)

    def rebuild(children: Sequence[Any]) -> Any:
        # Not the constructor: a Counter's, say, would count the pairs.
        like = copy.copy(obj)
        for key, child in zip(keys, children, strict=True):
            like[key] = child
        return like

    return Container(keys, list(obj.values()), rebuild, by_key=True)


def _open_registered(obj: Any, kind: type) -> Container:
    definition = PYTREE_NODES[kind]
    flat, context = definition.flatten_fn(obj)
    children = list(flat)
    return Container(
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
            return AttributeKey(name)
    return entry


def _open_dataclass(obj: Any) -> Container:
    names = [AttributeKey(field.name) for field in dataclasses.fields(obj) if hasattr(obj, field.name)]

    def rebuild(children: Sequence[Any]) -> Any:
        # Not the constructor: it may compute, check, or not take every field.
        like = obj.__new__(type(obj))
        if hasattr(obj, "__dict__"):
            vars(like).update(vars(obj))
        for name, child in zip(names, children, strict=True):
            object.__setattr__(like, name, child)
        return like

    return Container(names, [getattr(obj, name) for name in names], rebuild, context=names)
