"""Launched, unfinished reductions: what is in flight has a type and an owner."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

# A wait that takes longer than this is unusual: from then on the rank is on the roll as waiting.
_UNUSUAL = timedelta(seconds=2)


class Pending(Protocol):
    """One launched, unfinished reduction."""

    def wait(self, unusual: Callable[[], None]) -> Any:
        """Wait for the result; ``unusual`` is called once if that takes long.

        The group's timeout is the deadline: past it, torch raises.
        """


class WorkPending:
    """A collective of torch's, in place on a tensor."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, unusual: Callable[[], None]) -> None:
        """Wait until the tensor holds the result."""
        # On an accelerator wait() only orders streams; it takes no time that could be unusual.
        if self._tensor.device.type == "cpu" and not self._work.is_completed():
            try:
                self._work.wait(_UNUSUAL)
            except RuntimeError:
                unusual()  # either it takes long, or it failed and the next wait says so
        self._work.wait()


class FuturePending:
    """What a communication hook returned."""

    def __init__(self, future: "torch.futures.Future[Any]") -> None:
        self._future = future

    def wait(self, unusual: Callable[[], None]) -> Any:
        """Wait for the hook's result."""
        if self._future.done():
            return self._future.wait()
        # A future knows no deadline; the collectives behind it do.
        reminder = threading.Timer(_UNUSUAL.total_seconds(), unusual)
        reminder.daemon = True
        reminder.start()
        try:
            return self._future.wait()
        finally:
            reminder.cancel()
