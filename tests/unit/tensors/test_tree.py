"""Containers are opened and rebuilt as their own type; paths are written as Python does."""

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from types import MappingProxyType
from typing import Any

import pytest
import torch
from containers import Box, Fieldless, Names, Nothing, Pair, Settings, Typed
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, register_constant, register_pytree_node

from paceline.tensors import tree
from paceline.tensors.tree import AttributeKey


class Span(tuple):
    __slots__ = ()


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True)
class FrozenOwnSlots:
    __slots__ = ("x", "y")
    x: Any
    y: Any


@dataclasses.dataclass(kw_only=True)
class KeywordOnly:
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Computed:
    x: Any
    y: Any = dataclasses.field(init=False)
    scale: dataclasses.InitVar[int] = 1

    def __post_init__(self, scale: int) -> None:
        self.y = self.x * scale


@dataclasses.dataclass
class Positive:
    x: Any
    y: Any = 0

    def __post_init__(self) -> None:
        if self.x <= 0:
            raise ValueError("not positive")


@dataclasses.dataclass
class Child(Plain):
    z: Any = None


class KeyedBox(Box):
    pass


class AttributeBox(Box):
    pass


@dataclasses.dataclass(frozen=True)
class Constant:
    x: Any = 1


register_pytree_node(
    KeyedBox,
    lambda box: (box.items, box.label),
    lambda new, label: KeyedBox(*new, label=label),
    flatten_with_keys_fn=lambda box: (
        [(MappingKey(f"k{i}") if i else SequenceKey(i), item) for i, item in enumerate(box.items)],
        box.label,
    ),
)
register_pytree_node(
    AttributeBox,
    lambda box: (box.items, box.label),
    lambda new, label: AttributeBox(*new, label=label),
    flatten_with_keys_fn=lambda box: ([(GetAttrKey("item"), item) for item in box.items], box.label),
)
register_constant(Constant)


