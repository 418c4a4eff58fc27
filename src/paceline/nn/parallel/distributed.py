"""Stands in for torch.nn.parallel.distributed."""

from paceline.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
