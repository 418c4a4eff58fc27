"""Random modules have the same outputs and gradients with replicas as without."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from paceline import DataParallel

WIDTH = 4  # of every layer, so that any can follow any


class Branches(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part(x) for part in self.parts), x * 0.5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.back.weight = self.there.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.there(x).tanh())


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, None])[:, 0]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class RowDependent(nn.Module):
    """Each row takes one of two ways, so that a replica may use only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = x.sum(1) > 0
        y = torch.zeros_like(x)
        if high.any():
            y[high] = self.high(x[high])
        if not high.all():
            y[~high] = self.low(x[~high])
        return y


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(1, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[..., None])[0][..., 0]


LEAVES = st.sampled_from(
    [
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.BatchNorm1d(WIDTH).eval(),
        nn.Tanh,
        nn.PReLU,
        Convolution,
        Tied,
        Unused,
        RowDependent,
        Frozen,
        Recurrent,
    ]
).map(lambda make: make())

NETS = st.recursive(
    LEAVES,
    lambda parts: st.lists(parts, min_size=1, max_size=3).flatmap(
        lambda chosen: st.sampled_from([nn.Sequential(*chosen), Branches(chosen)])
    ),
    max_leaves=6,
)


def results(
    call: nn.Module, module: nn.Module, x: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output, and the gradients of input and parameters; zeros where there is none."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    ends = {"input": x, **trained}
    y = call(x)
    found = torch.autograd.grad(y.square().sum(), [*ends.values()], allow_unused=True)
    pairs = zip(ends.items(), found, strict=True)
    return y.detach(), {name: torch.zeros_like(end) if g is None else g for (name, end), g in pairs}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    net=NETS,
    rows=st.integers(1, 9),
    count=st.sampled_from([1, 2, 3, 5]),
    seed=st.integers(0, 2**16),
)
def test_outputs_and_gradients_are_those_of_the_module(
    net: nn.Module, rows: int, count: int, seed: int
) -> None:
    module = nn.Sequential(net, nn.Linear(WIDTH, 2)).double()
    torch.manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(rows, WIDTH, dtype=torch.double, requires_grad=True)
    wrapper = DataParallel(module, ["cpu"] * count)
    expected = results(module, module, x)
    torch.testing.assert_close(results(wrapper, module, x), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(wrapper(x), expected[0], rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(net=NETS, rows=st.integers(1, 9), count=st.sampled_from([1, 2, 3, 5]))
def test_backward_fills_every_parameter_that_requires_a_gradient_and_no_other(
    net: nn.Module, rows: int, count: int
) -> None:
    module = nn.Sequential(net, nn.Linear(WIDTH, 2)).double()
    DataParallel(module, ["cpu"] * count)(torch.randn(rows, WIDTH, dtype=torch.double)).sum().backward()
    if count > 1:
        assert all((p.grad is not None) == p.requires_grad for p in module.parameters())
    assert all(p.grad is None for p in module.parameters() if not p.requires_grad)
