"""Data-parallel training for PyTorch with the names, arguments and results of torch.nn.parallel."""

from importlib import metadata as _metadata

from paceline import hooks
from paceline.comm.backend import process_group as _backend
from paceline.comm.init import LaunchedRank, init
from paceline.data.batch_sampler import ShardedBatchSampler
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
    DisagreementError,
    FellApartError,
    HookArgumentsError,
    HookError,
    HookSignatureError,
    HookTypeError,
    LaunchError,
    MeetingError,
    MismatchError,
    MissingKeyError,
    NothingError,
    OptionError,
    PacelineError,
    PeerError,
    ReplacedError,
    SamplesError,
    ShapeError,
    ShardError,
    StalledError,
    StepError,
    StrictError,
    StructureError,
    UnsupportedError,
    WeightsError,
    WorldError,
    WrapError,
)
from paceline.optim.host_optimizer import HostOptimizer
from paceline.optim.sharded_optimizer import ShardedOptimizer
from paceline.outer.outer_loop import OuterLoop
from paceline.tools.run.launch import launch
from paceline.torch_private import warn_if_newer as _warn_if_newer
from paceline.training.run import Run
from paceline.training.saving import load, save
from paceline.training.state import TrainingState

try:
    __version__ = _metadata.version("paceline")
except _metadata.PackageNotFoundError:  # run from its source, and installed nowhere
    __version__ = "0.0.0.dev0"

_backend.register()
_warn_if_newer()

__all__ = [
    "BrokenHookError",
    "CountError",
    "DataParallel",
    "DeviceError",
    "DimensionError",
    "DisagreementError",
    "DistributedDataParallel",
    "FellApartError",
    "HookArgumentsError",
    "HookError",
    "HookSignatureError",
    "HookTypeError",
    "HostOptimizer",
    "LaunchError",
    "LaunchedRank",
    "MeetingError",
    "MismatchError",
    "MissingKeyError",
    "MixedPrecision",
    "NothingError",
    "OptionError",
    "OuterLoop",
    "PacelineError",
    "PeerError",
    "ReplacedError",
    "Run",
    "SamplesError",
    "ShapeError",
    "ShardError",
    "ShardedBatchSampler",
    "ShardedOptimizer",
    "ShardedSampler",
    "StalledError",
    "StepError",
    "StrictError",
    "StructureError",
    "TrainingState",
    "UnsupportedError",
    "WeightsError",
    "WorldError",
    "WrapError",
    "data_parallel",
    "gather",
    "gather_in_order",
    "hooks",
    "init",
    "launch",
    "load",
    "parallel_apply",
    "replicate",
    "save",
    "scatter",
    "scatter_kwargs",
]
