"""gather: tensors are concatenated, containers rebuilt, errors name the path."""

import dataclasses
import gc
import re
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from batches import numbered
from containers import (
    Box,
    Computed,
    Fieldless,
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
from torch.utils._pytree import register_constant, register_pytree_node

from paceline import (
    DeviceError,
    DimensionError,
    MissingKeyError,
    PacelineError,
    ShapeError,
    StructureError,
    gather,
)

SCALARS = (
    "Was asked to gather along dimension 0, but all input tensors were scalars; "
    "will instead unsqueeze and return a vector."
)


class Summed(NamedTuple("Summed", [("a", Any), ("b", Any)])):
    """A namedtuple whose constructor is not for rebuilding."""

    __slots__ = ()

    def __new__(cls, a: Any) -> "Summed":
        return super().__new__(cls, a, a.sum(0, keepdim=True))


class Table(dict):
    """A dict registered without keys."""


@dataclasses.dataclass
class Late:
    left: Any = dataclasses.field(init=False)
    right: Any = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True)
class Constant:
    value: int = 1


register_pytree_node(
    Table,
    lambda table: ([*table.values()], [*table]),
    lambda new, keys: Table(zip(keys, new, strict=True)),
)
register_constant(Constant)


def late(**fields: Any) -> Late:
    obj = Late()
    for name, value in fields.items():
        setattr(obj, name, value)
    return obj


@pytest.mark.parametrize("device", ["cpu", -1, torch.device("cpu"), "cpu:0"], ids=repr)
def test_the_cpu_by_any_name(device: Any) -> None:
    gathered = gather([numbered(2), numbered(1)], device)
    assert gathered.device == torch.device("cpu")
    assert torch.equal(gathered, torch.cat([numbered(2), numbered(1)]))


def test_tensors_are_moved_to_the_device() -> None:
    gathered = gather([numbered(2), torch.ones(1, 2, device="meta")], "meta")
    assert (gathered.device.type, gathered.shape) == ("meta", (3, 2))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_dimension_may_be_concatenated(dim: int) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(gather([x, x + 1], "cpu", dim), torch.cat([x, x + 1], dim))


@pytest.mark.parametrize("counts", [[1], [0], [0, 0], [3, 0, 1], [1, 1, 1], [0, 2]], ids=str)
def test_any_number_of_rows_may_be_concatenated(counts: list[int]) -> None:
    parts = [numbered(count) for count in counts]
    assert torch.equal(gather(parts, "cpu"), torch.cat(parts))


@pytest.mark.parametrize(
    "outputs",
    [(numbered(1), numbered(2)), deque([numbered(1), numbered(2)])],
    ids=["tuple", "deque"],
)
def test_outputs_may_be_any_sequence(outputs: Any) -> None:
    assert gather(outputs, "cpu").shape == (3, 2)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64],
    ids=str,
)
def test_every_dtype_is_kept(dtype: torch.dtype) -> None:
    gathered = gather([numbered(2).to(dtype), numbered(1).to(dtype)], "cpu")
    assert gathered.dtype == dtype
    assert torch.equal(gathered, torch.cat([numbered(2), numbered(1)]).to(dtype))


def test_the_memory_format_is_kept() -> None:
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert gather([image, image], "cpu").is_contiguous(memory_format=torch.channels_last)


def test_a_tensor_subclass_is_kept() -> None:
    gathered = gather([[numbered(1).as_subclass(Tagged)], [numbered(2).as_subclass(Tagged)]], "cpu")
    assert type(gathered[0]) is Tagged
    assert gathered[0].shape == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64], ids=str)
def test_scalars_become_a_vector_with_torchs_warning(dtype: torch.dtype) -> None:
    outputs = [torch.tensor(value, dtype=dtype) for value in (0, 1)]
    with pytest.warns(UserWarning, match=f"^{re.escape(SCALARS)}$"):
        gathered = gather([{"loss": output} for output in outputs], "cpu")["loss"]
    assert torch.equal(gathered, torch.tensor([0, 1], dtype=dtype))


def test_one_scalar_becomes_a_vector_too() -> None:
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        assert torch.equal(gather([torch.tensor(2.0)], "cpu"), torch.tensor([2.0]))


def test_gradients_go_back_to_each_scalar() -> None:
    scalars = [torch.tensor(value, requires_grad=True) for value in (2.0, 3.0)]
    with pytest.warns(UserWarning, match="scalars"):
        (gather(scalars, "cpu") ** 2 * torch.tensor([1.0, 10.0])).sum().backward()
    assert [scalar.grad.item() for scalar in scalars] == [4.0, 60.0]


