"""scatter and scatter_kwargs: tensors are chunked, containers rebuilt, errors name the path."""

import gc
import re
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from batches import numbered
from containers import (
    Box,
    Computed,
    Frozen,
    FrozenOwnSlots,
    KeyedBox,
    Names,
    Nothing,
    Pair,
    Plain,
    Tagged,
)
from torch.autograd import gradcheck, gradgradcheck

from paceline import (
    DeviceError,
    DimensionError,
    PacelineError,
    ShapeError,
    StructureError,
    scatter,
    scatter_kwargs,
)


def cpus(count: int) -> list[str]:
    return ["cpu"] * count


@pytest.mark.parametrize("devices", range(1, 6))
@pytest.mark.parametrize("count", range(8))
def test_chunks_are_torchs_chunks(count: int, devices: int) -> None:
    pieces = scatter(numbered(count), cpus(devices))
    expected = numbered(count).chunk(devices)
    assert type(pieces) is tuple
    assert len(pieces) == len(expected) <= devices
    assert all(map(torch.equal, pieces, expected))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_dimension_may_be_scattered(dim: int) -> None:
    x = torch.arange(4.0 * 6 * 8).reshape(4, 6, 8)
    pieces = scatter({"x": x}, cpus(2), dim)
    assert [piece["x"].size(dim) for piece in pieces] == [x.size(dim) // 2] * 2
    assert torch.equal(torch.cat([piece["x"] for piece in pieces], dim), x)


def test_an_empty_tensor_gives_every_device_an_empty_chunk() -> None:
    pieces = scatter([numbered(0, 3), "x"], cpus(3))
    assert [(piece[0].shape, piece[1]) for piece in pieces] == [((0, 3), "x")] * 3


@pytest.mark.parametrize("devices", [1, 3])
def test_chunks_on_one_device_are_views_of_the_input(devices: int) -> None:
    x = numbered(6)
    pieces = scatter(x, cpus(devices))
    assert {piece.untyped_storage().data_ptr() for piece in pieces} == {x.untyped_storage().data_ptr()}
    x.zero_()
    assert all(not piece.any() for piece in pieces)


def test_each_chunk_is_on_its_device() -> None:
    pieces = scatter((numbered(4), Pair(numbered(4), 1)), ["cpu", "meta"])
    assert [piece[0].device.type for piece in pieces] == ["cpu", "meta"]
    assert [piece[1].a.device.type for piece in pieces] == ["cpu", "meta"]
    assert torch.equal(pieces[0][0], numbered(4)[:2])
    assert pieces[1][0].shape == (2, 2)


def test_devices_may_be_named_in_any_way_and_come_from_an_iterator() -> None:
    names = iter(["cpu", torch.device("cpu"), "cpu:0"])
    assert [piece.size(0) for piece in scatter(numbered(3), names)] == [1, 1, 1]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64],
    ids=str,
)
def test_every_dtype_is_kept(dtype: torch.dtype) -> None:
    x = numbered(5).to(dtype)
    pieces = scatter(x, cpus(2))
    assert {piece.dtype for piece in pieces} == {dtype}
    assert torch.equal(torch.cat(pieces), x)


def test_a_strided_input_is_scattered_without_a_copy() -> None:
    x = numbered(4, 6).T
    pieces = scatter(x, cpus(2))
    assert [piece.stride() for piece in pieces] == [x.stride()] * 2


def test_a_tensor_subclass_is_kept() -> None:
    pieces = scatter({"x": numbered(4).as_subclass(Tagged)}, cpus(2))
    assert [type(piece["x"]) for piece in pieces] == [Tagged, Tagged]


def test_a_tensor_subclass_alone_gives_a_tuple() -> None:
    pieces = scatter(numbered(4).as_subclass(Tagged), cpus(2))
    assert [type(pieces), *map(type, pieces)] == [tuple, Tagged, Tagged]


