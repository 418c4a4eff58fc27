"""What paceline raises.

    PacelineError
    ├── DeviceError (RuntimeError)           a device that does not exist, or something on the wrong one
    ├── StructureError (ValueError)          nested values that do not fit together, named by path
    │   ├── MissingKeyError (KeyError)       a dict lacks a key that the first replica's has
    │   └── NothingError (IndexError)        no outputs to gather
    ├── ShapeError (RuntimeError)            tensors that cannot be cut or joined, named by path
    ├── DimensionError (IndexError)          a tensor lacks the dimension to cut or join along, named by path
    ├── UnsupportedError (RuntimeError)      a module that cannot be replicated
    ├── CountError (AssertionError)          as many of one thing as of another are needed
    ├── RanksError (ExceptionGroup)          what went wrong on the ranks of one test call
    ├── RankDiedError (RuntimeError)         in a RanksError: a rank's process ended before its call did
    └── RemoteError (RuntimeError)           in a RanksError: for what could not be carried over from a rank

Each is also of the built-in type that torch raises for the same mistake, so code that catches
torch's errors catches ours.
"""

from collections.abc import Sequence


class PacelineError(Exception):
    """Root of every error that paceline itself raises."""


class DeviceError(PacelineError, RuntimeError):
    """A device that does not exist, or something that is on the wrong one."""


class StructureError(PacelineError, ValueError):
    """Nested values that do not fit together; the message names the path of the first misfit."""


class MissingKeyError(StructureError, KeyError):
    """A replica's dict lacks a key that the first replica's has."""

    # KeyError would show the message's repr.
    __str__ = Exception.__str__


class NothingError(StructureError, IndexError):
    """There are no outputs to gather."""


class DimensionError(PacelineError, IndexError):
    """A tensor lacks the dimension to cut or join along; the message names its path."""


class UnsupportedError(PacelineError, RuntimeError):
    """A module that cannot be replicated."""


class ShapeError(PacelineError, RuntimeError):
    """Tensors that cannot be cut or joined; the message names the path of the first misfit."""


class CountError(PacelineError, AssertionError):
    """As many of one thing as of another are needed."""


class RanksError(PacelineError, ExceptionGroup[Exception]):
    """What went wrong on the ranks of one test call, in rank order."""

    def derive(self, excs: Sequence[Exception]) -> "RanksError":  # type: ignore[override]
        """Keep the type when the group is split, as ``except*`` does."""
        return RanksError(self.message, excs)


class RankDiedError(PacelineError, RuntimeError):
    """A rank whose process ended before its call did; the message has the exit code or the signal."""


class RemoteError(PacelineError, RuntimeError):
    """Stands in for an exception or a result that could not be carried over from a rank."""