@pytest.mark.parametrize("kind", [Plain, Frozen, FrozenOwnSlots])
def test_a_dataclass_is_gathered_field_by_field(kind: Any) -> None:
    outputs = [kind(numbered(1), "note"), kind(numbered(2), "note")]
    gathered = gather(outputs, "cpu")
    assert type(gathered) is kind
    assert gathered.x.shape == (3, 2)
    assert gathered.note == "note"
    assert [output.x.shape for output in outputs] == [(1, 2), (2, 2)]


def test_fields_outside_the_constructor_are_gathered_too() -> None:
    gathered = gather([Computed(numbered(1), scale=3), Computed(numbered(2), scale=3)], "cpu")
    assert torch.equal(gathered.doubled, 3 * torch.cat([numbered(1), numbered(2)]))


def test_a_field_without_a_value_stays_without() -> None:
    assert vars(gather([late(right=1), late(right=1)], "cpu")) == {"right": 1}


@pytest.mark.parametrize("kind", [Box, KeyedBox])
def test_a_registered_type_is_gathered(kind: type[Box]) -> None:
    gathered = gather([kind(numbered(1), 5, label="it"), kind(numbered(2), 5, label="it")], "cpu")
    assert type(gathered) is kind
    assert gathered.label == "it"
    assert gathered.items[0].shape == (3, 2)
    assert gathered.items[1] == 5


def test_a_dict_registered_without_keys_is_gathered() -> None:
    gathered = gather([Table(x=numbered(1), y=None), Table(x=numbered(2), y=None)], "cpu")
    assert type(gathered) is Table
    assert gathered["x"].shape == (3, 2)


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: (x,),
        lambda x: [x],
        lambda x: {"x": x},
        lambda x: OrderedDict(x=x),
        lambda x: defaultdict(list, x=x),
        lambda x: deque([x], maxlen=4),
        lambda x: Names([x]),
        lambda x: Pair(x, None),
        lambda x: x.max(1),
        lambda x: [Plain({"k": deque([Box(Pair(x, 1))])})],
    ],
    ids=[
        "tuple",
        "list",
        "dict",
        "OrderedDict",
        "defaultdict",
        "deque",
        "subclass",
        "namedtuple",
        "return_type",
        "nest",
    ],
)
def test_a_container_is_rebuilt_as_its_type(kind: Any) -> None:
    def tensor(obj: Any) -> torch.Tensor:
        while not isinstance(obj, torch.Tensor):
            if isinstance(obj, Plain):
                obj = obj.x
            elif isinstance(obj, Box):
                obj = obj.items[0]
            else:
                obj = next(iter(obj.values())) if isinstance(obj, dict) else obj[0]
        return obj

    outputs = [kind(numbered(1)), kind(numbered(2))]
    gathered = gather(outputs, "cpu")
    assert type(gathered) is type(outputs[0])
    assert torch.equal(tensor(gathered), torch.cat([tensor(output) for output in outputs]))


def test_container_settings_are_kept() -> None:
    outputs = [(defaultdict(list, x=numbered(1)), deque([numbered(1)], maxlen=5)) for _ in range(2)]
    table, queue = gather(outputs, "cpu")
    assert table["new"] == []
    assert queue.maxlen == 5


def test_a_namedtuple_is_rebuilt_without_its_constructor() -> None:
    gathered = gather([Summed(numbered(1)), Summed(numbered(2))], "cpu")
    assert type(gathered) is Summed
    assert gathered.a.shape == (3, 2)
    assert gathered.b.shape == (2, 2)


