"""What paceline raises.

The tree, with the built-in types beside::

    PacelineError
    ├── DeviceError (RuntimeError)           a device that does not exist, or something on the wrong one
    ├── StructureError (ValueError)          nested values that do not fit together, named by path
    │   ├── MissingKeyError (KeyError)       a dict lacks a key that the first replica's has
    │   └── NothingError (IndexError)        no outputs to gather
    ├── ShapeError (RuntimeError)            tensors that cannot be cut or joined, named by path
    ├── DimensionError (IndexError)          a tensor lacks the dimension to cut or join along, named by path
    ├── UnsupportedError (RuntimeError)      what is not done, or not together with something else
    ├── CountError (AssertionError)          as many of one thing as of another are needed
    ├── OptionError (ValueError)             an argument that is not allowed, or not with the others
    │   └── HookSignatureError               a communication hook whose annotations say something else
    ├── HookTypeError (TypeError)            what cannot be a communication hook or a compressor
    │   └── HookArgumentsError (KeyError)    a communication hook that takes other arguments
    ├── WrapError (RuntimeError)             a module that cannot be wrapped
    │   └── MismatchError                    ranks that wrapped different models
    ├── StepError (RuntimeError)             a step that could not be finished, on this rank
    │   ├── PeerError                        another rank raised; names it
    │   │   └── UnmeasuredError              links between ranks could not be measured
    │   ├── StalledError                     a reduction that did not end; names who is missing
    │   ├── HookError                        a communication hook's mistake
    │   │   └── BrokenHookError              one made between two of the hook's collectives
    │   ├── WeightsError                     contributions weighed on some ranks only
    │   ├── MispairedError                   ranks that would average gradients of different steps
    │   ├── ReplicaError                     replicas that differ; names the tensor and the rank
    │   ├── ReplacedError                    this rank was given up, and the others went on without it
    │   └── StrictError                      in strict mode: what torch's wrapper would not do
    ├── CollectiveError (RuntimeError)       a collective in shared memory that could not be finished
    │   ├── LostRankError                    because ranks have ended; names them
    │   ├── LateRankError                    because ranks did not come in time
    │   ├── UnmatchedError                   because ranks called different ones
    │   └── ClosedGroupError                 because the group was destroyed, or is another process's
    ├── RecordingError (ValueError)          recorded steps that cannot be read
    ├── MissingPackageError (ImportError)    an extra that is not installed; names it
    ├── SamplesError (ValueError)            samples that came twice or not at all, or of another order
    ├── ShardError (RuntimeError)            optimizer state that is on other ranks
    ├── BenchError (RuntimeError)            what cannot be measured here
    ├── LaunchError (RuntimeError)           a launched function failed on a rank; has its traceback
    ├── WorldError (ValueError)              variables of launchers that describe no world, or several
    │   ├── DisagreementError                those of two launchers that disagree
    │   └── FellApartError                   a world that is smaller than what was started
    ├── MeetingError (RuntimeError)          ranks that could not meet, or are not of one world
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
    """What is not done, or not together with something else; the message says with what."""


class ShapeError(PacelineError, RuntimeError):
    """Tensors that cannot be cut or joined; the message names the path of the first misfit."""


class CountError(PacelineError, AssertionError):
    """As many of one thing as of another are needed."""


class OptionError(PacelineError, ValueError):
    """An argument that is not allowed, or not together with the others."""


class HookSignatureError(OptionError):
    """A communication hook whose annotations are not those of a hook."""


class HookTypeError(PacelineError, TypeError):
    """What cannot be a communication hook or a compressor."""


class HookArgumentsError(HookTypeError, KeyError):
    """A communication hook that cannot be called with a state and a bucket."""

    # KeyError, which torch raises for some of them, would show the message's repr.
    __str__ = Exception.__str__


class WrapError(PacelineError, RuntimeError):
    """A module that cannot be wrapped."""


class MismatchError(WrapError):
    """Ranks wrapped different models; the message names the first difference and both sides of it."""


class StepError(PacelineError, RuntimeError):
    """A step that could not be finished. The next one begins anew."""


class PeerError(StepError):
    """Another rank raised, and so this step is lost on every rank, unless the message says that it is not."""


class UnmeasuredError(PeerError):
    """Ranks could not measure the links between them, because messages did not come; no step is lost."""


class StalledError(StepError):
    """A reduction did not end; the message names step, bucket, parameters and the ranks that are missing.

    Attributes:
        is_late: whether a rank did not come within the group's timeout.
    """

    is_late = False


class HookError(StepError):
    """A communication hook made a mistake; the message says what it returned and what is wanted."""


class BrokenHookError(HookError):
    """A communication hook raised between two of its collectives, so that other ranks wait for the next."""


class WeightsError(StepError):
    """Some contributions of a step were weighed and others were not."""


class MispairedError(StepError):
    """Ranks would average gradients of different steps; the message names them."""


class ReplicaError(StepError):
    """Replicas differ; the message names what differs, on which ranks, and since when."""


class ReplacedError(StepError):
    """This rank was given up, because others had waited for it too long, and they go on without it."""


class StrictError(StepError):
    """Strict mode: here torch's wrapper raises."""


