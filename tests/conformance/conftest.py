from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
import torch.nn.parallel

import paceline.nn.parallel


class CpuScatter:
    """torch's Scatter for machines without an accelerator."""

    @staticmethod
    def apply(devices: Sequence[object], _: None, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.chunk(len(devices), dim)


class CpuGather:
    """torch's Gather for machines without an accelerator."""

    @staticmethod
    def apply(_: object, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat(tensors, dim)


@pytest.fixture(
    params=[
        pytest.param(torch.nn.parallel, id="torch"),
        pytest.param(paceline.nn.parallel, id="paceline"),
    ]
)
def parallel(request: pytest.FixtureRequest) -> ModuleType:
    """The module under test, as each implementation has it."""
    return request.param


@pytest.fixture
def parallel_on_cpu(parallel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As ``parallel``; torch's walk over containers is its own, only the two device operations are ours."""
    if parallel is torch.nn.parallel:
        monkeypatch.setattr(parallel.scatter_gather, "Scatter", CpuScatter)
        monkeypatch.setattr(parallel.scatter_gather, "Gather", CpuGather)
    return parallel
