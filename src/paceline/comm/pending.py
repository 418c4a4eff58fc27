"""Launched, unfinished reductions: what is in flight has a type and an owner."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.errors import HookError

# A wait that takes longer than this is unusual: from then on the rank is on the roll as waiting, and looks
# every second whether there is word from those it waits for.
_UNUSUAL = timedelta(seconds=2)
_AGAIN = timedelta(seconds=1)
# One of these is in the text of a failed collective's error: its name, or the path of what raised it.
_TRANSPORTS = ("gloo", "NCCL", "paceline/comm/shm")


@runtime_checkable
class Pending(Protocol):
    """One launched, unfinished reduction."""

    def wait(self, unusual: Callable[[], None]) -> Any:
        """Wait for the result; ``unusual`` is called from time to time if that takes long, and may raise.

        The group's timeout is the deadline: past it, torch raises.
        """

    def done(self) -> bool:
        """Whether waiting would take no time."""


class WorkPending:
    """A collective of torch's that fills a tensor."""

    _first_look = _UNUSUAL
    _next_look = _AGAIN

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, unusual: Callable[[], None]) -> Tensor:
        """Wait until the tensor holds the result; returns it."""
        # On an accelerator wait() only orders streams; it takes no time that could be unusual.
        patience = self._first_look
        while self._tensor.device.type == "cpu" and not self._work.is_completed():
            try:
                self._work.wait(patience)
            except RuntimeError:  # either it takes long, or it failed and the last wait says so
                if not self._work.is_completed():
                    unusual()
            patience = self._next_look
        self._work.wait()
        return self._tensor

    def done(self) -> bool:
        """Whether the tensor holds the result."""
        return bool(self._work.is_completed())

    def _failed(self) -> bool:
        return bool(self._work.is_completed()) and not self._work.is_success()


class SegmentsPending:
    """The segments of one message of rows, each in flight by itself."""

    def __init__(self, segments: Sequence[Pending]) -> None:
        self._segments = segments

    def wait(self, unusual: Callable[[], None]) -> Tensor:
        """Wait for all; returns the rows put together again."""
        rows = [segment.wait(unusual) for segment in self._segments]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def done(self) -> bool:
        """Whether all are there."""
        return all(segment.done() for segment in self._segments)


class FuturePending:
    """What a communication hook returned."""

    def __init__(self, future: "torch.futures.Future[Any]") -> None:
        self._future = future

    def wait(self, unusual: Callable[[], None]) -> Any:
        """Wait for the hook's result."""
        # A future knows no deadline; the collectives behind it do.
        if not self._future.done():
            arrived = threading.Event()
            self._future.add_done_callback(lambda _: arrived.set())
            patience = _UNUSUAL
            while not arrived.wait(patience.total_seconds()):
                unusual()
                patience = _AGAIN
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
    """Whether a future failed by what a hook does to the result, not by the collective behind it."""
    # torch 2.13's words. A callback that asks a failed collective for its result raises that one's error.
    return "when running the callback" in text and not any(name in text for name in _TRANSPORTS)
