"""The wrapper's outputs and gradients are those of the module itself."""

import threading
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
    gradients,
    small_net,
    trained,
)
from torch import nn

from paceline import DataParallel, data_parallel


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
def test_outputs_and_gradients_are_those_of_the_module(count: int, size: int) -> None:
    assert_same_as_module(small_net(), random_rows(size, 2), count=count)


@pytest.mark.parametrize("count", COUNTS)
def test_the_function_returns_what_the_module_returns(count: int) -> None:
    module, x = small_net(), random_rows()
    expected = trained(module, module, x)
    assert_same(trained(lambda x: data_parallel(module, x, ["cpu"] * count), module, x), expected)


@pytest.mark.parametrize("dim", [1, -1])
def test_the_batch_may_be_along_another_dimension(dim: int) -> None:
    module, x = Call(lambda m, x: x * m.weight[:, None]), random_rows(2, 5)
    expected = trained(module, module, x)
    assert_same(trained(DataParallel(module, TWO, dim=dim), module, x), expected)
    assert_same(trained(lambda x: data_parallel(module, x, TWO, dim=dim), module, x), expected)


@pytest.mark.parametrize("output_device", [None, "cpu", -1, torch.device("cpu")])
def test_the_output_device_may_be_named_in_any_way(output_device: Any) -> None:
    module, x = small_net(), random_rows()
    assert_same(DataParallel(module, TWO, output_device)(x), module(x))
    assert_same(data_parallel(module, x, TWO, output_device), module(x))


@pytest.mark.parametrize("device_ids", [("cpu", "cpu"), [torch.device("cpu"), "cpu:0"], iter(["cpu", "cpu"])])
def test_devices_may_be_objects_names_and_any_iterable(device_ids: Any) -> None:
    module, x = small_net(), random_rows()
    wrapper = DataParallel(module, device_ids)
    assert_same(wrapper(x), module(x))
    assert len(wrapper.device_ids) == 2


def test_one_replica_runs_per_chunk() -> None:
    shapes: list[int] = []
    module = Call(lambda m, x: shapes.append(len(x)) or x * m.weight)
    DataParallel(module, ["cpu"] * 5)(random_rows(3, 2))
    assert sorted(shapes) == [1, 1, 1]


def test_replicas_run_at_the_same_time() -> None:
    everyone = threading.Barrier(3, timeout=30)
    module = Call(lambda m, x: (everyone.wait(), x * m.weight)[1])
    DataParallel(module, ["cpu"] * 3)(random_rows())


def test_backward_of_the_replicas_runs_at_the_same_time() -> None:
    everyone = threading.Barrier(3, timeout=30)

    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            everyone.wait()
            return gradient

    DataParallel(Call(lambda m, x: Meet.apply(x * m.weight)), ["cpu"] * 3)(random_rows()).sum().backward()


def test_gradients_accumulate_over_backwards() -> None:
    module, x = small_net(), random_rows()
    wrapper = DataParallel(module, TWO)
    for _ in range(2):
        wrapper(x).sum().backward()
    twice = gradients(module)
    (2 * module(x).sum()).backward()
    assert_same(twice, gradients(module))


def test_gradients_have_the_same_bits_in_each_run() -> None:
    module, x = small_net(), random_rows(50, 2)
    wrapper = DataParallel(module, ["cpu"] * 3)
    first = trained(wrapper, module, x)
    for _ in range(5):
        torch.testing.assert_close(trained(wrapper, module, x), first, rtol=0, atol=0)


def test_gradients_of_two_parameters_do_not_share_memory() -> None:
    module = Call(lambda m, x: x + m.weight + m.other)
    module.other = nn.Parameter(random_rows(2))
    DataParallel(module, TWO)(random_rows()).sum().backward()
    module.weight.grad.zero_()
    assert module.other.grad.eq(6).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("count", COUNTS)
def test_without_grad_outputs_are_the_same_and_require_no_gradient(mode: Any, count: int) -> None:
    states: list[bool] = []
    module, x = Call(lambda m, x: states.append(torch.is_grad_enabled()) or x * m.weight), random_rows()
    with mode():
        y = DataParallel(module, ["cpu"] * count)(x)
        assert_same(y, module(x))
    assert not y.requires_grad
    assert not any(states)


@pytest.mark.parametrize("count", COUNTS)
def test_autocast_applies_in_replicas_and_gradients_stay_in_full_precision(count: int) -> None:
    module = nn.Linear(2, 2)
    x = torch.randn(6, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = DataParallel(module, ["cpu"] * count)(x)
        expected = module(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert module.weight.grad.dtype == torch.float32


def test_a_module_called_without_grad_may_enable_it() -> None:
    def slope(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x.square() * m.weight).sum(), x)[0]

    module, x = Call(slope), random_rows()
    with torch.no_grad():
        assert_same(DataParallel(module, TWO)(x), module(x))
