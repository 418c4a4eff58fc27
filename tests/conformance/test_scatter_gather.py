"""What torch's scatter and gather do, and paceline's too."""

from collections import OrderedDict, namedtuple
from types import ModuleType
from typing import Any

import pytest
import torch
from batches import numbered
from containers import Typed
from torch.nn.utils.rnn import PackedSequence, pack_sequence

CPUS = ["cpu", "cpu"]

Pair = namedtuple("Pair", ["a", "b"])


class Settings(dict):
    """A dict with the usual constructor."""


class Titled(list):
    """A list with a constructor of its own."""

    def __init__(self, title: str, items: list[Any]) -> None:
        super().__init__(items)
        self.title = title


class Ordered(tuple):
    """A tuple with a constructor of its own."""

    __slots__ = ()

    def __new__(cls, low: Any, high: Any) -> "Ordered":
        return super().__new__(cls, (low, high))


def same(one: Any, other: Any) -> bool:
    """Equal in value and, at every level, in type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_the_package_and_the_submodule_have_the_same_function(parallel: ModuleType, name: str) -> None:
    assert getattr(parallel, name) is getattr(parallel.scatter_gather, name)


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        (Pair(1, 2), True),
        (Typed(1), True),
        (pack_sequence([torch.ones(2, 1)]), True),
        ((1, 2), False),
        ([1, 2], False),
        (torch.ones(2, 1).max(0), False),
        (Pair, False),
    ],
    ids=["namedtuple", "NamedTuple", "PackedSequence", "tuple", "list", "return type", "class"],
)
def test_is_namedtuple_answers_with_a_future_warning(
    parallel: ModuleType, obj: object, expected: bool
) -> None:
    with pytest.warns(FutureWarning, match="`is_namedtuple` is deprecated, please use the python checks"):
        assert parallel.scatter_gather.is_namedtuple(obj) is expected
    assert parallel.scatter_gather._is_namedtuple(obj) is expected


@pytest.mark.parametrize("obj", [None, 3, 2.5, "text", b"bytes", object(), {1, 2}, torch.float32, len, Pair])
@pytest.mark.parametrize("count", [1, 3])
def test_an_object_is_shared_by_reference_once_a_device(
    parallel: ModuleType, obj: object, count: int
) -> None:
    pieces = parallel.scatter(obj, ["cpu"] * count)
    assert type(pieces) is list
    assert len(pieces) == count
    assert all(piece is obj for piece in pieces)


@pytest.mark.parametrize("empty", [(), [], {}, OrderedDict(), Settings()], ids=lambda e: type(e).__name__)
def test_an_empty_container_is_shared_by_reference(parallel: ModuleType, empty: object) -> None:
    pieces = parallel.scatter(empty, CPUS)
    assert type(pieces) is list
    assert len(pieces) == 2
    assert all(piece is empty for piece in pieces)


@pytest.mark.parametrize(
    "container",
    [
        (1, "a"),
        [None, 2.0],
        {"a": 1, 2: "b"},
        OrderedDict(b=1, a=2),
        Settings(a=1),
        Pair(1, [2]),
        Typed("x"),
        ((), [], {}),
        {"deep": [({"deeper": (1,)},)]},
        {("tuple", "key"): 1},
    ],
    ids=repr,
)
def test_a_container_of_objects_gives_an_equal_one_a_device(parallel: ModuleType, container: Any) -> None:
    pieces = parallel.scatter(container, CPUS)
    assert type(pieces) is list
    assert len(pieces) == 2
    assert all(same(piece, container) for piece in pieces)


def test_pieces_are_containers_of_their_own_around_shared_objects(parallel: ModuleType) -> None:
    shared = object()
    original = [shared, [shared]]
    first, second = parallel.scatter(original, CPUS)
    first.append(1)
    first[1].append(2)
    assert first[0] is second[0] is shared
    assert second == original == [shared, [shared]]


def test_a_list_with_a_constructor_of_its_own_is_scattered(parallel: ModuleType) -> None:
    pieces = parallel.scatter(Titled("t", [1, 2]), CPUS)
    assert [list(piece) for piece in pieces] == [[1, 2], [1, 2]]


def test_a_tuple_with_a_constructor_of_its_own_is_scattered(parallel: ModuleType) -> None:
    pieces = parallel.scatter(Ordered(1, 2), CPUS)
    assert [tuple(piece) for piece in pieces] == [(1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("inputs", "kwargs", "expected"),
    [
        ((), None, ((), ())),
        ((), {}, ((), ())),
        ((1,), None, (((1,), (1,)), ({}, {}))),
        ((1,), {}, (((1,), (1,)), ({}, {}))),
        ((), {"a": 1}, (((), ()), ({"a": 1}, {"a": 1}))),
        ((1, "x"), {"a": None}, (((1, "x"), (1, "x")), ({"a": None}, {"a": None}))),
        (((),), {"a": []}, ((((),), ((),)), ({"a": []}, {"a": []}))),
        (([], {}), None, ((([], {}), ([], {})), ({}, {}))),
    ],
    ids=repr,
)
def test_scatter_kwargs_of_objects(parallel: ModuleType, inputs: Any, kwargs: Any, expected: Any) -> None:
    assert same(parallel.scatter_gather.scatter_kwargs(inputs, kwargs, CPUS), expected)


def test_the_dicts_that_fill_up_are_not_one_dict(parallel: ModuleType) -> None:
    _, (first, second) = parallel.scatter_gather.scatter_kwargs((1,), None, CPUS)
    first["a"] = 1
    assert second == {}


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([None, None], None),
        ((None, None), None),
        ([(None, None)] * 2, (None, None)),
        ([[None]] * 3, [None]),
        ([{"a": None}] * 2, {"a": None}),
        ([OrderedDict(b=None, a=None)] * 2, OrderedDict(b=None, a=None)),
        ([Settings(a=None)] * 2, Settings(a=None)),
        ([Pair(None, [None])] * 2, Pair(None, [None])),
        ([Typed(None, None)] * 2, Typed(None, None)),
        ([()] * 2, ()),
        ([[], []], []),
        ([{}, {}], {}),
        ([OrderedDict(), OrderedDict()], OrderedDict()),
    ],
    ids=repr,
)
def test_gather_without_tensors(parallel: ModuleType, outputs: Any, expected: Any) -> None:
    assert same(parallel.gather(outputs, "cpu"), expected)


def test_gather_gives_an_empty_list_of_its_own(parallel: ModuleType) -> None:
    outputs = [[], []]
    parallel.gather(outputs, "cpu").append(1)
    assert outputs == [[], []]


@pytest.mark.parametrize(
    "outputs",
    [
        [{"a": None}, {"a": None, "b": None}],
        [{"a": None, "b": None}, {"a": None}],
        [{"a": None}, {}],
        [{}, {"a": None}],
        [[{"a": None}], [{}]],
    ],
    ids=repr,
)
def test_dicts_with_different_numbers_of_keys_are_refused(parallel: ModuleType, outputs: Any) -> None:
    with pytest.raises(ValueError, match="All dicts must have the same number of keys"):
        parallel.gather(outputs, "cpu")


def test_a_missing_key_is_refused_by_name(parallel: ModuleType) -> None:
    with pytest.raises(KeyError, match="'loss'"):
        parallel.gather([{"loss": None}, {"cost": None}], "cpu")


@pytest.mark.parametrize(
    "outputs",
    [
        [(None,), (None, None)],
        [[None, None], [None]],
        [(None,), ()],
        [(), (None,)],
        [[], [None]],
        [{"a": (None,)}, {"a": (None, None)}],
    ],
    ids=repr,
)
def test_different_lengths_are_refused(parallel: ModuleType, outputs: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - torch leaves the text to zip
        parallel.gather(outputs, "cpu")


def test_nothing_to_gather_is_an_index_error(parallel: ModuleType) -> None:
    with pytest.raises(IndexError):
        parallel.gather([], "cpu")


@pytest.mark.parametrize(
    ("count", "devices", "sizes"),
    [
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (5, 4, [2, 2, 1]),
        (2, 4, [1, 1]),
        (1, 3, [1]),
        (0, 3, [0, 0, 0]),
        (3, 1, [3]),
    ],
)
def test_a_tensor_gives_a_tuple_of_chunks(
    parallel_on_cpu: ModuleType, count: int, devices: int, sizes: list[int]
) -> None:
    pieces = parallel_on_cpu.scatter(numbered(count), ["cpu"] * devices)
    assert type(pieces) is tuple
    assert [piece.size(0) for piece in pieces] == sizes
    assert torch.equal(torch.cat(pieces), numbered(count))


@pytest.mark.parametrize("dim", [1, -1, -2])
def test_scatter_and_gather_along_another_dimension(parallel_on_cpu: ModuleType, dim: int) -> None:
    x = numbered(4, 6)
    pieces = parallel_on_cpu.scatter(x, CPUS, dim=dim)
    assert [piece.size(dim) for piece in pieces] == [x.size(dim) // 2] * 2
    assert torch.equal(parallel_on_cpu.gather(pieces, "cpu", dim=dim), x)


def packed(*, enforce_sorted: bool) -> PackedSequence:
    return pack_sequence(
        [numbered(2), numbered(2), numbered(2), numbered(2)],
        enforce_sorted=enforce_sorted,
    )


NESTS: list[Any] = [
    (numbered(4),),
    [numbered(4), 3],
    {"x": numbered(4), "flag": True},
    OrderedDict(b=numbered(4), a=numbered(4, 3)),
    Settings(x=numbered(4)),
    Pair(numbered(4), "text"),
    Typed(numbered(4), None),
    (numbered(4), [numbered(4), {"y": (numbered(4),)}], (), {}),
    {"pair": Pair([numbered(4)], ()), 1: None},
    packed(enforce_sorted=True),
    packed(enforce_sorted=False),
]


@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: type(nest).__name__)
def test_a_container_of_tensors_gives_a_list_of_the_same_type(parallel_on_cpu: ModuleType, nest: Any) -> None:
    def half(value: Any, which: int) -> Any:
        if isinstance(value, torch.Tensor):
            return value.chunk(2)[which]
        if isinstance(value, dict):
            return type(value)((key, half(item, which)) for key, item in value.items())
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(half(item, which) for item in value))
        return type(value)(half(item, which) for item in value) if isinstance(value, list | tuple) else value

    pieces = parallel_on_cpu.scatter(nest, CPUS)
    assert type(pieces) is list
    assert same(pieces, [half(nest, 0), half(nest, 1)])


@pytest.mark.parametrize(
    "nest",
    [
        [numbered(4), numbered(4, 3)],
        (numbered(4), [None, (numbered(4), {})]),
        {"x": numbered(4), "none": None},
        OrderedDict(b=numbered(4), a=numbered(4, 3)),
        Settings(x=numbered(4)),
        Pair(numbered(4), Typed([numbered(4)], None)),
        packed(enforce_sorted=True),
        packed(enforce_sorted=False),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_gather_undoes_scatter(parallel_on_cpu: ModuleType, nest: Any) -> None:
    assert same(parallel_on_cpu.gather(parallel_on_cpu.scatter(nest, CPUS), "cpu"), nest)


def test_objects_beside_a_short_tensor_are_given_to_its_pieces_only(parallel_on_cpu: ModuleType) -> None:
    pieces = parallel_on_cpu.scatter([numbered(2), "name", {"k": ()}], ["cpu"] * 4)
    assert same(pieces, [[numbered(2)[:1], "name", {"k": ()}], [numbered(2)[1:], "name", {"k": ()}]])


def test_an_empty_container_beside_tensors_is_shared(parallel_on_cpu: ModuleType) -> None:
    empty: list[Any] = []
    pieces = parallel_on_cpu.scatter((numbered(4), empty), CPUS)
    assert all(piece[1] is empty for piece in pieces)


def test_gather_takes_keys_in_the_first_replicas_order(parallel_on_cpu: ModuleType) -> None:
    outputs = [
        {"b": numbered(1), "a": numbered(1, 3)},
        {"a": numbered(1, 3), "b": numbered(1)},
    ]
    gathered = parallel_on_cpu.gather(outputs, "cpu")
    assert list(gathered) == ["b", "a"]
    assert gathered["a"].shape == (2, 3)


def test_gather_takes_outputs_of_different_lengths_along_the_dimension(parallel_on_cpu: ModuleType) -> None:
    gathered = parallel_on_cpu.gather([numbered(3), numbered(0), numbered(1)], "cpu")
    assert torch.equal(gathered, torch.cat([numbered(3), numbered(1)]))


def test_gather_takes_a_tensor_as_a_sequence_of_its_rows(parallel_on_cpu: ModuleType) -> None:
    assert torch.equal(parallel_on_cpu.gather(numbered(2, 3), "cpu"), numbered(2, 3).flatten())


@pytest.mark.parametrize(
    ("inputs", "kwargs", "devices", "counts"),
    [
        ((numbered(4),), None, 2, (2, 2)),
        ((), {"x": numbered(4)}, 2, (2, 2)),
        ((numbered(4), 1), {"x": numbered(4, 3), "y": 2}, 2, (2, 2)),
        ((numbered(2),), {"x": numbered(4)}, 4, (4, 4)),
        ((numbered(1),), {}, 4, (1, 1)),
        ((numbered(2),), {"flag": True}, 4, (4, 4)),
    ],
    ids=["inputs", "kwargs", "both", "fewer inputs", "one row", "objects fill the devices"],
)
def test_scatter_kwargs_fills_up_the_shorter_side(
    parallel_on_cpu: ModuleType,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    devices: int,
    counts: tuple[int, int],
) -> None:
    result = parallel_on_cpu.scatter_gather.scatter_kwargs(inputs, kwargs, ["cpu"] * devices)
    assert type(result) is tuple
    assert [type(side) for side in result] == [tuple, tuple]
    assert tuple(map(len, result)) == counts
    assert all(piece == () or len(piece) == len(inputs) for piece in result[0])
    assert all(piece == {} or piece.keys() == (kwargs or {}).keys() for piece in result[1])


def test_gradients_reach_the_input(parallel_on_cpu: ModuleType) -> None:
    x = numbered(3).requires_grad_()
    pieces = parallel_on_cpu.scatter({"x": x}, CPUS)
    parallel_on_cpu.gather([piece["x"] * piece["x"] for piece in pieces], "cpu").sum().backward()
    assert torch.equal(x.grad, 2 * numbered(3))


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_out_of_range_is_an_index_error(parallel_on_cpu: ModuleType, dim: int) -> None:
    with pytest.raises(IndexError):
        parallel_on_cpu.scatter(numbered(4), CPUS, dim=dim)
    with pytest.raises(IndexError):
        parallel_on_cpu.gather([numbered(2), numbered(2)], "cpu", dim=dim)


def test_a_tensor_without_dimensions_is_a_runtime_error(parallel_on_cpu: ModuleType) -> None:
    with pytest.raises(RuntimeError):
        parallel_on_cpu.scatter(torch.tensor(1.0), CPUS)


def test_tensors_that_do_not_fit_are_a_runtime_error(parallel_on_cpu: ModuleType) -> None:
    with pytest.raises(RuntimeError):
        parallel_on_cpu.gather([numbered(2, 2), numbered(2, 3)], "cpu")