def test_chunks_of_a_parameter_lead_back_to_it() -> None:
    weight = torch.nn.Parameter(numbered(4))
    first, _ = scatter(weight, cpus(2))
    first.sum().backward()
    assert torch.equal(weight.grad, torch.tensor([[1.0, 1], [1, 1], [0, 0], [0, 0]]))


@pytest.mark.parametrize("kind", [Plain, Frozen, FrozenOwnSlots])
def test_a_dataclass_is_scattered_field_by_field(kind: Any) -> None:
    original = kind(numbered(4), "note")
    pieces = scatter(original, cpus(2))
    assert type(pieces) is list
    assert [type(piece) for piece in pieces] == [kind, kind]
    assert torch.equal(pieces[0].x, numbered(4)[:2])
    assert torch.equal(pieces[1].x, numbered(4)[2:])
    assert [piece.note for piece in pieces] == ["note", "note"]
    assert torch.equal(original.x, numbered(4))


def test_fields_outside_the_constructor_are_scattered_too() -> None:
    pieces = scatter(Computed(numbered(4), scale=3), cpus(2))
    assert [piece.doubled.shape for piece in pieces] == [(2, 2), (2, 2)]
    assert torch.equal(pieces[1].doubled, 3 * numbered(4)[2:])


@pytest.mark.parametrize("kind", [Box, KeyedBox])
def test_a_registered_type_is_scattered(kind: type[Box]) -> None:
    pieces = scatter(kind(numbered(4), "y", label="it"), cpus(2))
    assert [type(piece) for piece in pieces] == [kind, kind]
    assert [piece.label for piece in pieces] == ["it", "it"]
    assert torch.equal(torch.cat([piece.items[0] for piece in pieces]), numbered(4))
    assert [piece.items[1] for piece in pieces] == ["y", "y"]


@pytest.mark.parametrize(
    "container",
    [
        defaultdict(list, x=numbered(4)),
        OrderedDict(x=numbered(4)),
        deque([numbered(4)], maxlen=5),
        Names([numbered(4)]),
        numbered(4).max(1),
    ],
    ids=lambda container: type(container).__name__,
)
def test_a_container_gives_a_list_of_its_type(container: Any) -> None:
    pieces = scatter(container, cpus(2))
    assert type(pieces) is list
    assert [type(piece) for piece in pieces] == [type(container)] * 2
    assert [len(piece) for piece in pieces] == [len(container)] * 2


def test_container_settings_are_kept() -> None:
    table, queue = scatter((defaultdict(list, x=numbered(2)), deque([numbered(2)], maxlen=5)), cpus(1))[0]
    assert table["new"] == []
    assert queue.maxlen == 5


def test_a_counter_keeps_its_counts() -> None:
    assert scatter(Counter("aab"), cpus(2)) == [Counter("aab")] * 2


def test_a_torch_return_type_is_scattered() -> None:
    pieces = scatter(numbered(4).max(1), cpus(2))
    assert [piece.values.tolist() for piece in pieces] == [[1, 3], [5, 7]]
    assert [piece.indices.tolist() for piece in pieces] == [[1, 1], [1, 1]]


@pytest.mark.parametrize("leaf", [(), [], {}, deque(), Nothing(), Box(), object(), "s", Plain])
def test_other_objects_and_empty_containers_are_shared_by_reference(leaf: Any) -> None:
    alone = scatter(leaf, cpus(2))
    assert type(alone) is list
    assert len(alone) == 2
    assert all(piece is leaf for piece in alone)
    assert all(piece["leaf"] is leaf for piece in scatter({"leaf": leaf, "x": numbered(4)}, cpus(2)))


def test_containers_of_different_types_may_be_nested() -> None:
    nest = [Plain({"k": deque([Box(Pair(numbered(4), 1))])}, note=(numbered(4), []))]
    pieces = scatter(nest, cpus(2))
    assert [piece[0].x["k"][0].items[0].a.tolist() for piece in pieces] == [
        numbered(4)[:2].tolist(),
        numbered(4)[2:].tolist(),
    ]
    assert [piece[0].note[0].size(0) for piece in pieces] == [2, 2]


