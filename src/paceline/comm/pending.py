"""Collectives that have been launched and not been waited for."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from paceline.errors import HookError

# Called when a wait takes long, and again every second. The rank then notes what it waits for, and looks for
# notes of the ranks that it waits for. It may raise, which ends the wait.
OnSlow: TypeAlias = Callable[[], None]
SLOW_AFTER = timedelta(seconds=2)
SLOW_EVERY = timedelta(seconds=1)
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
    """A collective of torch's that fills a tensor."""

    _first_look = SLOW_AFTER
    _next_look = SLOW_EVERY

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, on_slow: OnSlow) -> Tensor:
        """Wait until the tensor holds the result; returns it."""
        # On an accelerator wait() only orders streams and takes no time.
        timeout = self._first_look
        while self._tensor.device.type == "cpu" and not self._work.is_completed():
            try:
                self._work.wait(timeout)
            except RuntimeError:  # either it takes long, or it failed and the last wait says so
                if not self._work.is_completed():
                    on_slow()
            timeout = self._next_look
        self._work.wait()
        return self._tensor

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


class FuturePending:
    """The future that a communication hook returned."""

    def __init__(self, future: "torch.futures.Future[Any]") -> None:
        self._future = future

    def wait(self, on_slow: OnSlow) -> Any:
        """Wait for the hook's result."""
        # A future has no timeout; the collectives behind it have.
        if not self._future.done():
            arrived = threading.Event()
            self._future.add_done_callback(lambda _: arrived.set())
            timeout = SLOW_AFTER
            while not arrived.wait(timeout.total_seconds()):
                on_slow()
                timeout = SLOW_EVERY
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


def _is_from_a_callback(text: str) -> bool:
    """Whether a future failed in a callback of the hook, not in the collective behind it."""
    # The texts are torch 2.13's. A callback that reads the result of a failed collective raises its error.
    return "when running the callback" in text and not any(name in text for name in _TRANSPORTS)
