"""Models whose parameters are DTensors, on two meshes of two ranks each: data by tensor parallelism."""

from collections.abc import Callable
from typing import Any

import batches
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH = 4
WORDS = 6
# Large enough for its gradient to be copied at once.
WIDE = 32768
# Kept, because every mesh opens process groups.
_meshes: list[DeviceMesh] = []


def mesh() -> DeviceMesh:
    """Two data-parallel ranks of two tensor-parallel ones each; the same one at each call."""
    if not _meshes:
        _meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    return _meshes[0]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Mixed(nn.Module):
    """Nested, with plain parameters beside sharded and replicated ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(Inner(), nn.Tanh(), Inner())
        self.register_buffer("scale", torch.ones(WIDTH))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.plain(x * self.scale).tanh())


class Uneven(nn.Module):
    """Shards of different sizes, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)
        self.narrow = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.down(self.up(x).tanh()))


class Words(nn.Module):
    """An embedding, whose gradient is whole where the weight is a shard, and norms that get partial sums."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = Inner()
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(self.embed(x.abs().mul(3).long().clamp(max=WORDS - 1)).tanh()))


class Norms(nn.Module):
    """Two norms that get partial sums, one of them large, and a layer of uneven shards."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.LayerNorm(WIDE)
        self.narrow = nn.LayerNorm(WIDTH)
        self.uneven = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x.repeat(1, 1, WIDE // WIDTH)).unflatten(-1, (-1, WIDTH))
        return self.uneven(self.narrow(x + wide.square().mean(dim=-2)))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Norms().double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


_PAIR = {"up": ColwiseParallel, "down": RowwiseParallel}


def _mixed() -> dict[str, Any]:
    return {f"inner.{place}.{name}": style() for place in (0, 2) for name, style in _PAIR.items()}


def _uneven() -> dict[str, Any]:
    # torch's RowwiseParallel takes every input for even shards, so outputs are joined between the layers.
    return {name: ColwiseParallel(output_layouts=Replicate()) for name in ("up", "down", "narrow")}


def _words() -> dict[str, Any]:
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "inner.up": ColwiseParallel(input_layouts=Shard(1)),
        "inner.down": RowwiseParallel(),
    }


def _norms() -> dict[str, Any]:
    return {
        "inner": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        ),
        "inner.wide": SequenceParallel(use_local_output=True),
        "inner.narrow": SequenceParallel(use_local_output=True),
        "inner.uneven": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "mixed": (Mixed, _mixed),
    "uneven": (Uneven, _uneven),
    "words": (Words, _words),
    "norms": (Outer, _norms),
}


def parallel(name: str) -> nn.Module:
    """The model, cut over this rank's tensor-parallel peers."""
    return cut(MODELS[name][0](), name)


def cut(module: nn.Module, name: str) -> nn.Module:
    """A model of that name, cut in place."""
    return parallelize_module(module, mesh()["tp"], MODELS[name][1]())


def spread(module: nn.Module) -> nn.Module:
    """The module, whole on every tensor-parallel peer, buffers too."""
    return distribute_module(module, mesh()["tp"])


def data_rank() -> int:
    return mesh()["dp"].get_local_rank()


def rows(data_rank: int, step: int = 0) -> torch.Tensor:
    """Equal on tensor-parallel peers."""
    flat = batches.rows(data_rank, step, count=2 * WIDTH, width=WIDTH, dtype=torch.float64)
    return flat.view(2, WIDTH, WIDTH)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Every part of a tensor in one."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def full_grads(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if each.grad is None else full(each.grad) for each in module.parameters()]


def same_on_data_ranks(tensors: list[torch.Tensor]) -> bool:
    """Whether ranks that hold the same shards hold the same bits."""
    everyone: list[Any] = [None, None]
    distributed.all_gather_object(everyone, [local(each) for each in tensors], group=mesh()["dp"].get_group())
    return all(map(torch.equal, *everyone))