def test_replicas_do_not_share_containers() -> None:
    first, second = scatter({"x": numbered(4), "inner": {"y": 1}}, cpus(2))
    first["inner"]["y"] = 2
    assert second["inner"]["y"] == 1


def cut(x: torch.Tensor, devices: int, dim: int) -> tuple[torch.Tensor, ...]:
    return tuple(piece["x"] ** 2 for piece in scatter({"x": x}, cpus(devices), dim))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(("devices", "dim"), [(1, 0), (2, 0), (4, 0), (2, 1), (3, -1)])
def test_gradients_of_first_and_second_order(dtype: torch.dtype, devices: int, dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    assert gradcheck(lambda x: cut(x, devices, dim), x)
    assert gradgradcheck(lambda x: cut(x, devices, dim), x)


def test_an_unused_chunk_gives_no_gradient_to_its_rows() -> None:
    x = numbered(4).requires_grad_()
    (scatter([x], cpus(2))[1][0] * 3).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[0.0, 0], [0, 0], [3, 3], [3, 3]]))


def test_chunks_require_a_gradient_only_if_the_input_does() -> None:
    first, second = numbered(4).requires_grad_(), numbered(4)
    assert [(a.requires_grad, b.requires_grad) for a, b in scatter((first, second), cpus(2))] == [
        (True, False),
        (True, False),
    ]
    with torch.no_grad():
        assert not any(piece.requires_grad for piece in scatter(first, cpus(2)))


class Mistake(NamedTuple):
    error: type[PacelineError]
    text: str
    inputs: Any
    devices: Sequence[Any] = ("cpu", "cpu")
    dim: int = 0


MISTAKES = {
    "no devices": Mistake(DeviceError, "at least one device is needed", numbered(4), []),
    "no devices, no tensor": Mistake(DeviceError, "at least one device is needed", "text", []),
    "unknown name": Mistake(DeviceError, "'nowhere'", numbered(4), ["nowhere"]),
    "second of two, no tensor": Mistake(DeviceError, "'nowhere'", "text", ["cpu", "nowhere"]),
    "not here": Mistake(DeviceError, "'cuda:5'", numbered(4), ["cuda:5"]),
    "index": Mistake(DeviceError, "1000000", numbered(4), [10**6]),
    "bool": Mistake(DeviceError, "True", numbered(4), [True]),
    "None": Mistake(DeviceError, "None", numbered(4), [None]),
    "dim": Mistake(
        DimensionError,
        "inputs cannot be scattered along dimension 2 (shape (4, 2), float32)",
        numbered(4),
        dim=2,
    ),
    "negative dim": Mistake(
        DimensionError,
        "inputs['x'][0] cannot be scattered along dimension -3",
        {"x": [numbered(4)]},
        dim=-3,
    ),
    "no dimensions": Mistake(ShapeError, "inputs[1].b cannot be scattered", (1, Pair(0, torch.tensor(1.0)))),
    "uneven": Mistake(
        StructureError, "inputs[0]: 4, inputs[1].x: 2", [numbered(4), Plain(numbered(2))], cpus(4)
    ),
    "uneven in a registered type": Mistake(
        StructureError,
        "inputs[0]: 3, inputs[1]['m']['k0']: 1",
        (numbered(3), {"m": KeyedBox(numbered(1))}),
        cpus(3),
    ),
    "cannot be moved": Mistake(
        DeviceError,
        "inputs[1] cannot be moved (from meta to cpu",
        [0, torch.ones(2, device="meta")],
    ),
}
each_mistake = pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)


@each_mistake
def test_an_error_names_the_input_and_the_next_call_works(mistake: Mistake) -> None:
    with pytest.raises(mistake.error, match=re.escape(mistake.text)):
        scatter(mistake.inputs, mistake.devices, mistake.dim)
    assert [piece.size(0) for piece in scatter(numbered(4), cpus(2))] == [2, 2]


