"""Wrong devices, inputs, modules and outputs are refused by name, and errors say in which replica."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import random_rows
from replicas import TWO, FailsBackward
from torch import nn

from paceline import (
    DataParallel,
    DeviceError,
    MissingKeyError,
    PacelineError,
    ShapeError,
    StructureError,
    UnsupportedError,
    data_parallel,
    replicate,
)


class Switched(nn.Module):
    """A linear layer, until a function is put in its way; the function gets the layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2).double()
        self.way: Callable[[torch.Tensor], Any] | None = None

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        y = self.linear(x)
        return y if self.way is None else self.way(y)


def is_second(y: torch.Tensor) -> bool:
    """Five rows on two replicas are three and two."""
    return len(y) == 2


def assert_works(wrapper: DataParallel[Switched]) -> None:
    wrapper.module.way = None
    x, parameters = random_rows(5, 2), [*wrapper.module.parameters()]
    y, expected = wrapper(x), wrapper.module(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        rtol=1e-12,
        atol=1e-12,
    )


# Devices


@pytest.mark.parametrize("devices", [[], (), iter([])])
def test_an_empty_list_of_devices_is_refused(devices: Any) -> None:
    with pytest.raises(DeviceError, match="at least one device is needed"):
        DataParallel(nn.Linear(2, 2), devices)


def test_the_function_refuses_an_empty_list_of_devices() -> None:
    with pytest.raises(DeviceError, match="at least one device is needed"):
        data_parallel(nn.Linear(2, 2), torch.ones(2, 2), [])


@pytest.mark.parametrize(
    "device", ["nowhere", "cuda:0", "cuda:99", "cpu:x", torch.device("cuda", 3), 1.5, None]
)
def test_an_unknown_device_is_refused_and_named(device: Any) -> None:
    with pytest.raises(DeviceError, match=str(device).replace(".", r"\.")):
        DataParallel(nn.Linear(2, 2), ["cpu", device])
    with pytest.raises(DeviceError, match=str(device).replace(".", r"\.")):
        replicate(nn.Linear(2, 2), ["cpu", device])


@pytest.mark.parametrize("device", ["nowhere", "cuda:0", 1.5])
def test_an_unknown_output_device_is_refused_and_named(device: Any) -> None:
    with pytest.raises(DeviceError, match=str(device)):
        DataParallel(nn.Linear(2, 2), TWO, device)


def test_a_device_number_among_names_is_refused_with_advice() -> None:
    with pytest.raises(DeviceError, match=r"no accelerator here.*device: 0.*'cpu'"):
        DataParallel(nn.Linear(2, 2), ["cpu", 0])


def test_a_boolean_is_not_a_device_number() -> None:
    with pytest.raises(DeviceError, match="True"):
        DataParallel(nn.Linear(2, 2), [True])


# Inputs


@pytest.mark.parametrize("devices", [["cpu"], TWO])
@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ((torch.ones(4, 2, device="meta"),), {}, r"inputs\[0\] "),
        ((torch.ones(4, 2), [torch.ones(4, device="meta")]), {}, r"inputs\[1\]\[0\] "),
        ((torch.ones(4, 2),), {"a": {"b": torch.ones(4, device="meta")}}, r"\['a'\]\['b'\] "),
    ],
)
def test_an_input_that_cannot_be_moved_is_named(
    devices: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], path: str
) -> None:
    wrapper = DataParallel(Switched(), devices)
    with pytest.raises(DeviceError, match=path + r"cannot be moved \(from meta to cpu"):
        wrapper(*args, **kwargs)
    assert_works(wrapper)


def test_inputs_of_different_lengths_are_named() -> None:
    wrapper = DataParallel(Switched(), ["cpu"] * 3)
    with pytest.raises(StructureError, match=r"inputs\[0\]: 3, inputs\[1\]: 2"):
        wrapper(random_rows(6, 2), random_rows(2, 2))
    assert_works(wrapper)


