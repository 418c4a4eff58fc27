"""Data-parallel training for PyTorch with the names, arguments and results of torch.nn.parallel."""

from paceline import hooks
from paceline.comm.backend import process_group as _backend
from paceline.data.gather import gather_in_order
from paceline.data.sampler import ShardedSampler
from paceline.data_parallel.parallel_apply import parallel_apply
from paceline.data_parallel.replicate import replicate
from paceline.data_parallel.scatter_gather import gather, scatter, scatter_kwargs
from paceline.data_parallel.wrapper import DataParallel, data_parallel
from paceline.ddp.state.precision import MixedPrecision
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import (
    BrokenHookError,
    CountError,
    DeviceError,
    DimensionError,
    HookArgumentsError,
    HookError,
    HookSignatureError,
    HookTypeError,
    LaunchError,
    MismatchError,
    MissingKeyError,
    NothingError,
    OptionError,
    PacelineError,
    PeerError,
    SamplesError,
    ShapeError,
    ShardError,
    StalledError,
    StepError,
    StrictError,
    StructureError,
    UnsupportedError,
    WeightsError,
    WrapError,
)
from paceline.optim.sharded_optimizer import ShardedOptimizer
from paceline.tools.run.launch import launch

__version__ = "0.1.0.dev0"

_backend.register()

__all__ = [
    "BrokenHookError",
    "CountError",
    "DataParallel",
    "DeviceError",
    "DimensionError",
    "DistributedDataParallel",
    "HookArgumentsError",
    "HookError",
    "HookSignatureError",
    "HookTypeError",
    "LaunchError",
    "MismatchError",
    "MissingKeyError",
    "MixedPrecision",
    "NothingError",
    "OptionError",
    "PacelineError",
    "PeerError",
    "SamplesError",
    "ShapeError",
    "ShardError",
    "ShardedOptimizer",
    "ShardedSampler",
    "StalledError",
    "StepError",
    "StrictError",
    "StructureError",
    "UnsupportedError",
    "WeightsError",
    "WrapError",
    "data_parallel",
    "gather",
    "gather_in_order",
    "hooks",
    "launch",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
