"""What torch's own wrapper does on a machine without an accelerator, and ours with it."""

import copy
import functools
import inspect
import pickle
import warnings
from typing import Any

import batches
import pytest
import torch
from torch import nn


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


rows = functools.partial(batches.rows, width=3, dtype=torch.double)


def wrap(parallel: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ours says that the numbers are not used
        wrapper: nn.Module = parallel.DataParallel(module, *args, **kwargs)
    return wrapper


@pytest.mark.parametrize("devices", [None, [0], [0, 1], (1, 0), range(2)])
@pytest.mark.parametrize("output_device", [None, 0, 1])
def test_without_an_accelerator_the_module_is_called_as_it_is(
    parallel: Any, devices: Any, output_device: int | None
) -> None:
    module, reference = net(), net()
    wrapper = wrap(parallel, module, devices, output_device)
    assert wrapper.device_ids == []
    output = wrapper(rows())
    output.square().sum().backward()
    reference(rows()).square().sum().backward()
    assert torch.equal(output, net()(rows()))
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(module[1].running_mean, reference[1].running_mean)


def test_arguments_go_through_untouched(parallel: Any) -> None:
    class Echo(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    empty: list[Any] = []
    args, kwargs = parallel.DataParallel(Echo())(1, empty, key={"a": None})
    assert args[1] is empty
    assert (args[0], kwargs) == (1, {"key": {"a": None}})


def test_scalars_stay_scalars_without_devices(parallel: Any) -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    assert parallel.DataParallel(Loss())(rows()).dim() == 0


def test_names_in_the_state_begin_with_module(parallel: Any) -> None:
    wrapper = parallel.DataParallel(net())
    assert [*wrapper.state_dict()] == [f"module.{name}" for name in net().state_dict()]
    other = parallel.DataParallel(net())
    other.load_state_dict(wrapper.state_dict())
    assert next(iter(wrapper.named_parameters()))[0] == "module.0.weight"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda wrapper: pickle.loads(pickle.dumps(wrapper))])
def test_the_wrapper_is_copied_and_pickled(parallel: Any, again: Any) -> None:
    wrapper = parallel.DataParallel(net()).eval()
    twin = again(wrapper)
    assert twin.module is not wrapper.module
    assert torch.equal(twin(rows()), wrapper(rows()))


def test_the_wrapper_is_torchs_by_type_and_keeps_the_module(parallel: Any) -> None:
    module = net()
    wrapper = parallel.DataParallel(module)
    assert isinstance(wrapper, nn.DataParallel)
    assert wrapper.module is module
    wrapper.eval()
    assert not module.training


def test_no_devices_give_no_replicas(parallel: Any) -> None:
    assert parallel.replicate(net(), []) == []


@pytest.mark.parametrize(
    "given",
    [
        {"inputs": [1]},
        {"inputs": [1, 2, 3]},
        {"inputs": [1, 2], "kwargs_tup": [{}]},
        {"inputs": [1, 2], "devices": [0]},
        {"inputs": [1, 2], "kwargs_tup": [{}, {}], "devices": [0, 0, 0]},
    ],
)
def test_as_many_of_each_as_modules_are_needed(parallel: Any, given: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        parallel.parallel_apply([nn.Identity(), nn.Identity()], **given)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("scatter", ["inputs", "target_gpus", "dim"]),
        ("gather", ["outputs", "target_device", "dim"]),
        ("replicate", ["network", "devices", "detach"]),
        ("parallel_apply", ["modules", "inputs", "kwargs_tup", "devices"]),
        ("data_parallel", ["module", "inputs", "device_ids", "output_device", "dim", "module_kwargs"]),
        ("DataParallel", ["module", "device_ids", "output_device", "dim"]),
    ],
)
def test_arguments_have_torchs_names_and_order(parallel: Any, function: str, names: list[str]) -> None:
    parameters = inspect.signature(getattr(parallel, function)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == names
