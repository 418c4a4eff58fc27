"""torch.compile around the wrapper and inside it: what is traced, where it is cut, and what comes out."""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import batches
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint
from wrappers import WRAPPERS

from paceline import (
    DistributedDataParallel,
    MixedPrecision,
    OptionError,
    UnsupportedError,
    hooks,
)
from paceline.testing import RankPool, run_ranks

WIDTH = 16
BYTES_A_LAYER = 8 * WIDTH * (WIDTH + 1)

rows = functools.partial(batches.rows, count=4, width=WIDTH, dtype=torch.float64)


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks with time to compile."""
    with RankPool(2, timeout=60.0) as pool:
        yield pool


class Layers(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Moody(nn.Module):
    """A module of many moods: a buffer, a frozen layer, one that only some use, one in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.seldom = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, seldom: bool = False) -> Tensor:
        x = self.frozen(self.norm(x))
        x = checkpoint(self.twice, x, use_reentrant=False)
        return self.seldom(x) if seldom else x


@contextlib.contextmanager
def fresh_compiler() -> Iterator[list[Any]]:
    """A compiler that knows nothing yet, and a list for the graphs that it will make."""
    torch._dynamo.reset()
    first = distributed._DEFAULT_FIRST_BUCKET_BYTES
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 1024  # dynamo reads it, and refuses caps below it
    try:
        yield []
    finally:
        distributed._DEFAULT_FIRST_BUCKET_BYTES = first
        torch._dynamo.reset()


def into(graphs: list[Any]) -> Callable[..., Any]:
    def backend(graph: Any, _examples: object) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    return backend


def outside(wrapper: Any, module: nn.Module, backend: Any) -> tuple[nn.Module, Callable[..., Tensor]]:
    ddp = wrapper(module, bucket_cap_mb=BYTES_A_LAYER / 2**20)
    return ddp, torch.compile(ddp, backend=backend)


def inside(wrapper: Any, module: nn.Module, backend: Any) -> tuple[nn.Module, Callable[..., Tensor]]:
    ddp = wrapper(torch.compile(module, backend=backend), bucket_cap_mb=BYTES_A_LAYER / 2**20)
    return ddp, ddp


def in_a_function(wrapper: Any, module: nn.Module, backend: Any) -> tuple[nn.Module, Callable[..., Tensor]]:
    ddp = wrapper(module, bucket_cap_mb=BYTES_A_LAYER / 2**20)
    return ddp, torch.compile(lambda x: ddp(x * 2) / 2, backend=backend)


WAYS = [outside, inside, in_a_function]


def train(net: Callable[..., Tensor], x: Tensor, **mood: bool) -> None:
    net(x, **mood).square().mean().backward()


def check(ddp: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11)


def cut(rank: int, way: Callable[..., Any]) -> None:
    made = {}
    for name, wrapper in WRAPPERS.items():
        with fresh_compiler() as graphs:
            ddp, net = way(wrapper, Layers().double(), into(graphs))
            for step in range(3):
                ddp.zero_grad()
                train(net, rows(rank, step))
            made[name] = graphs
            if name == "paceline":
                plain = Layers().double()
                for r in range(2):
                    x = rows(r, 2)
                    y = plain(x * 2) / 2 if way is in_a_function else plain(x)
                    (y.square().mean() / 2).backward()
                check(ddp, plain)
    assert made["paceline"] == made["torch"]
    assert len([graph for graph in made["paceline"] if any("linear" in name for name in graph)]) == 4


@pytest.mark.parametrize("way", WAYS)
def test_the_graph_is_cut_at_the_bounds_of_buckets_as_torchs(pair: RankPool, way: Callable[..., Any]) -> None:
    pair.run(cut, way)


