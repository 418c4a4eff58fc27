"""The wrapper as a module: subclasses, state dicts, copies, nesting, use from several threads."""

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from batches import random_rows
from replicas import (
    TWO,
    Call,
    assert_same,
    assert_same_as_module,
    small_net,
    trained,
)
from torch import nn

import paceline
import paceline.nn.parallel
from paceline import DataParallel, gather, parallel_apply, replicate, scatter_kwargs


def test_replicas_do_not_see_each_others_attributes() -> None:
    everyone = threading.Barrier(3, timeout=30)

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        m.mine = x
        m.child.mine = x
        everyone.wait()
        assert m.mine is x
        return m.child.mine * m.weight

    module, x = Call(forward), random_rows()
    module.child = nn.Identity()
    y = DataParallel(module, ["cpu"] * 3)(x)
    assert_same(y, x * module.weight)
    assert not hasattr(module, "mine")
    assert not hasattr(module.child, "mine")


def test_one_wrapper_may_be_used_from_two_threads() -> None:
    module = small_net()
    wrapper = DataParallel(module, TWO)
    inputs = [random_rows(), random_rows(4, 2)]
    both, got = threading.Barrier(2, timeout=30), {}

    def work(index: int) -> None:
        for _ in range(20):
            both.wait()
            y = wrapper(inputs[index])
            got[index] = y.detach(), torch.autograd.grad(y.sum(), [*module.parameters()])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, x in enumerate(inputs):
        y = module(x)
        assert_same(got[index], (y.detach(), torch.autograd.grad(y.sum(), [*module.parameters()])))


@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("inner", [1, 2])
def test_a_wrapper_may_be_inside_a_wrapper(outer: int, inner: int) -> None:
    module = nn.Sequential(DataParallel(small_net(), ["cpu"] * inner), nn.Tanh())
    x = random_rows(7, 2)
    assert_same_as_module(module, x, count=outer)
    wrapper = DataParallel(DataParallel(module, TWO), ["cpu"] * outer)
    assert_same(trained(wrapper, module, x), trained(module, module, x))


def test_a_subclass_may_override_each_step() -> None:
    steps: list[str] = []

    class Own(DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            steps.append("scatter")
            return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

        def replicate(self, module: nn.Module, device_ids: Any) -> Any:
            steps.append("replicate")
            return replicate(module, device_ids)

        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            steps.append("parallel_apply")
            return parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs: Any, output_device: Any) -> Any:
            steps.append("gather")
            return gather([y * 2 for y in outputs], output_device, self.dim)

    module, x = small_net(), random_rows()
    got = trained(Own(module, TWO), module, x)
    assert steps == ["scatter", "replicate", "parallel_apply", "gather"]
    assert_same(got, trained(lambda x: 2 * module(x), module, x))


def test_a_subclass_may_scatter_inputs_that_depend_on_each_other() -> None:
    class Own(DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            pieces, keywords = super().scatter(inputs, kwargs, device_ids)
            return [(x, x.sin()) for (x,) in pieces], keywords

    module, x = Call(lambda m, a, b: a * b * m.weight), random_rows().requires_grad_()
    inputs = [x, module.weight]
    expected = torch.autograd.grad(module(x, x.sin()).sum(), inputs)
    assert_same(torch.autograd.grad(Own(module, TWO)(x).sum(), inputs), expected)


def test_a_subclass_may_change_the_replicas_weights() -> None:
    class Own(DataParallel[nn.Module]):
        def replicate(self, module: nn.Module, device_ids: Any) -> Any:
            replicas = super().replicate(module, device_ids)
            for replica in replicas:
                replica._parameters["weight"] = replica.weight.square()
            return replicas

    module, x = Call(lambda m, x: x * m.weight), random_rows()
    (expected,) = torch.autograd.grad((x * module.weight.square()).square().sum(), module.weight)
    assert_same(trained(Own(module, TWO), module, x)[1]["weight"], expected)


def test_it_is_an_instance_of_torchs_data_parallel() -> None:
    wrapper = DataParallel(nn.Linear(2, 2), TWO)
    assert isinstance(wrapper, nn.DataParallel)
    assert paceline.nn.parallel.DataParallel is paceline.nn.DataParallel is DataParallel


def test_the_state_dict_has_the_modules_names_with_a_prefix() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapper = DataParallel(module, TWO)
    wrapper(torch.randn(4, 2))
    assert [*wrapper.state_dict()] == [f"module.{name}" for name in module.state_dict()]
    other = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), TWO)
    other.load_state_dict(wrapper.state_dict())
    torch.testing.assert_close(other.module.state_dict(), module.state_dict())
    assert [name for name, _ in wrapper.named_modules()] == ["", "module", "module.0", "module.1"]


def by_pickle(wrapper: DataParallel[nn.Module]) -> DataParallel[nn.Module]:
    return pickle.loads(pickle.dumps(wrapper))


def by_torch_save(wrapper: DataParallel[nn.Module]) -> DataParallel[nn.Module]:
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [by_pickle, by_torch_save, copy.deepcopy])
@pytest.mark.parametrize("policy", ["cat", "mean"])
def test_a_used_wrapper_can_be_copied_and_the_copy_is_independent(duplicate: Any, policy: Any) -> None:
    wrapper = DataParallel(small_net(), TWO, gather=policy)
    x = random_rows()
    expected = trained(wrapper, wrapper.module, x)
    twin = duplicate(wrapper)
    with torch.no_grad():
        wrapper.module[0].weight.zero_()
    assert_same(trained(twin, twin.module, x), expected)
    assert all(p.grad is None for p in wrapper.parameters())


def test_the_wrapper_follows_modes_and_dtypes() -> None:
    wrapper = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9)), TWO).double().eval()
    x = random_rows()
    assert_same(wrapper(x), wrapper.module[0](x))
