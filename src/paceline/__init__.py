"""Data-parallel training for PyTorch with the names, arguments and results of torch.nn.parallel."""

from paceline.data_parallel import DataParallel, data_parallel
from paceline.errors import (
    CountError,
    DeviceError,
    DimensionError,
    MissingKeyError,
    NothingError,
    PacelineError,
    ShapeError,
    StructureError,
    UnsupportedError,
)
from paceline.replicas.parallel_apply import parallel_apply
from paceline.replicas.replicate import replicate
from paceline.replicas.scatter_gather import gather, scatter, scatter_kwargs

__version__ = "0.1.0.dev0"

__all__ = [
    "CountError",
    "DataParallel",
    "DeviceError",
    "DimensionError",
    "MissingKeyError",
    "NothingError",
    "PacelineError",
    "ShapeError",
    "StructureError",
    "UnsupportedError",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
