"""Backward passes of every kind through the wrapper: repeated, partial, double, from other threads."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from batches import random_rows
from replicas import (
    COUNTS,
    TWO,
    Call,
    Gradients,
    assert_same,
    gradients,
    small_net,
    trained,
)
from torch import nn
from torch.autograd import forward_ad

from paceline import DataParallel


def penalised(call: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> Gradients:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    (slope.norm() - 1).square().backward()
    return gradients(module)


def penalised_square(call: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> Gradients:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return gradients(module)


def loss_with_penalty(call: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> Gradients:
    x = x.clone().requires_grad_()
    y = call(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().mean() + slope.square().sum()).backward()
    return gradients(module)


@pytest.mark.parametrize("run", [penalised, penalised_square, loss_with_penalty])
@pytest.mark.parametrize("count", COUNTS)
def test_a_gradient_penalty_differentiates_through_the_wrapper_twice(
    run: Callable[..., Gradients], count: int
) -> None:
    module, x = small_net(), random_rows()
    expected = {
        name: torch.zeros(2, dtype=torch.double) if g is None else g
        for name, g in run(module, module, x).items()
    }
    got = run(DataParallel(module, ["cpu"] * count), module, x)
    assert_same(
        {name: torch.zeros(2, dtype=torch.double) if g is None else g for name, g in got.items()}, expected
    )


def test_a_bias_that_a_penalty_does_not_use_gets_zeros() -> None:
    module = nn.Linear(2, 1).double()
    assert_same(
        penalised(DataParallel(module, TWO), module, random_rows())["bias"],
        torch.zeros(1, dtype=torch.double),
    )


def test_a_penalty_over_parameters_gives_second_derivatives() -> None:
    module, x = small_net(), random_rows()

    def run(call: Callable[..., torch.Tensor]) -> Sequence[torch.Tensor]:
        parameters = [*module.parameters()]
        first = torch.autograd.grad(call(x).square().sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), parameters)

    assert_same(run(DataParallel(module, TWO)), run(module))


def test_third_derivatives_are_those_of_the_module() -> None:
    module, x = Call(lambda m, x: (x * m.weight).sin().exp()), random_rows().requires_grad_()

    def run(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        y = call(x).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y

    assert_same(run(DataParallel(module, TWO)), run(module))


def test_backward_of_a_single_row_of_the_output() -> None:
    module, x = small_net(), random_rows()
    module(x)[4].sum().backward()
    expected = gradients(module)
    DataParallel(module, ["cpu"] * 3)(x)[4].sum().backward()
    assert_same(gradients(module), expected)


def test_backward_works_after_wrapper_and_output_are_freed() -> None:
    module, x = small_net(), random_rows()
    loss = DataParallel(module, TWO)(x).square().sum()
    loss.backward()
    got = gradients(module)
    module(x).square().sum().backward()
    assert_same(got, gradients(module))


def test_a_retained_graph_allows_a_second_backward() -> None:
    module, x = small_net(), random_rows()
    loss = DataParallel(module, TWO)(x).square().sum()
    loss.backward(retain_graph=True)
    first = gradients(module)
    loss.backward()
    assert_same(gradients(module), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_two_outputs_with_separate_graphs_allow_one_backward_each() -> None:
    module = Call(lambda m, x: ((x * m.weight).sin(), (x * m.weight).exp()))
    x = random_rows()
    for output in DataParallel(module, TWO)(x):
        output.sum().backward()
    got = gradients(module)
    sum(output.sum() for output in module(x)).backward()
    assert_same(got, gradients(module))


def test_gradients_with_respect_to_inputs_and_parameters() -> None:
    module, x = small_net(), random_rows().requires_grad_()
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), inputs)
    assert_same(torch.autograd.grad(DataParallel(module, TWO)(x).square().sum(), inputs), expected)
    assert all(tensor.grad is None for tensor in inputs)


def test_backward_with_inputs_fills_only_those() -> None:
    module, x = small_net(), random_rows().requires_grad_()
    DataParallel(module, TWO)(x).sum().backward(inputs=[module[0].weight])
    assert module[0].weight.grad is not None
    assert module[2].weight.grad is None
    assert x.grad is None


def test_one_backward_may_follow_two_calls() -> None:
    module, a, b = small_net(), random_rows(), random_rows(5, 2)
    wrapper = DataParallel(module, TWO)
    (wrapper(a).square().sum() + wrapper(b).sum()).backward()
    got = gradients(module)
    (module(a).square().sum() + module(b).sum()).backward()
    assert_same(got, gradients(module))


def test_the_output_of_one_call_may_be_the_input_of_the_next() -> None:
    module, x = small_net(), random_rows()
    wrapper = DataParallel(module, TWO)
    expected = trained(lambda x: module(module(module(x))), module, x)
    assert_same(trained(lambda x: wrapper(wrapper(wrapper(x))), module, x), expected)


def test_a_long_chain_of_calls_has_the_modules_gradients() -> None:
    module, x = Call(lambda m, x: (x * m.weight).tanh()), random_rows()
    wrapper = DataParallel(module, TWO)

    def chain(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            for _ in range(80):
                x = call(x)
            return x

        return run

    expected = trained(chain(module), module, x)
    assert_same(trained(chain(wrapper), module, x), expected)


def test_backward_may_run_in_another_thread() -> None:
    module, x = small_net(), random_rows()
    expected = trained(module, module, x)[1]
    loss = DataParallel(module, TWO)(x).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same(gradients(module), expected)


def test_autocast_and_default_device_of_backward_reach_every_replica() -> None:
    seen: list[tuple[bool, torch.dtype, str]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            dtype = torch.get_autocast_dtype("cpu")
            seen.append((torch.is_autocast_enabled("cpu"), dtype, torch.get_default_device().type))
            return gradient

    module = Call(lambda m, x: Look.apply(x * m.weight))
    for call in (module, DataParallel(module, ["cpu"] * 3)):
        loss = call(random_rows()).sum()
        with torch.autocast("cpu", dtype=torch.float16), torch.device("meta"):
            loss.backward()
    assert seen == [seen[0]] * 4
    assert seen[0][:2] == (True, torch.float16)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_derivatives_are_those_of_the_module(grad: bool) -> None:
    module, x, direction = small_net(), random_rows(), random_rows()

    def slope(call: Callable[..., torch.Tensor]) -> torch.Tensor | None:
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, direction))).tangent

    assert_same(slope(DataParallel(module, TWO)), slope(module))