@each_mistake
@pytest.mark.parametrize("side", ["inputs", "kwargs"])
def test_scatter_kwargs_refuses_wrong_positional_and_keyword_arguments(mistake: Mistake, side: str) -> None:
    inputs, kwargs = ((mistake.inputs,), None) if side == "inputs" else ((), {"k": mistake.inputs})
    with pytest.raises(mistake.error):
        scatter_kwargs(inputs, kwargs, mistake.devices, mistake.dim)
    assert len(scatter_kwargs((numbered(4),), None, cpus(2))[0]) == 2


def test_an_unknown_device_is_refused_without_arguments_too() -> None:
    with pytest.raises(DeviceError, match="nowhere"):
        scatter_kwargs((), {}, ["nowhere"])


def test_an_error_in_a_keyword_argument_names_the_keyword() -> None:
    with pytest.raises(DimensionError, match=re.escape("kwargs['mask'] cannot be scattered")):
        scatter_kwargs((numbered(4),), {"mask": torch.ones(4)}, cpus(2), dim=1)


@pytest.mark.parametrize(
    ("inputs", "kwargs", "devices", "sizes"),
    [
        ((numbered(4),), {"k": numbered(2)}, 4, ([1, 1, 1, 1], [1, 1, None, None])),
        ((numbered(2),), {"k": numbered(4)}, 4, ([1, 1, None, None], [1, 1, 1, 1])),
        ((numbered(3),), {"k": numbered(1)}, 3, ([1, 1, 1], [1, None, None])),
        ((numbered(5),), {}, 2, ([3, 2], [None, None])),
        ((), {"k": numbered(5)}, 2, ([None, None], [3, 2])),
        ((numbered(0),), {"k": numbered(0)}, 2, ([0, 0], [0, 0])),
    ],
    ids=["fewer kwargs", "fewer inputs", "one row of kwargs", "no kwargs", "no inputs", "no rows"],
)
def test_the_shorter_of_inputs_and_kwargs_is_filled_up(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: int, sizes: tuple[list[Any], list[Any]]
) -> None:
    positional, keyword = scatter_kwargs(inputs, kwargs, cpus(devices))
    assert [piece[0].size(0) if piece else None for piece in positional] == sizes[0]
    assert [piece["k"].size(0) if piece else None for piece in keyword] == sizes[1]
    assert all(type(piece) is tuple for piece in positional)
    assert all(type(piece) is dict for piece in keyword)


def test_the_number_of_inputs_does_not_change_how_many_are_filled_up() -> None:
    positional, keyword = scatter_kwargs((numbered(4), numbered(4), 1, 2, 3), {"k": numbered(1)}, cpus(4))
    assert (len(positional), len(keyword)) == (4, 4)


def test_scatter_kwargs_takes_an_iterator_of_devices() -> None:
    positional, keyword = scatter_kwargs((numbered(2),), {"k": numbered(2)}, iter(cpus(2)))
    assert (len(positional), len(keyword)) == (2, 2)


@pytest.mark.usefixtures("no_gc")
def test_no_reference_cycle_is_left_behind() -> None:
    x = numbered(4).requires_grad_()
    nest = {"a": [x, Plain(x)], "b": (Box(x), deque([x]), x.max(1), Pair(x, ()))}
    pieces = scatter_kwargs((nest, x), nest, cpus(2))
    dead = [weakref.ref(piece[1]) for piece in pieces[0]] + [weakref.ref(x)]
    del x, nest, pieces
    assert [ref() for ref in dead] == [None, None, None]
    assert gc.collect() == 0


@each_mistake
@pytest.mark.usefixtures("no_gc")
def test_no_reference_cycle_is_left_behind_by_an_error(mistake: Mistake) -> None:
    beside = numbered(4)
    try:
        scatter([mistake.inputs, beside], mistake.devices, mistake.dim)
    except PacelineError as error:
        dead = [weakref.ref(error), weakref.ref(beside)]
    del beside
    assert [ref() for ref in dead] == [None, None]
    assert gc.collect() == 0
