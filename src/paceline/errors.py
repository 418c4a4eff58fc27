"""What paceline raises.

    PacelineError
    ├── DeviceError (RuntimeError)       a device that does not exist, or a tensor or module on the wrong one
    ├── StructureError (ValueError)      nested outputs that do not fit together, named by path
    └── RanksError (ExceptionGroup)      what the ranks of one test call raised

Each is also of the built-in type that torch raises for the same mistake, so code that catches
torch's errors catches ours.
"""


class PacelineError(Exception):
    """Root of every error that paceline itself raises."""


class DeviceError(PacelineError, RuntimeError):
    """A device that does not exist, or something that is on the wrong one."""


class StructureError(PacelineError, ValueError):
    """Nested structures that do not fit together; the message names the path of the first misfit."""
