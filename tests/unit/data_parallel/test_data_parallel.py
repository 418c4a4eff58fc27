import copy
import dataclasses
import io
import pickle
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import paceline
import paceline.nn.parallel
from paceline import DataParallel, data_parallel, gather, parallel_apply, replicate, scatter_kwargs

TWO = ["cpu", "cpu"]
COUNTS = [1, 2, 3, 5]
Gradients = dict[str, torch.Tensor | None]


class Call(nn.Module):
    """A module from a function, with a parameter for it to use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor([2.0, -3.0], dtype=torch.double))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (6, 2)), dtype=torch.double)


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def gradients(module: nn.Module) -> Gradients:
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return found


def trained(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Gradients]:
    """The output of a call, and what its backward leaves in the module."""
    y = call(*args, **kwargs)
    y.square().sum().backward()
    return y.detach(), gradients(module)


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def assert_as_alone(module: nn.Module, *args: Any, count: int = 2, **kwargs: Any) -> None:
    """The wrapper gives what the module gives, outputs and gradients."""
    expected = trained(module, module, *args, **kwargs)
    assert_same(trained(DataParallel(module, ["cpu"] * count), module, *args, **kwargs), expected)


# Outputs and gradients


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
def test_outputs_and_gradients_are_the_modules_own(count: int, size: int) -> None:
    assert_as_alone(small_net(), rows(size, 2), count=count)


@pytest.mark.parametrize("count", COUNTS)
def test_the_function_gives_what_the_module_gives(count: int) -> None:
    module, x = small_net(), rows()
    expected = trained(module, module, x)
    assert_same(trained(lambda x: data_parallel(module, x, ["cpu"] * count), module, x), expected)


@pytest.mark.parametrize("dim", [1, -1])
def test_the_batch_may_be_along_another_dimension(dim: int) -> None:
    module, x = Call(lambda m, x: x * m.weight[:, None]), rows(2, 5)
    expected = trained(module, module, x)
    assert_same(trained(DataParallel(module, TWO, dim=dim), module, x), expected)
    assert_same(trained(lambda x: data_parallel(module, x, TWO, dim=dim), module, x), expected)


@pytest.mark.parametrize("output_device", [None, "cpu", -1, torch.device("cpu")])
def test_the_output_device_may_be_named_in_any_way(output_device: Any) -> None:
    module, x = small_net(), rows()
    assert_same(DataParallel(module, TWO, output_device)(x), module(x))
    assert_same(data_parallel(module, x, TWO, output_device), module(x))


@pytest.mark.parametrize("device_ids", [("cpu", "cpu"), [torch.device("cpu"), "cpu:0"], iter(["cpu", "cpu"])])
def test_devices_may_be_objects_names_and_any_iterable(device_ids: Any) -> None:
    module, x = small_net(), rows()
    wrapper = DataParallel(module, device_ids)
    assert_same(wrapper(x), module(x))
    assert len(wrapper.device_ids) == 2


def test_as_many_replicas_run_as_there_are_chunks() -> None:
    shapes: list[int] = []
    module = Call(lambda m, x: shapes.append(len(x)) or x * m.weight)
    DataParallel(module, ["cpu"] * 5)(rows(3, 2))
    assert sorted(shapes) == [1, 1, 1]


def test_replicas_run_at_the_same_time() -> None:
    everyone = threading.Barrier(3, timeout=30)
    module = Call(lambda m, x: (everyone.wait(), x * m.weight)[1])
    DataParallel(module, ["cpu"] * 3)(rows())


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

    DataParallel(Call(lambda m, x: Meet.apply(x * m.weight)), ["cpu"] * 3)(rows()).sum().backward()


def test_gradients_accumulate_over_backwards() -> None:
    module, x = small_net(), rows()
    wrapper = DataParallel(module, TWO)
    for _ in range(2):
        wrapper(x).sum().backward()
    twice = gradients(module)
    (2 * module(x).sum()).backward()
    assert_same(twice, gradients(module))


def test_gradients_are_the_same_bits_in_each_run() -> None:
    module, x = small_net(), rows(50, 2)
    wrapper = DataParallel(module, ["cpu"] * 3)
    first = trained(wrapper, module, x)
    for _ in range(5):
        torch.testing.assert_close(trained(wrapper, module, x), first, rtol=0, atol=0)


def test_gradients_of_two_parameters_do_not_share_memory() -> None:
    module = Call(lambda m, x: x + m.weight + m.other)
    module.other = nn.Parameter(rows(2))
    DataParallel(module, TWO)(rows()).sum().backward()
    module.weight.grad.zero_()
    assert module.other.grad.eq(6).all()


# Arguments


@pytest.mark.parametrize("count", COUNTS)
def test_a_module_without_inputs_runs_once(count: int) -> None:
    module = Call(lambda m: m.weight * 2)
    assert_as_alone(module, count=count)
    assert_same(data_parallel(module, None, ["cpu"] * count), module())
    assert_same(data_parallel(module, (), ["cpu"] * count), module())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("empty", [{}, [], (), None], ids=str)
def test_keywords_only_with_an_empty_value_among_them(count: int, empty: Any) -> None:
    def check(m: nn.Module, *, x: torch.Tensor, extra: Any) -> torch.Tensor:
        assert extra == empty
        assert type(extra) is type(empty)
        return x * m.weight

    module, x = Call(check), rows()
    assert_as_alone(module, x=x, extra=empty, count=count)
    y = data_parallel(module, None, ["cpu"] * count, module_kwargs={"x": x, "extra": empty})
    assert_same(y, module(x=x, extra=empty))


@pytest.mark.parametrize("count", COUNTS)
def test_positional_keyword_and_other_values_are_mixed(count: int) -> None:
    def forward(m: nn.Module, x: torch.Tensor, power: int, *, y: torch.Tensor, name: str) -> torch.Tensor:
        assert name == "n"
        return x * m.weight**power + y

    x, y = rows().requires_grad_(), rows().requires_grad_()
    module = Call(forward)
    expected = torch.autograd.grad(module(x, 3, y=y, name="n").square().sum(), (x, y, module.weight))
    out = DataParallel(module, ["cpu"] * count)(x, 3, y=y, name="n")
    assert_same(torch.autograd.grad(out.square().sum(), (x, y, module.weight)), expected)


def test_inputs_that_are_no_tensors_reach_every_replica() -> None:
    marker = object()
    seen: list[object] = []
    module = Call(lambda m, x, thing: seen.append(thing) or x * m.weight)
    DataParallel(module, ["cpu"] * 3)(rows(), marker)
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

    module, a, b = Call(forward), rows().requires_grad_(), rows().requires_grad_()
    expected, got = module(build(a, b)), DataParallel(module, ["cpu"] * count)(build(a, b))
    assert type(got) is type(expected)
    assert_same(leaves(got), leaves(expected))
    ends = (a, b, module.weight)
    total, total_expected = (sum(leaf.square().sum() for leaf in leaves(v)) for v in (got, expected))
    assert_same(torch.autograd.grad(total, ends), torch.autograd.grad(total_expected, ends))


def test_scalar_outputs_become_a_vector_with_a_warning() -> None:
    module, x = Call(lambda m, x: (x * m.weight).sum()), rows()
    with pytest.warns(UserWarning, match="will instead unsqueeze and return a vector"):
        y = DataParallel(module, TWO)(x)
    assert_same(y, torch.stack([module(x[:3]), module(x[3:])]))


# Modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("count", COUNTS)
def test_without_grad_outputs_are_the_same_and_need_no_gradient(mode: Any, count: int) -> None:
    states: list[bool] = []
    module, x = Call(lambda m, x: states.append(torch.is_grad_enabled()) or x * m.weight), rows()
    with mode():
        y = DataParallel(module, ["cpu"] * count)(x)
        assert_same(y, module(x))
    assert not y.requires_grad
    assert not any(states)


@pytest.mark.parametrize("count", COUNTS)
def test_autocast_holds_inside_and_gradients_stay_in_full_precision(count: int) -> None:
    module = nn.Linear(2, 2)
    x = torch.randn(6, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = DataParallel(module, ["cpu"] * count)(x)
        expected = module(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert module.weight.grad.dtype == torch.float32


def test_gradients_may_be_enabled_inside_a_module_called_without() -> None:
    def slope(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x.square() * m.weight).sum(), x)[0]

    module, x = Call(slope), rows()
    with torch.no_grad():
        assert_same(DataParallel(module, TWO)(x), module(x))


# Kinds of modules


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(2, 3, num_layers=2, batch_first=True).double()
        self.head = nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rnn.flatten_parameters()
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("count", COUNTS)
def test_recurrent_modules(kind: type[nn.RNNBase], count: int) -> None:
    module, x = Recurrent(kind), rows(6, 4, 2)
    assert_as_alone(module, x, count=count)
    with torch.no_grad():
        assert_same(DataParallel(module, ["cpu"] * count)(x), module(x))


def test_transformer_layers() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    assert_as_alone(layer, rows(6, 3, 4))
    layer.eval()
    with torch.no_grad():
        assert_same(DataParallel(layer, TWO)(rows(6, 3, 4) * 0), layer(rows(6, 3, 4) * 0))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_stay_sparse(kind: Any, count: int) -> None:
    module = kind(7, 3, sparse=True).double()
    x = torch.tensor([[0, 1], [1, 2], [3, 3], [0, 6], [5, 1]])
    expected = trained(module, module, x)[1]["weight"].to_dense()
    got = trained(DataParallel(module, ["cpu"] * count), module, x)[1]["weight"]
    assert got.is_sparse
    assert_same(got.to_dense(), expected)


@pytest.mark.parametrize("first", ["sparse", "dense"])
def test_a_parameter_with_a_sparse_gradient_here_and_a_dense_one_there(first: str) -> None:
    class Either(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            is_first = bool((x < 2).all())
            return super().forward(x) if is_first == (first == "sparse") else self.weight[x]

    module, x = Either(4, 3, sparse=True).double(), torch.tensor([0, 1, 2, 3])
    module.weight.grad = None
    DataParallel(module, TWO)(x).square().sum().backward()
    got = module.weight.grad
    assert_same(got.to_dense() if got.is_sparse else got, 2 * module.weight.detach())


def test_an_embedding_with_a_norm_limit_renorms_the_modules_weight() -> None:
    module = nn.Embedding(5, 3, max_norm=1.0).double()
    module.weight.data.mul_(10)
    twin, x = copy.deepcopy(module), torch.tensor([0, 1, 2, 2])
    expected = trained(twin, twin, x)
    assert_same(trained(DataParallel(module, TWO), module, x), expected)
    assert_same(module.weight, twin.weight)


@pytest.mark.parametrize("count", COUNTS)
def test_complex_parameters(count: int) -> None:
    module = nn.Linear(2, 3, dtype=torch.cdouble)
    x = torch.randn(6, 2, dtype=torch.cdouble)

    def run(call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, Gradients]:
        y = call(x)
        y.abs().sum().backward()
        return y.detach(), gradients(module)

    expected = run(module)
    assert_same(run(DataParallel(module, ["cpu"] * count)), expected)


def test_gradients_reach_buffers_that_require_them() -> None:
    module = Call(lambda m, x: x * m.scale)
    module.register_buffer("scale", rows(2).requires_grad_())
    x = rows()
    (expected,) = torch.autograd.grad(module(x).square().sum(), module.scale)
    DataParallel(module, TWO)(x).square().sum().backward()
    assert_same(module.scale.grad, expected)


def test_several_dtypes_in_one_module() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(2, 2, dtype=torch.bfloat16)
            self.mid = nn.Linear(2, 2)
            self.high = nn.Linear(2, 2, dtype=torch.double)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(self.mid(self.low(x.bfloat16()).float()).double())

    module, x = Mixed(), torch.randn(6, 2)
    expected = trained(module, module, x)
    got = trained(DataParallel(module, TWO), module, x)
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
    assert [g.dtype for g in got[1].values()] == [p.dtype for p in module.parameters()]


@pytest.mark.parametrize("dtypes", [(torch.float, torch.double), (torch.double, torch.bfloat16)])
def test_gradients_keep_the_memory_format_of_their_parameters(dtypes: tuple[torch.dtype, ...]) -> None:
    first, second = dtypes
    module = nn.Sequential(nn.Conv2d(4, 8, 3, dtype=first), Call(lambda _, x: x.to(second)))
    module.append(nn.Conv2d(8, 4, 3, dtype=second))
    module[0].to(memory_format=torch.channels_last)
    module[2].to(memory_format=torch.channels_last)
    x = torch.randn(6, 4, 8, 8, dtype=first).to(memory_format=torch.channels_last)
    wrapper = DataParallel(module, TWO)
    for _ in range(2):
        wrapper(x).sum().backward()
    for convolution in (module[0], module[2]):
        assert convolution.weight.grad.stride() == convolution.weight.stride()
        assert convolution.weight.grad.dtype == convolution.weight.dtype


def test_batch_norm_takes_its_statistics_from_the_first_chunk() -> None:
    module, x = nn.BatchNorm1d(2).double(), rows(7, 2)
    twin = copy.deepcopy(module)
    chunks = x.chunk(2)
    outputs = [copy.deepcopy(twin)(chunks[1])]
    outputs.insert(0, twin(chunks[0]))
    assert_same(DataParallel(module, TWO)(x), torch.cat(outputs))
    assert_same(dict(module.named_buffers()), dict(twin.named_buffers()))


def test_batch_norm_counts_one_batch_a_call() -> None:
    module = nn.BatchNorm1d(2).double()
    wrapper = DataParallel(module, ["cpu"] * 3)
    for _ in range(4):
        wrapper(rows())
    assert int(module.num_batches_tracked) == 4


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal]
)
def test_parametrized_modules(norm: Callable[..., nn.Module]) -> None:
    assert_as_alone(norm(nn.Linear(3, 3)).double(), rows(6, 3))


def test_spectral_norm_updates_its_vectors_in_the_module() -> None:
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).double()
    before = module.parametrizations.weight[0]._u.clone()
    DataParallel(module, TWO)(rows(6, 3))
    assert not torch.equal(module.parametrizations.weight[0]._u, before)


def test_lazy_modules_are_refused_with_several_devices() -> None:
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        DataParallel(nn.LazyLinear(2), TWO)(torch.ones(4, 3))


def test_lazy_modules_are_refused_without_grad_too() -> None:
    module = nn.LazyLinear(2)
    with torch.no_grad(), pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        DataParallel(module, TWO)(torch.ones(4, 3))
    assert module.has_uninitialized_params()


def test_unused_parameters_get_zeros() -> None:
    module = Call(lambda m, x: x * m.weight)
    module.unused = nn.Linear(2, 2).double()
    grads = trained(DataParallel(module, TWO), module, rows())[1]
    assert grads["unused.weight"].eq(0).all()
    assert grads["unused.bias"].eq(0).all()


def test_a_parameter_used_by_one_replica_only() -> None:
    module = Call(lambda m, x: m.other * x if bool((x > 0).all()) else m.weight * x)
    module.other = nn.Parameter(rows(2))
    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.double)
    grads = trained(DataParallel(module, TWO), module, x)[1]
    assert_same(grads["other"], 2 * module.other.detach() * x[0] ** 2)
    assert_same(grads["weight"], 2 * module.weight.detach() * x[1] ** 2)


def test_frozen_modules_pass_gradients_to_their_inputs() -> None:
    module, x = small_net().requires_grad_(False), rows().requires_grad_()
    expected = torch.autograd.grad(module(x).square().sum(), x)
    assert_same(torch.autograd.grad(DataParallel(module, TWO)(x).square().sum(), x), expected)


def test_frozen_modules_give_outputs_without_gradient() -> None:
    assert not DataParallel(small_net().requires_grad_(False), TWO)(rows()).requires_grad


# Backward in all ways


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
def test_a_gradient_penalty_goes_twice_through_the_wrapper(run: Callable[..., Gradients], count: int) -> None:
    module, x = small_net(), rows()
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
        penalised(DataParallel(module, TWO), module, rows())["bias"], torch.zeros(1, dtype=torch.double)
    )


def test_a_penalty_over_parameters_gives_second_derivatives() -> None:
    module, x = small_net(), rows()

    def run(call: Callable[..., torch.Tensor]) -> Sequence[torch.Tensor]:
        parameters = [*module.parameters()]
        first = torch.autograd.grad(call(x).square().sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), parameters)

    assert_same(run(DataParallel(module, TWO)), run(module))


def test_third_derivatives() -> None:
    module, x = Call(lambda m, x: (x * m.weight).sin().exp()), rows().requires_grad_()

    def run(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        y = call(x).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y

    assert_same(run(DataParallel(module, TWO)), run(module))


def test_backward_of_a_single_row_of_the_output() -> None:
    module, x = small_net(), rows()
    module(x)[4].sum().backward()
    expected = gradients(module)
    DataParallel(module, ["cpu"] * 3)(x)[4].sum().backward()
    assert_same(gradients(module), expected)


def test_backward_after_wrapper_and_output_are_gone() -> None:
    module, x = small_net(), rows()
    loss = DataParallel(module, TWO)(x).square().sum()
    loss.backward()
    got = gradients(module)
    module(x).square().sum().backward()
    assert_same(got, gradients(module))


def test_a_graph_may_be_gone_through_twice_if_retained() -> None:
    module, x = small_net(), rows()
    loss = DataParallel(module, TWO)(x).square().sum()
    loss.backward(retain_graph=True)
    first = gradients(module)
    loss.backward()
    assert_same(gradients(module), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_two_outputs_with_separate_graphs_go_backward_one_after_the_other() -> None:
    module = Call(lambda m, x: ((x * m.weight).sin(), (x * m.weight).exp()))
    x = rows()
    for output in DataParallel(module, TWO)(x):
        output.sum().backward()
    got = gradients(module)
    sum(output.sum() for output in module(x)).backward()
    assert_same(got, gradients(module))


def test_gradients_with_respect_to_inputs_and_parameters() -> None:
    module, x = small_net(), rows().requires_grad_()
    ends = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), ends)
    assert_same(torch.autograd.grad(DataParallel(module, TWO)(x).square().sum(), ends), expected)
    assert all(end.grad is None for end in ends)


def test_backward_to_chosen_leaves_only() -> None:
    module, x = small_net(), rows().requires_grad_()
    DataParallel(module, TWO)(x).sum().backward(inputs=[module[0].weight])
    assert module[0].weight.grad is not None
    assert module[2].weight.grad is None
    assert x.grad is None


def test_two_calls_before_one_backward() -> None:
    module, a, b = small_net(), rows(), rows(5, 2)
    wrapper = DataParallel(module, TWO)
    (wrapper(a).square().sum() + wrapper(b).sum()).backward()
    got = gradients(module)
    (module(a).square().sum() + module(b).sum()).backward()
    assert_same(got, gradients(module))


def test_the_output_of_one_call_as_the_input_of_the_next() -> None:
    module, x = small_net(), rows()
    wrapper = DataParallel(module, TWO)
    expected = trained(lambda x: module(module(module(x))), module, x)
    assert_same(trained(lambda x: wrapper(wrapper(wrapper(x))), module, x), expected)


def test_a_long_chain_of_calls() -> None:
    module, x = Call(lambda m, x: (x * m.weight).tanh()), rows()
    wrapper = DataParallel(module, TWO)

    def chain(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            for _ in range(80):
                x = call(x)
            return x

        return run

    expected = trained(chain(module), module, x)
    assert_same(trained(chain(wrapper), module, x), expected)


def test_backward_from_another_thread() -> None:
    module, x = small_net(), rows()
    expected = trained(module, module, x)[1]
    loss = DataParallel(module, TWO)(x).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same(gradients(module), expected)


def test_what_holds_in_the_modules_own_backward_holds_in_every_replicas() -> None:
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
        loss = call(rows()).sum()
        with torch.autocast("cpu", dtype=torch.float16), torch.device("meta"):
            loss.backward()
    assert seen == [seen[0]] * 4
    assert seen[0][:2] == (True, torch.float16)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_derivatives(grad: bool) -> None:
    module, x, direction = small_net(), rows(), rows()

    def slope(call: Callable[..., torch.Tensor]) -> torch.Tensor | None:
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, direction))).tangent

    assert_same(slope(DataParallel(module, TWO)), slope(module))


# Hooks


def test_a_parameters_hook_fires_once_a_backward_with_the_full_sum() -> None:
    module, x = small_net(), rows()
    expected = trained(module, module, x)[1]["0.weight"]
    seen: list[torch.Tensor] = []
    module[0].weight.register_hook(lambda g: seen.append(g.clone()))
    trained(DataParallel(module, ["cpu"] * 3), module, x)
    assert_same(seen, [expected])


def test_a_post_accumulate_hook_fires_once_a_backward() -> None:
    module, seen = small_net(), []
    module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    trained(DataParallel(module, ["cpu"] * 3), module, rows())
    assert [*map(id, seen)] == [id(module[0].weight)]


def test_a_hook_on_the_input_fires_once_with_the_whole_gradient() -> None:
    module, x, seen = small_net(), rows().requires_grad_(), []
    expected = torch.autograd.grad(module(x).sum(), x)
    x.register_hook(lambda g: seen.append(g.clone()))
    DataParallel(module, TWO)(x).sum().backward()
    assert_same(tuple(seen), expected)


def test_forward_hooks_run_for_each_replica_and_may_change_the_output() -> None:
    module, x, seen = small_net(), rows(), []

    def double(_: nn.Module, _args: Any, y: torch.Tensor) -> torch.Tensor:
        seen.append(len(y))
        return y * 2

    module[0].register_forward_hook(double)
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    y = DataParallel(module, ["cpu"] * 3)(x)
    assert seen == [2, 2, 2]
    assert_same(y, module(x))


def test_backward_hooks_run_for_each_replica_and_may_change_the_gradient() -> None:
    module, x, seen = small_net(), rows().requires_grad_(), []
    module[0].register_full_backward_hook(lambda _, inner, __: seen.append(len(inner[0])) or (inner[0] * 3,))
    module[2].register_full_backward_pre_hook(lambda _, outer: (outer[0] * 5,))
    ends = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), ends)
    seen.clear()
    assert_same(torch.autograd.grad(DataParallel(module, ["cpu"] * 3)(x).square().sum(), ends), expected)
    assert seen == [2, 2, 2]


def reversing(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(torch.neg)
    return x * m.weight


def scaling_weight(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = m.weight.view(-1)
    weight.register_hook(lambda g: 3 * g)
    return x * weight


def scaling_output(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * m.weight
    y.register_hook(lambda g: 3 * g)
    return y


@pytest.mark.parametrize("forward", [reversing, scaling_weight, scaling_output])
@pytest.mark.parametrize("count", COUNTS)
def test_hooks_that_forward_puts_on_tensors_run_once(forward: Callable[..., Any], count: int) -> None:
    module, x = Call(forward), rows().requires_grad_()
    ends = [x, module.weight]
    expected = torch.autograd.grad(module(x.sin()).square().sum(), ends)
    got = torch.autograd.grad(DataParallel(module, ["cpu"] * count)(x.sin()).square().sum(), ends)
    assert_same(got, expected)


def test_a_hook_that_forward_puts_on_a_parameter_runs_once_a_replica() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        m.weight.register_hook(lambda g: 3 * g)
        return x * m.weight

    module, x = Call(forward), rows()
    DataParallel(module, TWO)(x).sum().backward()
    assert_same(module.weight.grad, 3 * x.sum(0))


def test_gradients_that_forward_asks_its_input_to_retain() -> None:
    seen: dict[int, torch.Tensor] = {}

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x.retain_grad()
        seen[len(x)] = x
        return x * m.weight

    module = Call(forward)
    DataParallel(module, TWO)(rows(5, 2).requires_grad_() * 1).sum().backward()
    assert_same(
        [seen[n].grad for n in (3, 2)], [module.weight.detach().expand(n, 2).contiguous() for n in (3, 2)]
    )


# Graphs that lead elsewhere


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_checkpointing_inside(use_reentrant: bool, count: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x * 2, use_reentrant=use_reentrant)

    module, x = Net(), rows().requires_grad_()
    assert_as_alone(module, x, count=count)


def test_checkpointing_by_a_function_that_goes_backward_itself() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
            ctx.part, ctx.x = part, x.detach()
            return part(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
            # As such functions outside torch ask, too.
            assert torch.autograd._is_checkpoint_valid()
            x = ctx.x.requires_grad_()
            with torch.enable_grad():
                ctx.part(x).backward(gradient)
            return None, x.grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = small_net(), small_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Again.apply(self.second, self.first(x))

    assert_as_alone(Net(), rows())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_around(use_reentrant: bool) -> None:
    module, x = small_net(), rows().requires_grad_()
    wrapper = DataParallel(module, TWO)
    expected = trained(module, module, x)
    got = trained(lambda x: checkpoint(wrapper, x, use_reentrant=use_reentrant), module, x)
    assert_same(got, expected)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["leaf", "not a leaf", "attribute", "attribute that is not a leaf"])
def test_tensors_from_outside_the_module_get_their_gradients(kind: str, count: int) -> None:
    leaf = rows(2).requires_grad_()
    outside = leaf if "not" not in kind else leaf.sin()
    module = Call(lambda m, x: x * m.weight * (m.outside if "attribute" in kind else outside))
    module.outside = outside
    x = rows()
    ends = [leaf, module.weight]
    expected = torch.autograd.grad(module(x).square().sum(), ends, retain_graph=True)
    DataParallel(module, ["cpu"] * count)(x).square().sum().backward()
    assert_same(tuple(end.grad for end in ends), expected)


def test_a_bound_method_kept_as_an_attribute_gets_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2).double()
            self.run = self.compute

        def compute(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x)

    module, x = Net(), rows()
    grads = trained(DataParallel(module, TWO), module, x)
    assert_same(grads, trained(module, module, x))


def test_weights_given_by_functional_call_get_the_gradients() -> None:
    module, x = nn.Linear(2, 2).double(), rows()
    given = rows(2, 2).requires_grad_()
    wrapper = DataParallel(module, TWO)

    def run(call: nn.Module, name: str) -> Any:
        y = torch.func.functional_call(nn.Sequential(call), {name: given.sin()}, (x,))
        return torch.autograd.grad(y.square().sum(), given)

    assert_same(run(wrapper, "0.module.weight"), run(module, "0.weight"))
    assert_same(wrapper(x), module(x))


def test_a_graph_kept_from_an_earlier_call() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x * m.weight
        for kept in [k for k in m.kept if len(k) == len(y)][:1]:
            y = y + kept
        m.kept.append(y)
        return y

    def run(call: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> Any:
        module.kept.clear()
        call(x)
        y = call(x)
        y.square().sum().backward()
        return y.detach(), gradients(module)

    module, x = Call(forward), rows(5, 2)
    module.kept = []
    assert_same(run(DataParallel(module, TWO), module, x), run(module, module, x))


# In-place operations


def add_in_place(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * m.weight
    return y.mul_(2).add_(x)


def relu_of_a_clone(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.relu_(x.clone()) * m.weight


def write_rows(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 1] * m.weight[0]
    return y


@pytest.mark.parametrize("forward", [add_in_place, relu_of_a_clone, write_rows])
def test_in_place_operations_inside(forward: Callable[..., torch.Tensor]) -> None:
    assert_as_alone(Call(forward), rows().requires_grad_())


@pytest.mark.parametrize("policy", ["cat", "list"])
def test_in_place_operations_on_the_output(policy: Any) -> None:
    module, x = small_net(), rows()
    outputs = DataParallel(module, TWO, gather=policy)(x)
    torch.cat([y.mul_(3) for y in outputs] if policy == "list" else [outputs.mul_(3)]).sum().backward()
    got = gradients(module)
    (3 * module(x)).sum().backward()
    assert_same(got, gradients(module))


def test_a_module_that_changes_its_input_in_place_in_a_graph() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2).double())
    x = rows().requires_grad_()
    expected = torch.autograd.grad(module(x * 2).square().sum(), x)
    assert_same(torch.autograd.grad(DataParallel(module, TWO)(x * 2).square().sum(), x), expected)


def test_replicas_that_change_their_inputs_in_place_do_not_spoil_each_others_backward() -> None:
    module, x = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2).double()), rows()
    expected = trained(module, module, x.clone())
    wrapper = DataParallel(module, ["cpu"] * 3)
    for _ in range(50):
        assert_same(trained(wrapper, module, x.clone()), expected)


def test_a_module_that_multiplies_its_input_in_place_by_a_parameter() -> None:
    module, x = Call(lambda m, x: x.mul_(m.weight).tanh()), rows()
    expected = trained(module, module, x.clone())
    assert_same(trained(DataParallel(module, TWO), module, x.clone()), expected)


def test_an_output_that_is_the_input_itself() -> None:
    module, x = Call(lambda m, x: (x, x * m.weight)), rows().requires_grad_()
    expected = torch.autograd.grad(sum(y.square().sum() for y in module(x)), x)
    got = torch.autograd.grad(sum(y.square().sum() for y in DataParallel(module, TWO)(x)), x)
    assert_same(got, expected)


# Attributes and threads


def test_replicas_do_not_see_the_attributes_that_another_sets() -> None:
    everyone = threading.Barrier(3, timeout=30)

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        m.mine = x
        m.child.mine = x
        everyone.wait()
        assert m.mine is x
        return m.child.mine * m.weight

    module, x = Call(forward), rows()
    module.child = nn.Identity()
    y = DataParallel(module, ["cpu"] * 3)(x)
    assert_same(y, x * module.weight)
    assert not hasattr(module, "mine")
    assert not hasattr(module.child, "mine")


def test_one_wrapper_used_from_two_threads() -> None:
    module = small_net()
    wrapper = DataParallel(module, TWO)
    inputs = [rows(), rows(4, 2)]
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
def test_a_wrapper_inside_a_wrapper(outer: int, inner: int) -> None:
    module = nn.Sequential(DataParallel(small_net(), ["cpu"] * inner), nn.Tanh())
    x = rows(7, 2)
    assert_as_alone(module, x, count=outer)
    wrapper = DataParallel(DataParallel(module, TWO), ["cpu"] * outer)
    assert_same(trained(wrapper, module, x), trained(module, module, x))


# Subclasses, state, copies


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

    module, x = small_net(), rows()
    got = trained(Own(module, TWO), module, x)
    assert steps == ["scatter", "replicate", "parallel_apply", "gather"]
    assert_same(got, trained(lambda x: 2 * module(x), module, x))


def test_a_subclass_may_scatter_inputs_that_depend_on_each_other() -> None:
    class Own(DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            pieces, keywords = super().scatter(inputs, kwargs, device_ids)
            return [(x, x.sin()) for (x,) in pieces], keywords

    module, x = Call(lambda m, a, b: a * b * m.weight), rows().requires_grad_()
    ends = [x, module.weight]
    expected = torch.autograd.grad(module(x, x.sin()).sum(), ends)
    assert_same(torch.autograd.grad(Own(module, TWO)(x).sum(), ends), expected)


def test_a_subclass_may_change_the_replicas_weights() -> None:
    class Own(DataParallel[nn.Module]):
        def replicate(self, module: nn.Module, device_ids: Any) -> Any:
            replicas = super().replicate(module, device_ids)
            for replica in replicas:
                replica._parameters["weight"] = replica.weight.square()
            return replicas

    module, x = Call(lambda m, x: x * m.weight), rows()
    (expected,) = torch.autograd.grad((x * module.weight.square()).square().sum(), module.weight)
    assert_same(trained(Own(module, TWO), module, x)[1]["weight"], expected)


def test_it_is_torchs_data_parallel_by_type() -> None:
    wrapper = DataParallel(nn.Linear(2, 2), TWO)
    assert isinstance(wrapper, nn.DataParallel)
    assert paceline.nn.parallel.DataParallel is paceline.nn.DataParallel is DataParallel


def test_the_state_dict_has_the_modules_names_behind_a_prefix() -> None:
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
def test_a_used_wrapper_can_be_copied_and_the_copy_is_its_own(duplicate: Any, policy: Any) -> None:
    wrapper = DataParallel(small_net(), TWO, gather=policy)
    x = rows()
    expected = trained(wrapper, wrapper.module, x)
    twin = duplicate(wrapper)
    with torch.no_grad():
        wrapper.module[0].weight.zero_()
    assert_same(trained(twin, twin.module, x), expected)
    assert all(p.grad is None for p in wrapper.parameters())


def test_the_wrapper_follows_modes_and_dtypes() -> None:
    wrapper = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9)), TWO).double().eval()
    x = rows()
    assert_same(wrapper(x), wrapper.module[0](x))


# Gather policies


def mean_loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (x * m.weight).square().mean()


@pytest.mark.parametrize("size", [1, 5, 6, 7])
@pytest.mark.parametrize("count", COUNTS)
def test_the_mean_policy_gives_the_mean_over_the_whole_batch(size: int, count: int) -> None:
    module, x = Call(mean_loss), rows(size, 2).requires_grad_()
    ends = [x, module.weight]
    expected = module(x)
    got = DataParallel(module, ["cpu"] * count, gather="mean")(x)
    assert_same(got, expected)
    assert_same(torch.autograd.grad(got, ends), torch.autograd.grad(expected, ends))


def test_the_mean_policy_counts_the_rows_of_keywords_and_other_dimensions() -> None:
    module, x = Call(lambda m, *, x: (x * m.weight[:, None]).mean()), rows(2, 5)
    assert_same(DataParallel(module, TWO, dim=1, gather="mean")(x=x), module(x=x))


def test_the_mean_policy_keeps_structures() -> None:
    module, x = Call(lambda m, x: {"loss": mean_loss(m, x), "parts": [x.mean(0)]}), rows(5, 2)
    assert_same(DataParallel(module, TWO, gather="mean")(x), module(x))


def test_the_stack_policy_puts_outputs_side_by_side() -> None:
    module, x = Call(mean_loss), rows(5, 2)
    got = DataParallel(module, TWO, gather="stack")(x)
    assert_same(got, torch.stack([module(x[:3]), module(x[3:])]))
    got.sum().backward()
    grads = gradients(module)
    (module(x[:3]) + module(x[3:])).backward()
    assert_same(grads, gradients(module))


def test_the_list_policy_gives_each_replicas_output() -> None:
    module, x = Call(lambda m, x: {"y": x * m.weight, "size": len(x)}), rows(5, 2)
    got = DataParallel(module, TWO, gather="list")(x)
    assert type(got) is list
    assert_same(got, [module(x[:3]), module(x[3:])])


@pytest.mark.parametrize(
    ("policy", "shape"), [("cat", (4, 2)), ("stack", (1, 4, 2)), ("mean", (4, 2)), ("list", None)]
)
@pytest.mark.parametrize("devices", [None, ["cpu"]])
def test_policies_hold_for_a_single_replica_too(policy: Any, shape: Any, devices: Any) -> None:
    module, x = small_net(), rows(4, 2)
    got = DataParallel(module, devices, gather=policy)(x)
    assert_same(got, [module(x)] if shape is None else module(x).expand(shape))


@pytest.mark.parametrize("policy", ["sum", "", None, 3])
def test_an_unknown_policy_is_refused_with_the_known_ones(policy: Any) -> None:
    with pytest.raises(ValueError, match="'cat', 'stack', 'mean', 'list'"):
        DataParallel(nn.Linear(2, 2), TWO, gather=policy)


# Machines without an accelerator


def test_without_devices_the_module_is_called_as_it_is() -> None:
    seen: list[torch.Tensor] = []
    module, x = Call(lambda m, x: seen.append(x) or x * m.weight), rows()
    wrapper = DataParallel(module)
    assert_same(wrapper(x), x * module.weight)
    assert seen[0] is x
    assert wrapper.device_ids == []


@pytest.mark.parametrize("output_device", [None, 0, 1])
def test_device_numbers_run_the_module_as_it_is_with_a_warning(output_device: int | None) -> None:
    module, x = small_net(), rows()
    with pytest.warns(UserWarning, match=r"no accelerator here.*\[0, 1\]"):
        wrapper = DataParallel(module, [0, 1], output_device)
    assert_same(wrapper(x), module(x))


def test_an_output_device_number_alone_is_accepted_too() -> None:
    module, x = small_net(), rows()
    assert_same(DataParallel(module, output_device=0)(x), module(x))


def test_the_function_without_devices_calls_the_module_as_it_is() -> None:
    module, x = small_net(), rows()
    assert_same(data_parallel(module, x), module(x))


def test_the_function_with_device_numbers_warns() -> None:
    module, x = small_net(), rows()
    with pytest.warns(UserWarning, match="no accelerator here"):
        y = data_parallel(module, x, [0, 1])
    assert_same(y, module(x))