class Nested(nn.Module):
    """A wrapper of its own, and a compiled region that runs after it, or after it has failed."""

    def __init__(self, *, wraps: bool, backend: Any = None, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = Layers(1).double()
        self.inner = DistributedDataParallel(inner, bucket_cap_mb=BYTES_A_LAYER / 2**20) if wraps else inner
        layers = Layers(3).double()
        self.region = layers if backend is None else torch.compile(layers, backend=backend)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            with contextlib.suppress(RuntimeError), torch.no_grad():
                self.inner(x[:, 1:])
        return self.region(self.inner(x))


def nested(rank: int, compiles: str, fails: bool) -> list[int]:
    """The number of layers in each graph of the region."""
    with fresh_compiler() as graphs:
        backend = into(graphs)
        module = Nested(wraps=True, backend=backend if compiles == "region" else None, fails=fails)
        ddp = DistributedDataParallel(module, bucket_cap_mb=BYTES_A_LAYER / 2**20)
        net = torch.compile(ddp, backend=backend) if compiles == "all" else ddp
        plain = Nested(wraps=False)
        for step in range(3):
            ddp.zero_grad()
            train(net, rows(rank, step))
        for each in range(2):
            (plain(rows(each, 2)).square().mean() / 2).backward()
        check(ddp, plain)
    assert DistributedDataParallel._get_active_ddp_module() is None
    return [sum("linear" in name for name in graph) for graph in graphs]


@pytest.mark.parametrize(("compiles", "fails"), [("region", False), ("region", True), ("all", False)])
def test_a_region_after_a_nested_wrapper_is_cut_at_the_outer_ones_buckets(
    pair: RankPool, compiles: str, fails: bool
) -> None:
    for counts in pair.run(nested, compiles, fails):
        assert max(counts) == 1  # each layer is in a graph of its own
        assert sum(counts) == (3 if compiles == "region" else 4)


def moods(rank: int, way: Callable[..., Any]) -> None:
    with fresh_compiler():
        ddp, net = way(DistributedDataParallel, Moody().double(), "eager")
        plain = DistributedDataParallel(Moody().double())
        for step, (synced, seldom, training) in enumerate(
            [
                (True, (), True),
                (True, (0,), True),
                (False, (1,), True),
                (True, (0, 1), False),
                (True, (), True),
            ]
        ):
            for wrapper, call in ((ddp, net), (plain, plain)):
                if step != 3:  # what no_sync accumulated is reduced by the step after
                    wrapper.zero_grad()
                wrapper.train(training)
                with contextlib.nullcontext() if synced else wrapper.no_sync():
                    train(call, rows(rank, step), seldom=rank in seldom)
            check(ddp, plain)
            ddp.eval()
            plain.eval()
            with torch.no_grad():
                torch.testing.assert_close(net(rows(9, 0)), plain(rows(9, 0)))


@pytest.mark.parametrize("way", [outside, inside])
def test_nothing_that_changes_after_the_first_step_is_stale(pair: RankPool, way: Callable[..., Any]) -> None:
    pair.run(moods, way)


def whole_graph(rank: int) -> None:  # noqa: ARG001
    for wrapper in WRAPPERS.values():
        with fresh_compiler():
            net = torch.compile(wrapper(Layers(1)), backend="eager", fullgraph=True)
            with pytest.raises(torch._dynamo.exc.Unsupported):
                net(torch.ones(2, WIDTH))


def test_a_graph_of_the_whole_wrapper_is_refused_as_torch_does(pair: RankPool) -> None:
    pair.run(whole_graph)


def backward_compiled(rank: int, asked: bool) -> None:
    with (
        fresh_compiler() as graphs,
        torch._dynamo.config.patch(optimize_ddp="python_reducer" if asked else True),
    ):
        ddp = DistributedDataParallel(Layers(1).double())
        net = torch.compile(ddp, backend="aot_eager", fullgraph=True) if asked else ddp
        plain = Layers(1).double()
        compiler = torch.compile(backend=into(graphs), fullgraph=True)
        for step, synced in enumerate([True, False, True]):
            if step != 2:
                ddp.zero_grad()
                plain.zero_grad()
            with contextlib.nullcontext() if synced else ddp.no_sync():
                loss = net(rows(rank, step)).square().mean()
                with torch._dynamo.compiled_autograd._enable(compiler):
                    loss.backward()
            for r in range(2):
                (plain(rows(r, step)).square().mean() / 2).backward()
            if synced:
                check(ddp, plain)
        reductions = [name for name in graphs[0] if "all_reduce" in name]
        assert len(reductions) == len(list(ddp.parameters()))
        ddp._remove_autograd_hooks()
        before = [parameter.grad.clone() for parameter in ddp.parameters()]
        if rank == 0:  # alone: nothing is reduced any more
            net(rows(rank, 0)).square().mean().backward()
            assert not any(map(torch.equal, before, [parameter.grad for parameter in ddp.parameters()]))


@pytest.mark.parametrize("asked", [False, True], ids=["as it is", "python_reducer"])
def test_compiled_autograd_reduces_in_its_graph(pair: RankPool, asked: bool) -> None:
    pair.run(backward_compiled, asked)


PLAIN_STEP = """
import sys
from torch import distributed, nn, ones
import paceline
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
paceline.DistributedDataParallel(nn.Linear(2, 2))(ones(1, 2)).sum().backward()
distributed.destroy_process_group()
print("torch._dynamo" in sys.modules)
"""


def test_who_does_not_compile_does_not_import_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_STEP], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def wrap_sync_batch_norm(_rank: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    for wrapper in WRAPPERS.values():
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            wrapper(module)


def test_sync_batch_norm_is_refused_on_the_cpu(pair: RankPool) -> None:
    pair.run(wrap_sync_batch_norm)


@contextlib.contextmanager
def python_reducer() -> Any:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        yield
    torch._dynamo.reset()


def refused_when_traced(rank: int) -> None:
    with python_reducer():
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        with pytest.raises(OptionError, match="nor with reductions in a compiled graph"):
            ddp.join()
        ddp.register_comm_hook(None, hooks.int4())
        with pytest.raises(UnsupportedError, match="int4 cannot be used in a compiled backward"):
            torch.compile(ddp, backend="eager")(batches.rows(rank)).sum().backward()
        with pytest.raises(OptionError, match="mixed precision and reductions"):
            DistributedDataParallel(
                nn.Linear(4, 4), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
            )


def test_what_cannot_be_traced_is_refused() -> None:
    run_ranks(refused_when_traced, 2, timeout=60.0)
