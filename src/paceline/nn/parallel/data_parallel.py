"""Stands in for torch.nn.parallel.data_parallel."""

from paceline.data_parallel.wrapper import DataParallel, data_parallel

__all__ = ["DataParallel", "data_parallel"]
