"""Containers and tensors of many kinds, for tests of nested structures."""

import dataclasses
from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import MappingKey, register_pytree_node

Pair = namedtuple("Pair", ["a", "b"])
Nothing = namedtuple("Nothing", [])


class Typed(NamedTuple):
    x: Any
    y: Any = 7


class Names(list):
    pass


class Settings(dict):
    pass


@dataclasses.dataclass
class Fieldless:
    pass


@dataclasses.dataclass
class Plain:
    x: Any
    note: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    note: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenOwnSlots:
    __slots__ = ("note", "x")
    x: Any
    note: Any


@dataclasses.dataclass
class Computed:
    x: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)
    scale: dataclasses.InitVar[int] = 2

    def __post_init__(self, scale: int) -> None:
        self.doubled = self.x * scale


class Box:
    def __init__(self, *items: Any, label: str = "") -> None:
        self.items = items
        self.label = label


class KeyedBox(Box):
    pass


register_pytree_node(Box, lambda box: (box.items, box.label), lambda new, label: Box(*new, label=label))
register_pytree_node(
    KeyedBox,
    lambda box: (box.items, box.label),
    lambda new, label: KeyedBox(*new, label=label),
    flatten_with_keys_fn=lambda box: (
        [(MappingKey(f"k{i}"), item) for i, item in enumerate(box.items)],
        box.label,
    ),
)


class Tagged(torch.Tensor):
    """A tensor subclass, kept by every operation."""
