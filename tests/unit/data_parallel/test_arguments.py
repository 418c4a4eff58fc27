"""Arguments of every kind reach the replicas, and outputs of every kind come back."""

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import random_rows
from replicas import (
    COUNTS,
    TWO,
    Call,
    assert_same,
    assert_same_as_module,
)
from torch import nn

from paceline import DataParallel, data_parallel


@pytest.mark.parametrize("count", COUNTS)
def test_a_module_without_inputs_runs_once(count: int) -> None:
    module = Call(lambda m: m.weight * 2)
    assert_same_as_module(module, count=count)
    assert_same(data_parallel(module, None, ["cpu"] * count), module())
    assert_same(data_parallel(module, (), ["cpu"] * count), module())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("empty", [{}, [], (), None], ids=str)
def test_keyword_arguments_alone_may_include_empty_values(count: int, empty: Any) -> None:
    def check(m: nn.Module, *, x: torch.Tensor, extra: Any) -> torch.Tensor:
        assert extra == empty
        assert type(extra) is type(empty)
        return x * m.weight

    module, x = Call(check), random_rows()
    assert_same_as_module(module, x=x, extra=empty, count=count)
    y = data_parallel(module, None, ["cpu"] * count, module_kwargs={"x": x, "extra": empty})
    assert_same(y, module(x=x, extra=empty))


@pytest.mark.parametrize("count", COUNTS)
def test_positional_keyword_and_non_tensor_arguments_can_be_mixed(count: int) -> None:
    def forward(m: nn.Module, x: torch.Tensor, power: int, *, y: torch.Tensor, name: str) -> torch.Tensor:
        assert name == "n"
        return x * m.weight**power + y

    x, y = random_rows().requires_grad_(), random_rows().requires_grad_()
    module = Call(forward)
    expected = torch.autograd.grad(module(x, 3, y=y, name="n").square().sum(), (x, y, module.weight))
    out = DataParallel(module, ["cpu"] * count)(x, 3, y=y, name="n")
    assert_same(torch.autograd.grad(out.square().sum(), (x, y, module.weight)), expected)


def test_arguments_that_are_not_tensors_reach_every_replica() -> None:
    marker = object()
    seen: list[object] = []
    module = Call(lambda m, x, thing: seen.append(thing) or x * m.weight)
    DataParallel(module, ["cpu"] * 3)(random_rows(), marker)
    assert seen == [marker] * 3


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: list[torch.Tensor]


@pytest.mark.parametrize(
    "build",
    [
        lambda a, b: [a, (b, {"k": a})],
        lambda a, b: {"a": a, "b": [b]},
        lambda a, b: OrderedDict(b=b, a=a),
        lambda a, b: Point(a, Point(b, a)),
        lambda a, b: Pair(a, [b, a]),
        lambda a, b: (a, None, (), b),
    ],
    ids=["list", "dict", "OrderedDict", "namedtuple", "dataclass", "with empty ones"],
)
@pytest.mark.parametrize("count", COUNTS)
def test_nested_inputs_and_outputs_keep_their_structure_and_gradients(
    build: Callable[..., Any], count: int
) -> None:
    def leaves(value: Any) -> list[torch.Tensor]:
        if isinstance(value, Pair):
            value = [value.a, *value.b]
        if isinstance(value, dict):
            value = [*value.values()]
        if isinstance(value, torch.Tensor):
            return [value]
        return [leaf for child in value or () for leaf in leaves(child)]

    def forward(m: nn.Module, value: Any) -> Any:
        flat = leaves(value)
        total = sum(flat[1:], flat[0]) * m.weight
        return build(total, flat[-1].sin())

    module, a, b = Call(forward), random_rows().requires_grad_(), random_rows().requires_grad_()
    expected, got = module(build(a, b)), DataParallel(module, ["cpu"] * count)(build(a, b))
    assert type(got) is type(expected)
    assert_same(leaves(got), leaves(expected))
    inputs = (a, b, module.weight)
    total, total_expected = (sum(leaf.square().sum() for leaf in leaves(v)) for v in (got, expected))
    assert_same(torch.autograd.grad(total, inputs), torch.autograd.grad(total_expected, inputs))


def test_scalar_outputs_become_a_vector_with_a_warning() -> None:
    module, x = Call(lambda m, x: (x * m.weight).sum()), random_rows()
    with pytest.warns(UserWarning, match="will instead unsqueeze and return a vector"):
        y = DataParallel(module, TWO)(x)
    assert_same(y, torch.stack([module(x[:3]), module(x[3:])]))