@pytest.mark.parametrize(
    "value", [3, 2.5, 1j, True, "text", b"bytes", float("nan"), 10**30, None, ..., torch.float32], ids=repr
)
def test_a_value_that_is_the_same_on_all_replicas_is_kept(value: Any) -> None:
    assert gather([value, value], "cpu") is value
    assert gather([{"v": value, "x": numbered(1)}] * 2, "cpu")["v"] is value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1000, int("1000")),
        (float("nan"), float("nan")),
        ("text", "".join(["te", "xt"])),
        (Fraction(1, 2), Fraction(1, 2)),
        (torch.device("cpu"), torch.device("cpu")),
        (frozenset([1]), frozenset([1])),
        (Constant(), Constant()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_values_become_one_value(one: Any, other: Any) -> None:
    assert gather([(one,), (other,)], "cpu")[0] is one


def test_a_shared_object_is_kept() -> None:
    shared = object()
    assert gather([[shared], [shared]], "cpu")[0] is shared


@pytest.mark.parametrize(
    "kind", [tuple, list, dict, OrderedDict, deque, Names, Nothing, Box, Fieldless], ids=lambda k: k.__name__
)
def test_empty_containers_stay_empty_containers(kind: Any) -> None:
    gathered = gather([{"e": kind(), "x": numbered(1)}, {"e": kind(), "x": numbered(2)}], "cpu")
    assert type(gathered["e"]) is kind


def test_an_empty_defaultdict_keeps_its_factory() -> None:
    assert gather([defaultdict(list), defaultdict(list)], "cpu")["new"] == []


def join(first: torch.Tensor, second: torch.Tensor, dim: int) -> torch.Tensor:
    return gather([Plain((first,)), Plain((second,))], "cpu", dim).x[0] ** 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_of_first_and_second_order(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(0)
    parts = tuple(torch.randn(2, 2, dtype=dtype, requires_grad=True) for _ in range(2))
    assert gradcheck(lambda first, second: join(first, second, dim), parts)
    assert gradgradcheck(lambda first, second: join(first, second, dim), parts)


def test_the_same_tensor_twice_gets_both_gradients() -> None:
    x = numbered(1).requires_grad_()
    (gather([x, x], "cpu") * torch.tensor([[1.0], [10.0]])).sum().backward()
    assert torch.equal(x.grad, torch.full((1, 2), 11.0))


def test_no_grad_is_kept() -> None:
    with torch.no_grad():
        assert not gather([numbered(1).requires_grad_()] * 2, "cpu").requires_grad


class Mistake(NamedTuple):
    error: type[Exception]
    texts: Sequence[str]
    outputs: Any
    device: Any = "cpu"
    dim: int = 0


X = numbered(2)
MISTAKES = {
    "nothing": Mistake(StructureError, ["nothing to gather"], []),
    "unknown device": Mistake(DeviceError, ["'nowhere'"], [X, X], "nowhere"),
    "not here": Mistake(DeviceError, ["'cuda:5'"], [X, X], "cuda:5"),
    "index": Mistake(DeviceError, ["1000000"], [X, X], 10**6),
    "-2": Mistake(DeviceError, ["-2"], [X, X], -2),
    "bool": Mistake(DeviceError, ["True"], [X, X], True),
    "no device": Mistake(DeviceError, ["None"], [X, X], None),
    "cannot be moved": Mistake(DeviceError, ["outputs[0][0]", "meta"], [[torch.ones(2, device="meta")]]),
    "dim": Mistake(DimensionError, ["outputs[0] has no dimension 2", "(2, 2)"], [X, X], dim=2),
    "negative dim": Mistake(DimensionError, ["outputs[0]['x'] has no dimension -3"], [{"x": X}] * 2, dim=-3),
    "scalars, not dim 0": Mistake(
        DimensionError, ["outputs[0] has no dimension -1"], [torch.tensor(1.0)] * 2, dim=-1
    ),
    "scalar beside vector": Mistake(ShapeError, ["outputs[1]: shape ()"], [torch.ones(2), torch.tensor(1.0)]),
    "vector beside scalar": Mistake(
        DimensionError, ["outputs[0]", "shape ()"], [torch.tensor(1.0), torch.ones(2)]
    ),
    "sizes": Mistake(
        ShapeError,
        ["outputs[0]['loss']: shape (2, 2)", "outputs[2]['loss']: shape (2, 3)"],
        [{"loss": X}, {"loss": X}, {"loss": numbered(2, 3)}],
    ),
    "dtypes": Mistake(
        ShapeError,
        ["outputs[0].x: shape (2, 2), float32", "outputs[1].x: ", "int64"],
        [Plain(X), Plain(X.long())],
    ),
    "tensor or not": Mistake(StructureError, ["outputs[0]: Tensor", "outputs[1]: int"], [X, 1]),
    "not or tensor": Mistake(StructureError, ["outputs[0]", "outputs[1]"], [1, X]),
    "None or tensor": Mistake(
        StructureError, ["outputs[0]['aux']", "outputs[1]['aux']"], [{"aux": None}, {"aux": X}]
    ),
    "tensor or None": Mistake(
        StructureError,
        ["outputs[0]['aux']: Tensor", "outputs[1]['aux']: NoneType"],
        [{"aux": X}, {"aux": None}],
    ),
    "list or tuple": Mistake(
        StructureError, ["outputs[0][1]: list", "outputs[1][1]: tuple"], [(X, [X]), (X, (X,))]
    ),
    "lengths": Mistake(
        StructureError, ["outputs[0].b: 1", "outputs[1].b: 2"], [Pair(X, [X]), Pair(X, [X, X])]
    ),
    "empty": Mistake(StructureError, ["outputs[0]: 1", "outputs[1]: 0"], [[X], []]),
    "number of keys": Mistake(
        StructureError,
        ["All dicts must have the same number of keys", "outputs[0]['d']: 1", "outputs[1]['d']: 2"],
        [{"d": {"a": X}}, {"d": {"a": X, "b": X}}],
    ),
    "missing key": Mistake(
        MissingKeyError,
        ["outputs[1][0] lacks the key 'loss'", "outputs[0][0]"],
        [[{"loss": X}], [{"cost": X}]],
    ),
    "numbers": Mistake(StructureError, ["outputs[0]['n']: 1", "outputs[1]['n']: 2"], [{"n": 1}, {"n": 2}]),
    "strings": Mistake(StructureError, ["outputs[0]: 'a'", "outputs[1]: 'b'"], ["a", "b"]),
    "number types": Mistake(StructureError, ["outputs[0]: 1", "outputs[1]: True"], [1, True]),
    "objects": Mistake(StructureError, ["outputs[0][0]", "outputs[1][0]"], [[object()], [object()]]),
    "contexts": Mistake(StructureError, ["outputs[0]", "outputs[1]"], [Box(X, label="a"), Box(X, label="b")]),
    "limits": Mistake(StructureError, ["outputs[0]", "outputs[1]"], [deque([X], 3), deque([X], 4)]),
    "registered keys": Mistake(
        ShapeError, ["outputs[1]['k1']: shape (2, 3)"], [KeyedBox(1, X), KeyedBox(1, numbered(2, 3))]
    ),
    "different fields set": Mistake(
        StructureError, ["outputs[0]", "outputs[1]"], [late(left=X), late(right=X)]
    ),
}
each_mistake = pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)


@each_mistake
def test_an_error_names_the_input_and_the_next_call_works(mistake: Mistake) -> None:
    with pytest.raises(mistake.error) as caught:
        gather(mistake.outputs, mistake.device, mistake.dim)
    assert [text for text in mistake.texts if text not in str(caught.value)] == []
    assert torch.equal(gather([numbered(1), numbered(1)], "cpu"), torch.cat([numbered(1), numbered(1)]))


def test_a_missing_key_is_a_value_error_and_a_key_error() -> None:
    with pytest.raises(MissingKeyError) as caught:
        gather([{"a": 1}, {"b": 1}], "cpu")
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == "outputs[1] lacks the key 'a' that outputs[0] has"


def test_a_long_value_is_cut_short_in_the_message() -> None:
    with pytest.raises(StructureError) as caught:
        gather(["a" * 10_000, "b" * 10_000], "cpu")
    assert len(str(caught.value)) < 400


@pytest.mark.usefixtures("no_gc")
def test_no_reference_cycle_is_left_behind() -> None:
    x = numbered(4).requires_grad_()
    nest = {"a": [x, Plain(x)], "b": (Box(x), deque([x]), x.max(1), Pair(x, ()))}
    gathered = gather([nest, nest], "cpu")
    dead = [weakref.ref(x), weakref.ref(gathered["a"][0]), weakref.ref(gathered["b"][0])]
    del x, nest, gathered
    assert [ref() for ref in dead] == [None, None, None]
    assert gc.collect() == 0


@pytest.mark.parametrize(
    "name", ["dim", "sizes", "tensor or not", "lengths", "missing key", "numbers", "index"]
)
@pytest.mark.usefixtures("no_gc")
def test_no_reference_cycle_is_left_behind_by_an_error(name: str) -> None:
    mistake = MISTAKES[name]
    beside = numbered(4)
    try:
        gather([(beside, output) for output in mistake.outputs], mistake.device, mistake.dim)
    except PacelineError as error:
        dead = [weakref.ref(error), weakref.ref(beside)]
    del beside
    assert [ref() for ref in dead] == [None, None]
    assert gc.collect() == 0
