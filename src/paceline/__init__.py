"""Data-parallel training for PyTorch with the names, arguments and results of torch.nn.parallel."""

from paceline.errors import DeviceError, PacelineError, StructureError

__version__ = "0.1.0.dev0"

__all__ = ["DeviceError", "PacelineError", "StructureError"]
