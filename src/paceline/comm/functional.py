"""Collectives that torch.compile can trace."""

from typing import Any

from torch import Tensor
from torch.distributed import _functional_collectives as functional


def all_reduced(tensor: Tensor, process_group: Any) -> Tensor:
    """The sum of a tensor over the ranks; waited for where it is first read."""
    total: Tensor = functional.all_reduce(tensor, "sum", process_group)
    return total