@pytest.mark.parametrize(
    ("container", "keys"),
    [
        ((1, 2), [0, 1]),
        ([1, 2], [0, 1]),
        ({"a": 1, 5: 2}, ["a", 5]),
        (OrderedDict(b=1, a=2), ["b", "a"]),
        (defaultdict(list, b=1, a=2), ["b", "a"]),
        (deque([1, 2], maxlen=3), [0, 1]),
        (Pair(1, 2), ["a", "b"]),
        (Typed(1, 2), ["x", "y"]),
        (Names([1, 2]), [0, 1]),
        (Span([1, 2]), [0, 1]),
        (Settings(a=1, b=2), ["a", "b"]),
        (Plain(1, 2), ["x", "y"]),
        (Frozen(1, 2), ["x", "y"]),
        (Slotted(1, 2), ["x", "y"]),
        (FrozenSlotted(1, 2), ["x", "y"]),
        (FrozenOwnSlots(1, 2), ["x", "y"]),
        (KeywordOnly(x=1, y=2), ["x", "y"]),
        (Computed(1, scale=2), ["x", "y"]),
        (Positive(1, 2), ["x", "y"]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) or type(value) is not list else "",
)
def test_a_container_opens_and_is_rebuilt_as_its_own_type(container: Any, keys: list[Any]) -> None:
    opened = tree.open_container(container)
    assert opened is not None
    assert list(opened.keys) == keys
    assert list(opened.children) == [1, 2]
    rebuilt = opened.rebuild([1, 2])
    assert type(rebuilt) is type(container)
    assert rebuilt is not container
    assert rebuilt == container


@pytest.mark.parametrize(
    "container",
    [[1, 2], {"a": 1, "b": 2}, Plain(1, 2), Slotted(1, 2), FrozenSlotted(1, 2), FrozenOwnSlots(1, 2)],
    ids=lambda container: type(container).__name__,
)
def test_rebuilding_leaves_the_original_alone(container: Any) -> None:
    rebuilt = tree.open_container(container).rebuild(["new", "newer"])
    assert list(tree.open_container(rebuilt).children) == ["new", "newer"]
    assert list(tree.open_container(container).children) == [1, 2]


def test_a_defaultdict_keeps_its_factory() -> None:
    rebuilt = tree.map_leaves(str, defaultdict(list, a=1))
    assert rebuilt == {"a": "1"}
    assert rebuilt["new"] == []


def test_a_deque_keeps_its_limit() -> None:
    assert tree.map_leaves(str, deque([1], maxlen=3)) == deque(["1"])
    assert tree.map_leaves(str, deque([1], maxlen=3)).maxlen == 3


def test_a_counter_keeps_its_counts() -> None:
    assert tree.map_leaves(lambda count: count, Counter("aab")) == Counter("aab")


def test_a_return_type_of_torch_is_rebuilt() -> None:
    result = tree.map_leaves(lambda leaf: leaf + 1, torch.tensor([[1, 5], [4, 2]]).max(1))
    assert type(result) is torch.return_types.max
    assert result.values.tolist() == [6, 5]
    assert result.indices.tolist() == [2, 1]


@pytest.mark.parametrize(("kind", "keys"), [(Box, [0, 1]), (KeyedBox, [0, "k1"])])
def test_a_registered_type_opens_under_its_keys_and_keeps_its_context(
    kind: type[Box], keys: list[Any]
) -> None:
    container = tree.open_container(kind(1, 2, label="it"))
    assert list(container.keys) == keys
    rebuilt = container.rebuild([3, 4])
    assert type(rebuilt) is kind
    assert tuple(rebuilt.items) == (3, 4)
    assert rebuilt.label == "it"


def test_a_dataclass_is_rebuilt_without_running_its_constructor() -> None:
    assert tree.open_container(Positive(1)).rebuild([-1, 0]).x == -1
    computed = tree.open_container(Computed(1, scale=5)).rebuild([2, 3])
    assert (computed.x, computed.y) == (2, 3)


def test_a_dataclass_keeps_what_is_not_a_field() -> None:
    plain = Plain(1)
    plain.extra = "kept"
    assert tree.map_leaves(str, plain).extra == "kept"


def test_a_derived_dataclass_opens_with_all_its_fields() -> None:
    assert tree.map_leaves(lambda leaf: leaf, Child(1, 2, 3)) == Child(1, 2, 3)


def test_a_field_without_a_value_stays_without() -> None:
    computed = Computed.__new__(Computed)
    computed.x = 1
    rebuilt = tree.map_leaves(str, computed)
    assert vars(rebuilt) == {"x": "1"}


@pytest.mark.parametrize(
    "leaf",
    [
        None,
        1,
        "text",
        b"bytes",
        {1},
        object(),
        torch.ones(2),
        torch.nn.Parameter(torch.ones(2)),
        UserDict(a=1),
        MappingProxyType({"a": 1}),
        range(3),
        Plain,
        Pair,
    ],
    ids=lambda leaf: repr(leaf).split(" at ")[0],
)
def test_other_objects_are_leaves(leaf: Any) -> None:
    assert tree.open_container(leaf) is None
    assert [*tree.leaves(leaf)] == [leaf]
    assert tree.map_leaves(lambda value: (value,), leaf)[0] is leaf


@pytest.mark.parametrize(
    "empty",
    [
        (),
        [],
        {},
        OrderedDict(),
        defaultdict(list),
        deque(),
        Nothing(),
        Names(),
        Box(),
        Fieldless(),
        Constant(),
    ],
    ids=lambda empty: repr(empty).split(" at ")[0],
)
def test_an_empty_container_has_no_leaves_and_is_rebuilt(empty: Any) -> None:
    container = tree.open_container(empty)
    assert container is not None
    assert not container.children
    assert not [*tree.leaves(empty)]
    assert type(tree.map_leaves(lambda value: (value,), empty)) is type(empty)


def test_leaves_come_in_order_through_every_container() -> None:
    nest = [1, (2, {"a": 3, "b": Pair(4, deque([5]))}), Plain(6, Box(7)), [], OrderedDict(z=8, y=9)]
    assert [*tree.leaves(nest)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_map_leaves_keeps_the_structure() -> None:
    nest = {"a": [1, (2,)], "b": Pair(3, Frozen(4, 5))}
    assert tree.map_leaves(lambda leaf: leaf * 10, nest) == {"a": [10, (20,)], "b": Pair(30, Frozen(40, 50))}


def paths(obj: Any, path: tree.KeyPath = None) -> list[str]:
    container = tree.open_container(obj)
    if container is None:
        return [tree.format_path(path, "root")]
    pairs = zip(container.keys, container.children, strict=True)
    return [shown for key, child in pairs for shown in paths(child, (path, key))]


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        (1, ["root"]),
        ([1, (2,)], ["root[0]", "root[1][0]"]),
        ({"a": {3: 1}}, ["root['a'][3]"]),
        ({("a", 1): 1}, ["root[('a', 1)]"]),
        (defaultdict(list, a=[1]), ["root['a'][0]"]),
        (deque([1]), ["root[0]"]),
        (Pair(1, [2]), ["root.a", "root.b[0]"]),
        (Frozen(1, {"k": 2}), ["root.x", "root.y['k']"]),
        (Box(1, [2]), ["root[0]", "root[1][0]"]),
        (KeyedBox(1, 2), ["root[0]", "root['k1']"]),
        (AttributeBox(1), ["root.item"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else type(value).__name__,
)
def test_a_path_is_formatted_as_python_writes_it(obj: Any, expected: list[str]) -> None:
    assert paths(obj) == expected


def test_an_attribute_key_is_a_string_formatted_as_an_attribute() -> None:
    assert AttributeKey("x") == "x"
    assert tree.format_path((None, AttributeKey("x")), "root") == "root.x"
    assert tree.format_path((None, "x"), "root") == "root['x']"


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        (Pair(1, 2), True),
        (Typed(1), True),
        (Nothing(), True),
        (pack_sequence([torch.ones(2, 1)]), True),
        ((1, 2), False),
        (Span((1,)), False),
        (Plain(1), False),
        (Pair, False),
        (None, False),
    ],
    ids=repr,
)
def test_is_namedtuple_tells_namedtuples_from_other_types(obj: object, expected: bool) -> None:
    assert tree.is_namedtuple(obj) is expected
