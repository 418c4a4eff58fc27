"""replicate: what replicas share with the module, and what is their own."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from batches import random_rows
from replicas import TWO
from torch import nn

from paceline import replicate

THREE = ["cpu"] * 3


class Leaves(nn.Module):
    """One of everything that a module can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(3)])
        self.dict = nn.ParameterDict({"a": torch.randn(2), "b": torch.randn(2)})
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        # Two normalised elements are 1 and -1 whatever they were, but for eps: with the usual one, gradients
        # of what comes before are rounding errors.
        self.named = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.LayerNorm(2, eps=1.0)})
        self.register_module("no_child", None)
        self.register_parameter("no_parameter", None)
        self.register_buffer("no_buffer", None)
        self.register_buffer("scale", torch.full((2,), 2.0))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.no_child is None
        assert self.no_parameter is None
        assert self.no_buffer is None
        for parameter in (*self.list, *self.dict.values()):
            x = x * parameter
        for layer in (*self.layers, *self.named.values()):
            x = layer(x).tanh()
        return x * self.scale


def linear() -> nn.Module:
    return nn.Linear(2, 2).double()


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU()).double()


def norm() -> nn.Module:
    return nn.BatchNorm1d(2)


def recurrent() -> nn.Module:
    return nn.LSTM(2, 3)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def whole_batch_gradients(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    twin = copy.deepcopy(module)
    twin(x).sum().backward()
    return gradients(twin)


@pytest.mark.parametrize("devices", [[], ()])
def test_no_devices_give_no_replicas(devices: list[str]) -> None:
    assert replicate(nn.Linear(2, 2), devices) == []


@pytest.mark.parametrize("devices", [["cpu"], TWO, (torch.device("cpu"), "cpu:0"), (d for d in THREE)])
def test_each_device_gets_one_replica_placed_on_it(devices: Iterator[str]) -> None:
    replicas = replicate(nn.BatchNorm1d(2), devices)
    assert all(type(replica) is nn.BatchNorm1d for replica in replicas)
    tensors = [t for replica in replicas for t in (*replica.parameters(), *replica.buffers())]
    assert {tensor.device for tensor in tensors} == {torch.device("cpu")}
    assert len(tensors) == 5 * len(replicas) > 0


def test_replicas_on_another_device_have_their_tensors_there() -> None:
    module = nn.BatchNorm1d(2)
    here, there = replicate(module, ["cpu", "meta"])
    assert {t.device.type for t in (*there.parameters(), *there.buffers())} == {"meta"}
    assert {t.device.type for t in (*here.parameters(), *here.buffers())} == {"cpu"}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_of_all_replicas_sum_into_the_module(count: int) -> None:
    module, x = Leaves(), random_rows(6, 2)
    expected = whole_batch_gradients(module, x)
    for replica, chunk in zip(replicate(module, ["cpu"] * count), x.chunk(count), strict=True):
        replica(chunk).sum().backward(retain_graph=True)
    torch.testing.assert_close(gradients(module), expected, rtol=1e-12, atol=1e-12)


def test_a_single_replica_used_alone_gives_only_its_own_gradient() -> None:
    module, x = Leaves(), random_rows(4, 2)
    replicas = replicate(module, THREE)
    replicas[1](x).sum().backward()
    torch.testing.assert_close(gradients(module), whole_batch_gradients(module, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [Leaves, linear, stack])
def test_detached_replicas_give_values_without_gradient(make: Callable[[], nn.Module]) -> None:
    module, x = make(), random_rows(4, 2)
    for replica in replicate(module, TWO, detach=True):
        y = replica(x)
        torch.testing.assert_close(y, module(x), check_stride=False)
        assert not y.requires_grad
        assert not any(parameter.requires_grad for parameter in replica.parameters())


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("make", [linear, nn.ReLU, norm])
def test_no_replica_is_the_module_or_another_replica(make: Callable[[], nn.Module], detach: bool) -> None:
    module = make()
    first, second = replicate(module, TWO, detach=detach)
    assert first is not second
    assert module is not first
    assert module is not second


@pytest.mark.parametrize("detach", [False, True])
def test_an_attribute_set_on_a_child_of_a_replica_stays_in_the_replica(detach: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    first, second = replicate(module, TWO, detach=detach)
    first[0].mark = 1
    first[1].p = 0.0
    assert module[1].p == second[1].p == 0.5
    assert not hasattr(module[0], "mark")
    assert not hasattr(second[0], "mark")


@pytest.mark.parametrize("detach", [False, True])
def test_a_mode_changed_in_a_replica_stays_in_the_replica(detach: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    first, second = replicate(module, TWO, detach=detach)
    first.eval()
    assert all(part.training for part in (*module.modules(), *second.modules()))


@pytest.mark.parametrize("detach", [False, True])
def test_parameters_on_the_modules_device_share_its_memory(detach: bool) -> None:
    module = Leaves()
    for replica in replicate(module, TWO, detach=detach):
        for own, original in zip(replica.parameters(), module.parameters(), strict=True):
            assert own.data_ptr() == original.data_ptr()


@pytest.mark.parametrize("detach", [False, True])
def test_buffers_are_the_modules_in_the_first_replica_and_copies_in_the_others(detach: bool) -> None:
    module = nn.BatchNorm1d(2)
    first, *others = replicate(module, THREE, detach=detach)
    pointers = {t.data_ptr() for replica in others for t in replica.buffers()}
    assert [t.data_ptr() for t in first.buffers()] == [t.data_ptr() for t in module.buffers()]
    assert len(pointers) == 6
    assert pointers.isdisjoint(t.data_ptr() for t in module.buffers())


@pytest.mark.parametrize("detach", [False, True])
def test_only_the_first_replicas_buffer_updates_reach_the_module(detach: bool) -> None:
    module, x = nn.BatchNorm1d(2).double(), random_rows(6, 2)
    expected = copy.deepcopy(module)
    expected(x[:3])
    for replica, chunk in zip(replicate(module, TWO, detach=detach), x.chunk(2), strict=True):
        replica(chunk)
    torch.testing.assert_close(dict(module.named_buffers()), dict(expected.named_buffers()))


def test_a_buffer_reassigned_in_a_replica_stays_in_the_replica() -> None:
    module = nn.BatchNorm1d(2)
    first, _ = replicate(module, TWO)
    first.running_mean = torch.ones(2)
    assert module.running_mean.eq(0).all()


def test_gradients_reach_buffers_that_require_them() -> None:
    module = nn.Module()
    module.register_buffer("b", torch.randn(2, dtype=torch.double, requires_grad=True))
    for replica in replicate(module, THREE):
        (replica.b * 3).sum().backward(retain_graph=True)
    torch.testing.assert_close(module.b.grad, torch.full((2,), 9.0, dtype=torch.double))


def test_buffers_do_not_require_gradients_unless_the_modules_do() -> None:
    assert not any(
        t.requires_grad for replica in replicate(nn.BatchNorm1d(2), TWO) for t in replica.buffers()
    )


def test_modules_shared_in_the_tree_stay_shared() -> None:
    shared = nn.Linear(2, 2)
    module = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    for replica in replicate(module, TWO):
        assert replica[0] is replica[1][1]
        assert replica[0] is not shared


def test_tied_parameters_stay_tied_and_get_the_summed_gradient() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    module[2].weight = module[0].weight
    x = random_rows(4, 2)
    expected = whole_batch_gradients(module, x)
    for replica, chunk in zip(replicate(module, TWO), x.chunk(2), strict=True):
        assert replica[0].weight is replica[2].weight
        assert len([*replica.parameters()]) == 3
        replica(chunk).sum().backward(retain_graph=True)
    torch.testing.assert_close(gradients(module), expected, rtol=1e-12, atol=1e-12)


def test_a_buffer_shared_by_two_modules_stays_shared() -> None:
    module = nn.Sequential(nn.Module(), nn.Module())
    module[0].register_buffer("b", torch.zeros(2))
    module[1].register_buffer("b", module[0].b)
    for replica in replicate(module, TWO):
        assert replica[0].b is replica[1].b


def test_lists_and_dicts_of_parameters_and_modules_work_inside_replicas() -> None:
    module, x = Leaves(), random_rows(4, 2)
    for replica in replicate(module, TWO):
        assert len(replica.list) == 3
        assert [*replica.dict] == ["a", "b"]
        assert replica.list[1].requires_grad
        assert replica.dict["a"].requires_grad
        assert [*replica.named] == ["one", "two"]
        torch.testing.assert_close(replica(x), module(x))


def test_what_is_none_in_the_module_is_none_in_replicas() -> None:
    for replica in replicate(Leaves(), TWO):
        assert replica._modules["no_child"] is None
        assert replica._parameters["no_parameter"] is None
        assert replica._buffers["no_buffer"] is None


@pytest.mark.parametrize("detach", [False, True])
def test_a_replica_lists_its_own_tensors_under_the_modules_names(detach: bool) -> None:
    module = Leaves()
    for replica in replicate(module, TWO, detach=detach):
        named = dict(replica.named_parameters())
        assert [*named] == [name for name, _ in module.named_parameters()]
        assert [*replica.state_dict()] == [*module.state_dict()]
        assert [*dict(replica.named_buffers())] == [*dict(module.named_buffers())]
        assert named["layers.0.weight"] is replica.layers[0].weight
        torch.testing.assert_close(replica.state_dict(), module.state_dict())


def test_a_replicas_parameters_are_connected_to_the_modules() -> None:
    for replica in replicate(Leaves(), TWO):
        assert all(p.requires_grad and not p.is_leaf for p in replica.parameters())


def test_frozen_parameters_stay_frozen_and_the_others_train() -> None:
    module = nn.Linear(2, 2).double()
    module.weight.requires_grad_(False)
    for replica in replicate(module, TWO):
        assert not replica.weight.requires_grad
        replica(random_rows(3, 2)).sum().backward(retain_graph=True)
    assert module.weight.grad is None
    torch.testing.assert_close(module.bias.grad, torch.full((2,), 6.0, dtype=torch.double))


def test_an_all_frozen_module_gives_outputs_without_gradient() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    assert not any(replica(torch.ones(1, 2)).requires_grad for replica in replicate(module, TWO))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("detach", [False, True])
def test_recurrent_layers_use_the_replicas_weights(kind: type[nn.RNNBase], detach: bool) -> None:
    module = kind(2, 3, num_layers=2, bidirectional=True).double()
    x = torch.randn(4, 5, 2, dtype=torch.double)
    for replica in replicate(module, TWO, detach=detach):
        replica.flatten_parameters()
        assert replica._flat_weights is not module._flat_weights
        for flat, named in zip(replica._flat_weights, replica.parameters(), strict=True):
            assert flat is named
        torch.testing.assert_close(replica(x)[0], module(x)[0])
    assert all(a is b for a, b in zip(module._flat_weights, module.parameters(), strict=True))


def test_recurrent_gradients_sum_into_the_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(2, 3, batch_first=True).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.lstm.flatten_parameters()
            return self.lstm(x)[0]

    module, x = Net(), torch.randn(4, 5, 2, dtype=torch.double)
    expected = whole_batch_gradients(module, x)
    for replica, chunk in zip(replicate(module, TWO), x.chunk(2), strict=True):
        replica(chunk).sum().backward(retain_graph=True)
    torch.testing.assert_close(gradients(module), expected, rtol=1e-12, atol=1e-12)


def test_a_class_with_its_own_setattr_sees_each_parameter_assigned() -> None:
    class Watching(nn.Linear):
        def __setattr__(self, name: str, value: object) -> None:
            if name in {"weight", "bias"}:
                self.__dict__[f"watched_{name}"] = value
            super().__setattr__(name, value)

    module = Watching(2, 2)
    for replica in replicate(module, TWO):
        assert replica.watched_weight is replica.weight
        assert replica.watched_bias is replica.bias
        assert replica.weight is not module.weight
        assert "weight" not in vars(replica)
    assert module.watched_weight is module.weight


def test_a_class_with_its_own_copy_method_makes_each_replica() -> None:
    class Copying(nn.Linear):
        def _replicate_for_data_parallel(self) -> nn.Module:
            replica = super()._replicate_for_data_parallel()
            replica.tags = [*self.tags, "replica"]
            return replica

    module = Copying(2, 2)
    module.tags = ["original"]
    replicas = replicate(nn.Sequential(module), TWO)
    assert [replica[0].tags for replica in replicas] == [["original", "replica"]] * 2
    assert module.tags == ["original"]
    assert all(replica[0].weight is not module.weight for replica in replicas)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("make", [Leaves, recurrent, norm])
def test_replicas_pickle(make: Callable[[], nn.Module], detach: bool) -> None:
    module = make()
    for replica in replicate(module, TWO, detach=detach):
        file = io.BytesIO()
        torch.save(replica, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        torch.testing.assert_close(loaded.state_dict(), module.state_dict())


@pytest.mark.parametrize("detach", [False, True])
def test_lazy_modules_are_refused(detach: bool) -> None:
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        replicate(nn.Sequential(nn.LazyLinear(2)), TWO, detach=detach)


@pytest.mark.parametrize("detach", [False, True])
def test_zero_grad_in_a_replica_warns_and_changes_nothing(detach: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double()
    module(random_rows(4, 2)).sum().backward()
    before = {name: g.clone() for name, g in gradients(module).items() if g is not None}
    for replica in replicate(module, TWO, detach=detach):
        # In a graph torch warns of each tensor that is no leaf too.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            replica.zero_grad()
        text = "Calling .zero_grad() from a module created with nn.DataParallel() has no effect."
        assert str(caught[0].message).startswith(text)
    torch.testing.assert_close(gradients(module), before)


@pytest.mark.parametrize("detach", [False, True])
def test_zero_grad_in_a_child_of_a_replica_warns_too(detach: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    for replica in replicate(module, TWO, detach=detach):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            replica[0].zero_grad()
        assert "has no effect" in str(caught[0].message)
    assert module[0].weight.grad is not None


def test_plain_attributes_and_mode_are_the_modules() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.note = note = object()
    module[1].eval()
    for replica in replicate(module, TWO):
        assert replica.note is note
        assert [part.training for part in replica.modules()] == [True, True, False]
        replica.note = None
    assert module.note is note


def test_replicating_leaves_the_module_as_it_was() -> None:
    module = Leaves()
    before = {id(part): dict(vars(part)) for part in module.modules()}
    replicate(module, TWO)
    assert {id(part): dict(vars(part)) for part in module.modules()} == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_dtype_and_strides_of_parameters_are_kept(dtype: torch.dtype) -> None:
    module = nn.Conv2d(4, 4, 3, dtype=dtype).to(memory_format=torch.channels_last)
    for replica in replicate(module, TWO):
        assert replica.weight.dtype == dtype
        assert replica.weight.stride() == module.weight.stride()


def test_weight_norm_and_parametrizations_compute_from_the_replicas_parameters() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)).double()
    x = random_rows(4, 2)
    expected = whole_batch_gradients(module, x)
    for replica, chunk in zip(replicate(module, TWO), x.chunk(2), strict=True):
        replica(chunk).sum().backward(retain_graph=True)
    torch.testing.assert_close(gradients(module), expected, rtol=1e-12, atol=1e-12)
