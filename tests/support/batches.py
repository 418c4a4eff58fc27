"""Inputs for tests."""

import torch


def rows(
    rank: int = 0, step: int = 0, *, count: int = 6, width: int = 4, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Random rows, the same in every process for the same rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(count, width, dtype=dtype, generator=generator)


def random_rows(*shape: int) -> torch.Tensor:
    """Random rows, others at each call."""
    return torch.randn(*(shape or (6, 2)), dtype=torch.double)


def numbered(count: int, columns: int = 2) -> torch.Tensor:
    """Rows whose elements are 0, 1, 2 and so on."""
    return torch.arange(float(count * columns)).reshape(count, columns)