class CollectiveError(PacelineError, RuntimeError):
    """A collective that could not be finished.

    Attributes:
        what: the message without ranks. Those of a collective in shared memory are on this host, and may only
            wait for others themselves.
    """

    def __init__(self, message: str, what: str | None = None) -> None:
        super().__init__(message)
        self.what = message if what is None else what


class LostRankError(CollectiveError):
    """Ranks of this host have ended; the message names them."""


class LateRankError(CollectiveError):
    """Ranks did not come within the group's timeout; the message names them if it can."""


class UnmatchedError(CollectiveError):
    """Ranks called different collectives; the message has both."""


class ClosedGroupError(CollectiveError):
    """The group was destroyed or aborted, or belongs to the process that this one was forked from."""


class RecordingError(PacelineError, ValueError):
    """Recorded steps that are not there, or cannot be read."""


class MissingPackageError(PacelineError, ImportError):
    """What was asked for needs an extra that is not installed; the message names it."""


class SamplesError(PacelineError, ValueError):
    """Samples that came more than once or not at all, do not fit together, or are of another order."""


class ShardError(PacelineError, RuntimeError):
    """Optimizer state is asked for where it is not."""


class BenchError(PacelineError, RuntimeError):
    """What cannot be measured on this machine; the message says what it lacks."""


class LaunchError(PacelineError, RuntimeError):
    """A launched function failed; the message names the rank that failed first, with its traceback."""


class WorldError(PacelineError, ValueError):
    """Launchers' variables that describe no world, or several; the message names them."""


class DisagreementError(WorldError):
    """The variables of two launchers disagree; the message names both."""


class FellApartError(WorldError):
    """A world that has fewer ranks or nodes than a launcher started.

    Attributes:
        size: the number of ranks of the smaller world.
    """

    def __init__(self, message: str, *, size: int = 1) -> None:
        super().__init__(message)
        self.size = size


class MeetingError(PacelineError, RuntimeError):
    """Ranks that could not meet, or do not belong to one world; the message says where they were to meet."""


class RanksError(PacelineError, ExceptionGroup[Exception]):
    """What went wrong on the ranks of one test call, in rank order."""

    def derive(self, excs: Sequence[Exception]) -> "RanksError":  # type: ignore[override]
        """Keep the type when the group is split, as ``except*`` does."""
        return RanksError(self.message, excs)


class RankDiedError(PacelineError, RuntimeError):
    """A rank whose process ended before its call did; the message has the exit code or the signal."""


class RemoteError(PacelineError, RuntimeError):
    """Stands in for an exception or a result that could not be carried over from a rank."""