def test_an_input_without_the_dimension_is_named() -> None:
    wrapper = DataParallel(Switched(), TWO)
    with pytest.raises(ShapeError, match=r"inputs\[1\] cannot be scattered along dimension 0"):
        wrapper(random_rows(5, 2), torch.tensor(1.0))
    assert_works(wrapper)


# Modules


def test_a_parameter_on_another_device_is_named() -> None:
    wrapper = DataParallel(Switched(), TWO)
    kept = wrapper.module.linear.weight
    wrapper.module.linear.weight = nn.Parameter(torch.ones(2, 2, device="meta"))
    message = r"module must have its parameters and buffers on device cpu.*meta.*linear\.weight"
    with pytest.raises(DeviceError, match=message) as caught:
        wrapper(random_rows(5, 2))
    assert isinstance(caught.value, RuntimeError)
    wrapper.module.linear.weight = kept
    assert_works(wrapper)


@pytest.mark.parametrize("devices", [["cpu"], TWO])
def test_a_buffer_on_another_device_is_named(devices: list[str]) -> None:
    wrapper = DataParallel(Switched(), devices)
    wrapper.module.linear.register_buffer("mask", torch.ones(1, device="meta"))
    with pytest.raises(DeviceError, match=r"found one of them on device: meta.*linear\.mask"):
        wrapper(random_rows(5, 2))
    del wrapper.module.linear.mask
    assert_works(wrapper)


@pytest.mark.parametrize("devices", [["cpu"], TWO])
def test_the_function_refuses_a_module_on_another_device(devices: list[str]) -> None:
    with pytest.raises(DeviceError, match=r"on device cpu.*meta.*weight"):
        data_parallel(nn.Linear(2, 2, device="meta"), torch.ones(4, 2), devices)


# Outputs


def unlike(first: Callable[[torch.Tensor], Any], second: Callable[[torch.Tensor], Any]) -> Any:
    return lambda y: second(y) if is_second(y) else first(y)


@pytest.mark.parametrize(
    ("way", "kind", "message"),
    [
        (unlike(lambda y: y, lambda y: y[:, :1]), ShapeError, r"outputs\[1\]: shape \(2, 1\)"),
        (unlike(lambda y: y, lambda y: y.float()), ShapeError, r"outputs\[1\]: shape \(2, 2\), float32"),
        (unlike(lambda y: y, lambda y: y[0, 0]), ShapeError, r"outputs\[1\]: shape \(\)"),
        (
            unlike(lambda y: {"loss": y}, lambda y: {"loss": y[:, :1]}),
            ShapeError,
            r"outputs\[1\]\['loss'\]: shape \(2, 1\)",
        ),
        (
            unlike(lambda y: {"loss": y}, lambda y: {"loss": [y]}),
            StructureError,
            r"outputs\[1\]\['loss'\]: list",
        ),
        (unlike(lambda y: {"loss": y}, lambda y: {"lost": y}), MissingKeyError, r"outputs\[1\].*'loss'"),
        (
            unlike(lambda y: {"a": y}, lambda y: {"a": y, "b": y}),
            StructureError,
            "All dicts must have the same number of keys",
        ),
        (unlike(lambda y: [y], lambda y: [y, y]), StructureError, r"outputs\[0\]: 1, outputs\[1\]: 2"),
        (unlike(lambda y: y, lambda y: (y,)), StructureError, r"outputs\[1\]: tuple"),
        (unlike(lambda y: y, lambda _: None), StructureError, r"outputs\[1\]: NoneType"),
        (unlike(lambda _: None, lambda y: y), StructureError, r"outputs\[1\]: "),
        (
            unlike(lambda y: (y, 1), lambda y: (y, 2)),
            StructureError,
            r"outputs\[0\]\[1\]: 1, outputs\[1\]\[1\]: 2",
        ),
    ],
    ids=range(12),
)
def test_outputs_that_do_not_fit_together_are_named(way: Any, kind: type[Exception], message: str) -> None:
    wrapper = DataParallel(Switched(), TWO)
    wrapper.module.way = way
    with pytest.raises(kind, match=message) as caught:
        wrapper(random_rows(5, 2))
    assert isinstance(caught.value, PacelineError)
    assert_works(wrapper)


