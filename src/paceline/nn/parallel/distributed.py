"""Stands in for torch.nn.parallel.distributed."""

from paceline.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
