"""What could slip past the node that runs the replicas' backward in threads."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import batches
import pytest
import torch
from replicas import TWO, assert_same
from torch import nn

from paceline import DataParallel, replicate

rows = functools.partial(batches.rows, count=4, width=3, dtype=torch.double)


class Call(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3).double()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)


def gradients(module: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in module.parameters()]


def test_an_outside_leaf_that_is_returned_gets_its_gradient() -> None:
    outside = torch.ones(2, 3, dtype=torch.double, requires_grad=True)
    first, second = DataParallel(Call(lambda m, x: (m.linear(x), outside)), TWO)(rows())
    (first.sum() + second.sum()).backward()
    assert outside.grad.eq(2).all()


def test_a_replica_that_uses_another_replicas_parameter_gives_it_its_gradient() -> None:
    x, kept, ready = rows(), [], threading.Event()

    def forward(m: Call, given: torch.Tensor) -> torch.Tensor:
        if torch.equal(given[0], x[0]):
            kept.append(m.linear.weight)
            ready.set()
        assert ready.wait(30)
        return given @ kept[0].T

    module = Call(forward)
    got = gradients(module, DataParallel(module, TWO)(x).square().sum())
    kept.clear()
    assert_same(got[0], gradients(module, module(x).square().sum())[0])


def test_a_write_to_the_input_changes_the_version_of_the_callers_tensor() -> None:
    weight, x = rows().requires_grad_(), rows()
    saved = weight * x
    output = DataParallel(Call(lambda m, x: m.linear(x.mul_(0))), TWO)(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (saved.sum() + output.sum()).backward()


@pytest.mark.parametrize("aux_first", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("count", [2, 3])
def test_a_loss_may_use_tensors_that_forward_left_outside_its_outputs(
    aux_first: bool, depth: int, count: int
) -> None:
    kept: list[torch.Tensor] = []

    def forward(m: Call, x: torch.Tensor) -> torch.Tensor:
        for _ in range(depth):
            x = m.linear(x).tanh()
        kept.append(x.square().sum())
        return m.linear(x)

    def loss(call: nn.Module) -> torch.Tensor:
        kept.clear()
        output = call(rows(count=6)).sin().sum()
        return sum(kept) + output if aux_first else output + sum(kept)

    module = Call(forward)
    expected = gradients(module, loss(module))
    assert_same(gradients(module, loss(DataParallel(module, ["cpu"] * count))), expected)


def test_a_tensor_that_is_returned_twice_stays_one_tensor() -> None:
    def forward(m: Call, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = m.linear(x)
        return y, y

    module = Call(forward)
    outputs = DataParallel(module, TWO, gather="list")(rows())
    for first, second in outputs:
        first.mul_(3)
        assert second is first
    got = gradients(module, sum(second.square().sum() for _, second in outputs))
    assert_same(got, gradients(module, (module(rows())[0] * 3).square().sum()))


def test_one_gradient_passed_for_two_outputs_counts_for_both() -> None:
    def second_order(call: nn.Module) -> list[torch.Tensor]:
        x, weights = rows(count=2).requires_grad_(), torch.ones(1, 3, dtype=torch.double, requires_grad=True)
        outputs = [tensor for output in call(x) for tensor in output]
        (first,) = torch.autograd.grad(outputs, x, [weights] * 4, create_graph=True)
        return [*torch.autograd.grad(first.square().sum(), [weights, module.linear.weight])]

    module = Call(lambda m, x: (m.linear(x).tanh(), m.linear(x).exp()))
    halves = Call(lambda _, x: [module(half) for half in x.chunk(2)])
    assert_same(second_order(DataParallel(module, TWO, gather="list")), second_order(halves))


def test_a_backward_without_python_code_is_left_to_the_engine() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        backward = staticmethod(functools.partial(lambda scale, _ctx, g: g * scale, 2))

    module = Call(lambda m, x: Odd.apply(m.linear(x)))
    expected = gradients(module, module(rows()).sum())
    assert_same(gradients(module, DataParallel(module, TWO)(rows()).sum()), expected)


@pytest.mark.parametrize("grad", [True, False])
def test_an_empty_container_is_the_same_for_all_replicas(grad: bool) -> None:
    sink: list[int] = []
    with torch.set_grad_enabled(grad):
        DataParallel(Call(lambda m, x, sink: (sink.append(1), m.linear(x))[1]), TWO)(rows(), sink=sink)
    assert sink == [1, 1]


@dataclass
class Stats:
    calls: int = 0


def test_an_object_without_tensors_is_the_same_for_all_replicas() -> None:
    stats = Stats()

    def forward(m: Call, x: torch.Tensor, stats: Stats) -> torch.Tensor:
        stats.calls += 1
        return m.linear(x)

    DataParallel(Call(forward), TWO)(rows(), stats)
    assert stats.calls == 2


def test_a_compiled_part_keeps_its_parameters_and_gets_its_gradients() -> None:
    module = nn.Sequential(torch.compile(nn.Linear(3, 3).double(), backend="eager"), nn.Tanh())
    names = [name for name, _ in module.named_parameters()]
    replicate(module, TWO)
    assert [name for name, _ in module.named_parameters()] == names
    expected = gradients(module, module(rows()).sum())
    assert_same(gradients(module, DataParallel(module, TWO)(rows()).sum()), expected)


def test_a_module_compiled_in_place_runs_its_replicas() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3)).double()
    module.compile(backend="eager")
    DataParallel(module, TWO)(rows())
    assert module[0].num_batches_tracked == 1


def test_a_wrapper_that_was_compiled_can_be_pickled() -> None:
    wrapper = DataParallel(Call(len).linear, TWO)
    wrapper.compile(backend="eager")
    assert "_compiled_call_impl" not in wrapper.__getstate__()


class Loud(nn.Linear):
    def _replicate_for_data_parallel(self) -> nn.Module:
        replica = super()._replicate_for_data_parallel()
        replica.copied = True
        return replica

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.copied
        return super().forward(x)


def test_a_submodule_with_a_new_class_is_copied_in_the_way_of_that_class() -> None:
    module = nn.Sequential(nn.Linear(3, 3).double())
    wrapper = DataParallel(module, TWO)
    wrapper(rows())
    module[0].__class__ = Loud
    wrapper(rows())


class OwnText(Exception):  # noqa: N818 - short
    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def test_an_error_with_its_own_str_names_the_replica_in_a_note() -> None:
    def forward(_m: Call, _x: torch.Tensor) -> None:
        raise OwnText("boom")

    with pytest.raises(OwnText) as caught:
        DataParallel(Call(forward), TWO)(rows())
    assert "replica 0" in "".join([str(caught.value), *caught.value.__notes__])
