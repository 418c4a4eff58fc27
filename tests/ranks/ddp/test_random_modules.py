"""Gradients of random nets over ranks equal those of one process on the whole batch."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel
from paceline.testing import RankPool

WIDTH = 4
LAYERS = ("linear", "norm", "tied", "checkpointed", "reentrant", "frozen", "branch")


@dataclass(frozen=True)
class Case:
    """A net, and for each step, pass and rank how many rows there are and which branches they take."""

    seed: int
    layers: tuple[str, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    branches: tuple[tuple[tuple[bool, ...], ...], ...]
    weighed: bool
    as_views: bool
    cap_mb: float
    sets_to_none: bool


class Net(nn.Module):
    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = layers
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.LayerNorm(WIDTH) if kind == "norm" else nn.Linear(WIDTH, WIDTH) for kind in layers
        )
        for kind, layer in zip(layers, self.layers, strict=True):
            if kind == "tied":
                layer.weight = self.first.weight
            if kind == "frozen":
                layer.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, branch: bool) -> torch.Tensor:
        x = self.first(x)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind == "branch" and not branch:
                continue
            if kind in ("checkpointed", "reentrant"):
                # Twice over one module, so that its gradients arrive more than once in a backward.
                for _ in range(2):
                    x = checkpoint(layer, x.tanh(), use_reentrant=kind == "reentrant")
            else:
                x = layer(x).tanh() + x
        return x


# Found once: a pass that counts nothing leaves no gradient, which is not the user's clearing them.
COUNTS_NOTHING = Case(
    seed=0,
    layers=("branch",),
    rows=(((0, 0), (0, 1)), ((0, 1),), ((0, 1), (0, 0))),
    branches=(((False, False), (False, False)), ((False, True),), ((False, False), (False, False))),
    weighed=True,
    as_views=False,
    cap_mb=0.0001,
    sets_to_none=False,
)


def make_net(case: Case) -> Net:
    torch.manual_seed(case.seed)
    return Net(case.layers).double()


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.square().sum(1).mean()


def clear(net: nn.Module, case: Case) -> None:
    net.zero_grad(set_to_none=case.sets_to_none)


def rows_of(case: Case, step: int, part: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    count = case.rows[step][part][rank]
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)


def one_process(net: Net, case: Case, step: int) -> None:
    """All rows at once if they are weighed; else the mean over the ranks of each one's loss."""
    world = len(case.rows[step][0])
    total = sum(map(sum, case.rows[step]))
    for part, counts in enumerate(case.rows[step]):
        for rank, count in enumerate(counts):
            share = count / total if case.weighed else 1 / world
            if count:
                branch = case.branches[step][part][rank]
                (share * loss_of(net(rows_of(case, step, part, rank), branch=branch))).backward()


def on_ranks(ddp: DistributedDataParallel, case: Case, step: int, rank: int) -> None:
    parts = len(case.rows[step])
    for part in range(parts):
        rows = rows_of(case, step, part, rank)
        accumulates = ddp.no_sync() if part < parts - 1 else contextlib.nullcontext()
        weighs = ddp.weigh(len(rows)) if case.weighed else contextlib.nullcontext()
        with accumulates, weighs:
            loss_of(ddp(rows, branch=case.branches[step][part][rank])).backward()


def worst_error(rank: int, case: Case) -> float:
    plain = make_net(case)
    ddp = DistributedDataParallel(
        make_net(case), gradient_as_bucket_view=case.as_views, bucket_cap_mb=case.cap_mb
    )
    worst = 0.0
    for step in range(len(case.rows)):
        clear(plain, case)
        clear(ddp, case)
        one_process(plain, case, step)
        on_ranks(ddp, case, step, rank)
        for name, parameter in plain.named_parameters():
            worst = max(worst, error(parameter.grad, ddp.module.get_parameter(name).grad, name))
    return worst


def error(want: torch.Tensor | None, got: torch.Tensor | None, name: str) -> float:
    # zero_grad(set_to_none=False) leaves no mark where a parameter was never used: None stays None.
    assert (want is None) == (got is None), f"{name}: {want} {got}"
    if want is None:
        return 0.0
    assert got is not None
    return float((want - got).abs().max() / want.abs().max().clamp(min=1e-3))


@st.composite
def cases(draw: st.DrawFn, world: int) -> Case:
    weighed = draw(st.booleans())
    steps = draw(st.integers(1, 4))
    parts = [draw(st.integers(1, 3)) for _ in range(steps)]
    # Without weights a rank without rows has no mean; with them at least one row must be somewhere.
    counts = st.integers(0 if weighed else 1, 4)
    rows = tuple(
        tuple(tuple(draw(counts) for _ in range(world)) for _ in range(parts[step])) for step in range(steps)
    )
    if any(not any(map(sum, step)) for step in rows):
        rows = tuple(tuple(tuple(count + 1 for count in part) for part in step) for step in rows)
    return Case(
        seed=draw(st.integers(0, 1000)),
        layers=tuple(draw(st.lists(st.sampled_from(LAYERS), max_size=4))),
        rows=rows,
        branches=tuple(
            tuple(tuple(draw(st.booleans()) for _ in range(world)) for _ in range(parts[step]))
            for step in range(steps)
        ),
        weighed=weighed,
        as_views=draw(st.booleans()),
        cap_mb=draw(st.sampled_from([0.0001, 25.0])),
        sets_to_none=draw(st.booleans()),
    )


def test_passes_that_count_nothing(pool: RankPool) -> None:
    assert max(pool.run(worst_error, COUNTS_NOTHING)) < 1e-12


# A third rank has few more ways to differ from the first two.
@pytest.mark.parametrize(("world", "examples"), [(2, 60), (3, 30)])
def test_gradients_are_those_of_one_process(world: int, examples: int) -> None:
    with RankPool(world) as ranks:

        @given(case=cases(world))
        @settings(max_examples=examples, deadline=None)
        def check(case: Case) -> None:
            assert max(ranks.run(worst_error, case)) < 1e-12

        check()
