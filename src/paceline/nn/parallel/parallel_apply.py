"""Stands in for torch.nn.parallel.parallel_apply."""

from paceline.data_parallel.parallel_apply import parallel_apply

__all__ = ["parallel_apply"]
