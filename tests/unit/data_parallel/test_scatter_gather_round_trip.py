"""Gathering what was scattered gives it back, bit for bit, and the gradients too."""

import dataclasses
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from containers import Names, Pair, Settings, Tagged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import MappingKey, register_pytree_node

from paceline import gather, scatter, scatter_kwargs

SHARED = object()


class Typed(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any


@dataclasses.dataclass(init=False)
class Late:
    scale: dataclasses.InitVar[int]
    a: Any = dataclasses.field(init=False)
    b: Any = dataclasses.field(init=False)

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class Box:
    def __init__(self, items: list[Any], label: str) -> None:
        self.items = items
        self.label = label


class KeyedBox(Box):
    pass


register_pytree_node(Box, lambda box: (box.items, box.label), Box)
register_pytree_node(
    KeyedBox,
    lambda box: (box.items, box.label),
    KeyedBox,
    flatten_with_keys_fn=lambda box: (
        [(MappingKey(f"k{i}"), item) for i, item in enumerate(box.items)],
        box.label,
    ),
)


class Case(NamedTuple):
    structure: Any
    dim: int
    devices: list[str]


SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-45]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def content(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 100
    if dtype.is_floating_point:
        values.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)[: values.numel()]
        return values.to(dtype)
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


@st.composite
def tensors(draw: st.DrawFn, dim: int, size: int) -> torch.Tensor:
    """Any tensor with ``size`` rows along ``dim``."""
    shape = draw(st.lists(st.integers(0, 3), min_size=2, max_size=3))
    shape[dim] = size
    dtype = draw(st.sampled_from(DTYPES))
    tensor = content(shape, dtype, draw(st.integers(0, 9)))
    if draw(st.booleans()):
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if (dtype.is_floating_point or dtype.is_complex) and draw(st.booleans()):
        return tensor.requires_grad_()
    return tensor.as_subclass(Tagged) if draw(st.booleans()) else tensor


def objects() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    return plain | st.sampled_from([SHARED, (), [], {}, OrderedDict(), b"bytes", 1j, torch.float32])


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(children, min_size=1, max_size=3)
    keys = st.text(max_size=2) | st.integers(0, 3) | st.tuples(st.integers(0, 1))
    table = st.dictionaries(keys, children, min_size=1, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        several.map(Names),
        st.builds(deque, several, st.sampled_from([None, 5])),
        table,
        table.map(OrderedDict),
        table.map(Settings),
        st.builds(defaultdict, st.just(list), table),
        *(st.builds(kind, children, children) for kind in (Pair, Typed, Plain, Frozen, Late)),
        *(st.builds(kind, several, st.sampled_from(["l", "m"])) for kind in (Box, KeyedBox)),
    )


@functools.cache  # building a strategy takes longer than drawing from it
def structures(dim: int, size: int) -> st.SearchStrategy[Any]:
    tensor = tensors(dim, size)
    return tensor | st.recursive(tensor | objects(), containers, max_leaves=8)


@st.composite
def cases(draw: st.DrawFn, dims: tuple[int, ...] = (0, 1, -1, -2)) -> Case:
    dim = draw(st.sampled_from(dims))
    structure = draw(structures(dim, draw(st.integers(0, 7))))
    return Case(structure, dim, ["cpu"] * draw(st.integers(1, 5)))


def children(obj: Any) -> list[tuple[Any, Any]]:
    """Every child with its key; the test's own idea of what is inside."""
    if isinstance(obj, dict):
        return [*obj.items()]
    if isinstance(obj, list | tuple | deque):
        return [*enumerate(obj)]
    if isinstance(obj, Box):
        return [*enumerate(obj.items)]
    return [("a", obj.a), ("b", obj.b)] if isinstance(obj, Plain | Frozen | Late) else []


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
    inside, others = children(one), children(other)
    if not inside:
        return one is other or one == other
    if [key for key, _ in inside] != [key for key, _ in others]:
        return False
    knows = [(getattr(it, "maxlen", 0), getattr(it, "default_factory", 0)) for it in (one, other)]
    labels = [getattr(it, "label", "") for it in (one, other)]
    pairs = zip(inside, others, strict=True)
    return knows[0] == knows[1] and labels[0] == labels[1] and all(same(a[1], b[1]) for a, b in pairs)


def found(obj: Any, fits: Callable[[torch.Tensor], bool]) -> Iterator[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        if fits(obj):
            yield obj
    else:
        for _, child in children(obj):
            yield from found(child, fits)


def in_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


def anywhere(_: torch.Tensor) -> bool:
    return True


few = settings(max_examples=200, deadline=None)


@few
@given(cases())
def test_gather_undoes_scatter_bit_for_bit(case: Case) -> None:
    pieces = scatter(case.structure, case.devices, case.dim)
    assert same(gather(pieces, "cpu", case.dim), case.structure)


@few
@given(cases())
def test_scatter_gives_torchs_chunks_of_every_tensor(case: Case) -> None:
    pieces = scatter(case.structure, case.devices, case.dim)
    wholes = list(found(case.structure, anywhere))
    columns = [list(found(piece, anywhere)) for piece in pieces]
    assert type(pieces) is (tuple if isinstance(case.structure, torch.Tensor) else list)
    for i, whole in enumerate(wholes):
        chunks = whole.chunk(len(case.devices), case.dim)
        assert same(list(chunks), [column[i] for column in columns])
    if not wholes:
        assert len(pieces) == len(case.devices)


@few
@given(cases(), st.integers(0, 9))
def test_gather_and_scatter_pass_gradients_unchanged(case: Case, seed: int) -> None:
    gathered = gather(scatter(case.structure, case.devices, case.dim), "cpu", case.dim)
    before, after = (list(found(obj, in_graph)) for obj in (case.structure, gathered))
    assert len(before) == len(after)
    if before:
        sent = [content([*tensor.shape], torch.float32, seed).to(tensor.dtype) for tensor in after]
        assert same(list(torch.autograd.grad(after, before, sent)), sent)


@few
@given(cases((0,)), cases((0,)))
def test_scatter_kwargs_gives_as_many_inputs_as_kwargs(one: Case, other: Case) -> None:
    positional, keyword = scatter_kwargs((one.structure,), {"k": other.structure}, one.devices)
    assert len(positional) == len(keyword) <= len(one.devices)
    gathered = gather([piece for piece in positional if piece], "cpu")
    assert same(gathered, (one.structure,))
    gathered = gather([piece for piece in keyword if piece], "cpu")
    assert same(gathered, {"k": other.structure})
