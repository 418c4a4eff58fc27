"""Stands in for torch.nn.parallel: change the import, keep the code."""

from paceline.nn.parallel.data_parallel import DataParallel, data_parallel
from paceline.nn.parallel.distributed import DistributedDataParallel
from paceline.nn.parallel.parallel_apply import parallel_apply
from paceline.nn.parallel.replicate import replicate
from paceline.nn.parallel.scatter_gather import gather, scatter

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
]
