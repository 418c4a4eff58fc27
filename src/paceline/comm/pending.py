"""Collectives that have been launched and not been waited for."""

import functools
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from paceline.errors import CollectiveError, HookError, LateRankError

# Called when a wait takes long, and again every second. The rank then notes what it waits for, and looks for
# notes of the ranks that it waits for. It may raise, which ends the wait.
OnSlow: TypeAlias = Callable[[], None]
SLOW_AFTER = timedelta(seconds=2)
SLOW_EVERY = timedelta(seconds=1)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# One of these is in the text of a failed collective's error: its name, or the path of the file that raised.
_TRANSPORTS = ("gloo", "NCCL", "paceline/comm/shm")


@runtime_checkable
class Pending(Protocol):
    """A collective that has been launched and not been waited for."""

    def wait(self, on_slow: OnSlow) -> Any:
        """Wait for the result; ``on_slow`` is called from time to time if that takes long, and may raise.

        After the group's timeout this raises.
        """

    def done(self) -> bool:
        """Whether waiting would take no time."""


class WorkPending:
    """A collective that fills a tensor, of torch's or of a group that is written in Python.

    Note [Work in Python]. Such a work has its own idea of when to give up, may not say whether it is done,
    and its ``wait`` may not take a timeout, or always want one, as C++ passes it. When the time is over,
    ``wait`` may raise, or return False.

    Args:
        work: the collective.
        tensor: what it fills.
        read_timeout: how long a work in Python may take; torch's own works have an end themselves.
        drops_failures: whether a wait that returns False is no error, because the group has told its manager,
            as torchft's does: see Note [Ranks that change].
    """

    _first_look = SLOW_AFTER
    _next_look = SLOW_EVERY

    def __init__(
        self,
        work: Any,
        tensor: Tensor,
        read_timeout: Callable[[], timedelta],
        *,
        drops_failures: bool = False,
    ) -> None:
        if work is None:
            raise CollectiveError("a collective of the process group returned None, and not a torch Work")
        self._work = work
        self._tensor = tensor
        self._read_timeout = read_timeout
        self._drops_failures = drops_failures

    def wait(self, on_slow: OnSlow) -> Tensor:
        """Wait until the tensor holds the result; returns it."""
        kind: Any = type(self._work)
        is_over: Any = True
        if inspect.isfunction(kind.wait):
            on_slow = self._with_end(on_slow)
        if (arguments := _wait_arguments(kind)) is not None:
            is_over = self._work.wait(*arguments)
        # On an accelerator wait() only orders streams and takes no time.
        elif self._tensor.device.type != "cpu" or not self._wait_looking_around(on_slow):
            is_over = self._work.wait()
        if is_over is False and not self._drops_failures:
            raise RuntimeError(f"a wait for {kind.__name__} returned False: the collective did not end well")
        return self._tensor

    def _wait_looking_around(self, on_slow: OnSlow) -> bool:
        """Wait until it is over, with looks around; returns whether it is known to have ended well."""
        timeout = self._first_look
        while not self._work.is_completed():
            began = time.monotonic()
            try:
                is_over = self._work.wait(timeout)
            except (
                RuntimeError,
                TimeoutError,
            ) as error:  # takes long, failed, or cannot wait for so long only
                if not is_of_collective(error):
                    raise
                if self._work.is_completed():
                    break
                if time.monotonic() - began < timeout.total_seconds() / 2:
                    wait_for_future(self._work.get_future(), on_slow)
                    break
            else:
                if is_over is not False:
                    return True
            on_slow()
            timeout = self._next_look
        return False

    def _with_end(self, on_slow: OnSlow) -> OnSlow:
        began = time.monotonic()

        def look() -> None:
            on_slow()
            timeout = self._read_timeout().total_seconds()
            if time.monotonic() - began > timeout:
                raise LateRankError(
                    f"a collective did not end within the process group's timeout of {timeout:g} s"
                )

        return look

    def done(self) -> bool:
        """Whether the tensor holds the result."""
        return bool(self._work.is_completed())

    def _failed(self) -> bool:
        return bool(self._work.is_completed()) and not self._work.is_success()


class ChunksPending:
    """The chunks of one message of rows, each of which is a collective of its own."""

    def __init__(self, chunks: Sequence[Pending]) -> None:
        self._chunks = chunks

    def wait(self, on_slow: OnSlow) -> Tensor:
        """Wait for all chunks; returns the whole rows."""
        rows = [chunk.wait(on_slow) for chunk in self._chunks]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def done(self) -> bool:
        """Whether all chunks are there."""
        return all(chunk.done() for chunk in self._chunks)


class NothingPending:
    """A collective of one rank: its tensor holds the result already."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self, on_slow: OnSlow) -> Tensor:  # noqa: ARG002  # takes no time
        """The tensor."""
        return self._tensor

    def done(self) -> bool:
        """Always."""
        return True


class ThenPending:
    """A collective whose result is changed when it has come.

    Args:
        pending: the collective.
        then: changes the result, in place.
    """

    def __init__(self, pending: Pending, then: Callable[[Tensor], object]) -> None:
        self._pending = pending
        self._then: Callable[[Tensor], object] | None = then

    def wait(self, on_slow: OnSlow) -> Tensor:
        """Wait for the result, and change it once."""
        result: Tensor = self._pending.wait(on_slow)
        if self._then is not None:
            self._then(result)
            self._then = None
        return result

    def done(self) -> bool:
        """Whether the result has come."""
        return self._pending.done()


class FuturePending:
    """The future that a communication hook returned."""

    def __init__(self, future: "torch.futures.Future[Any]") -> None:
        self._future = future

    def wait(self, on_slow: OnSlow) -> Any:
        """Wait for the hook's result."""
        wait_for_future(self._future, on_slow)
        try:
            return self._future.wait()
        except Exception as error:
            if isinstance(error, RuntimeError) and not _is_from_a_callback(str(error)):
                raise
            raise HookError(
                f"a communication hook's future failed ({type(error).__name__}: {error})"
            ) from error

    def done(self) -> bool:
        """Whether the hook's result is there."""
        return self._future.done()


def wait_for_future(future: "torch.futures.Future[Any]", on_slow: OnSlow) -> None:
    """Wait until a future is done, well or not."""
    # A future has no timeout; the collectives behind it have.
    if not future.done():
        arrived = threading.Event()
        future.add_done_callback(lambda _: arrived.set())
        timeout = SLOW_AFTER
        while not arrived.wait(timeout.total_seconds()):
            on_slow()
            timeout = SLOW_EVERY


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective raised an error, and not a signal handler while it was waited for."""
    kind = type(error)
    return isinstance(error, CollectiveError) or kind.__module__.partition(".")[0] in ("builtins", "torch")


@functools.cache
def _wait_arguments(kind: Any) -> tuple[timedelta, ...] | None:
    """What to call ``wait`` of a work in Python with, see Note [Work in Python].

    None if it can be watched while it is waited for, as torch's own works can.
    """
    if not inspect.isfunction(kind.wait):
        return None
    _, *parameters = inspect.signature(kind.wait).parameters.values()
    if parameters and inspect.isfunction(kind.is_completed):
        return None
    wants_timeout = any(each.default is each.empty and each.kind in _POSITIONAL for each in parameters)
    return (timedelta(0),) if wants_timeout else ()


def _is_from_a_callback(text: str) -> bool:
    """Whether a future failed in a callback of the hook, not in the collective behind it."""
    # The texts are torch 2.13's. A callback that reads the result of a failed collective raises its error.
    return "when running the callback" in text and not any(name in text for name in _TRANSPORTS)