@pytest.mark.parametrize("mode", ["stack", "mean"])
def test_outputs_of_different_sizes_cannot_be_stacked_or_averaged(mode: Any) -> None:
    wrapper = DataParallel(Switched(), TWO, gather=mode)
    wrapper.module.way = lambda y: {"loss": y}
    with pytest.raises(ShapeError, match=r"outputs\[1\]\['loss'\]: shape \(2, 2\)"):
        wrapper(random_rows(5, 2))


# Errors inside


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [KeyError, RuntimeError, ZeroDivisionError])
def test_an_error_in_forward_names_the_replica(kind: type[Exception], grad: bool) -> None:
    def fail(y: torch.Tensor) -> torch.Tensor:
        if is_second(y):
            raise kind("because")
        return y

    wrapper = DataParallel(Switched(), TWO)
    wrapper.module.way = fail
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(kind, match=rf"(?s)Caught {kind.__name__} in replica 1 on device cpu\..*because"),
    ):
        wrapper(random_rows(5, 2))
    assert_works(wrapper)


@pytest.mark.parametrize("mode", ["cat", "list"])
def test_an_error_in_backward_names_the_replica(mode: Any) -> None:
    wrapper = DataParallel(Switched(), TWO, gather=mode)
    wrapper.module.way = FailsBackward.apply
    y = wrapper(random_rows(5, 2))
    loss = sum(part.sum() for part in y) if mode == "list" else y.sum()
    with pytest.raises(KeyError, match=r"(?s)replica 1.*because"):
        loss.backward()
    assert all(parameter.grad is None for parameter in wrapper.parameters())
    wrapper.module.way = None
    assert_works(DataParallel(wrapper.module, TWO))


def test_an_error_in_backward_is_raised_as_it_is_when_the_graph_leads_outside() -> None:
    # There the engine does it all, and nothing of ours is between it and its caller.
    outside = random_rows(1, 2).requires_grad_()
    wrapper = DataParallel(Switched(), TWO)
    wrapper.module.way = lambda y: FailsBackward.apply(y * outside)
    with pytest.raises(KeyError, match="because"):
        wrapper(random_rows(5, 2)).sum().backward()
    assert_works(wrapper)


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_an_error_in_a_nested_wrapper_names_both_replicas(fails: str) -> None:
    inner = DataParallel(Switched(), TWO)

    def fail(y: torch.Tensor) -> torch.Tensor:
        if len(y) > 1:  # seven rows are two, two, two and one
            return y
        return y[7] if fails == "forward" else FailsBackward.apply(y)

    inner.module.way = fail
    with pytest.raises(
        (IndexError, KeyError), match=r"(?s)\ACaught .* replica 1 .*Error: Caught .* replica 1 "
    ):
        DataParallel(inner, TWO)(random_rows(7, 2)).sum().backward()
    assert_works(inner)


def test_a_call_with_wrong_arguments_is_a_type_error() -> None:
    wrapper = DataParallel(Switched(), TWO)
    with pytest.raises(TypeError, match="Caught TypeError in replica 0"):
        wrapper()
    assert_works(wrapper)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_scripted_module_is_refused_by_type_where_it_would_be_replicated() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2).double())
    with pytest.raises(UnsupportedError, match=r"scripted module cannot be replicated \(type: Linear\)"):
        DataParallel(nn.Sequential(scripted), TWO)(random_rows(5, 2))
    assert DataParallel(scripted, ["cpu"])(random_rows(5, 2)).shape == random_rows(5, 2).shape
