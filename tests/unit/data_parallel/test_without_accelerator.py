"""Default devices and device numbers on a machine without an accelerator."""

import pytest
import torch
from batches import random_rows
from replicas import (
    Call,
    assert_same,
    small_net,
)

from paceline import DataParallel, data_parallel


def test_without_devices_the_module_is_called_as_it_is() -> None:
    seen: list[torch.Tensor] = []
    module, x = Call(lambda m, x: seen.append(x) or x * m.weight), random_rows()
    wrapper = DataParallel(module)
    assert_same(wrapper(x), x * module.weight)
    assert seen[0] is x
    assert wrapper.device_ids == []


@pytest.mark.parametrize("output_device", [None, 0, 1])
def test_device_numbers_run_the_module_as_it_is_with_a_warning(output_device: int | None) -> None:
    module, x = small_net(), random_rows()
    with pytest.warns(UserWarning, match=r"no accelerator here.*\[0, 1\]"):
        wrapper = DataParallel(module, [0, 1], output_device)
    assert_same(wrapper(x), module(x))


def test_an_output_device_number_alone_is_accepted_too() -> None:
    module, x = small_net(), random_rows()
    assert_same(DataParallel(module, output_device=0)(x), module(x))


def test_the_function_without_devices_calls_the_module_as_it_is() -> None:
    module, x = small_net(), random_rows()
    assert_same(data_parallel(module, x), module(x))


def test_the_function_with_device_numbers_warns() -> None:
    module, x = small_net(), random_rows()
    with pytest.warns(UserWarning, match="no accelerator here"):
        y = data_parallel(module, x, [0, 1])
    assert_same(y, module(x))
