"""Signals to the process that has started ranks: the first asks them to end, the next ends them."""

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from torch.distributed.elastic.multiprocessing import SignalException


class Signals:
    """While it lasts, the first signal raises what torch's agent waits for, and others call ``end_now``.

    Only the main thread can do so; elsewhere signals mean what they meant.
    """

    def __init__(self, names: Sequence[str], end_now: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._handled = [signal.Signals[name.strip()] for name in names if name.strip()]
        self._end_now = end_now
        self._before: dict[signal.Signals, Any] = {}
        self._may_raise = True

    def __enter__(self) -> Self:
        self._before = self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def insist(self) -> None:
        """Handle signals again, after torch's agent has begun to do so."""
        self._install()

    def hold(self) -> None:
        """Raise no more: there is nothing left to interrupt but what ends the ranks."""
        self._may_raise = False

    def _install(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {signum: signal.signal(signum, self._handler(signum)) for signum in self._handled}

    def _handler(self, signum: signal.Signals) -> Any:
        """What a signal does now. Of a hangup that nohup has had ignored, torch's agent would take notice."""
        before = self._before.get(signum, signal.getsignal(signum))
        return before if signum == signal.SIGHUP and before is signal.SIG_IGN else self._receive

    def _receive(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's arguments
        is_first, self.received = self.received is None, self.received or signal.Signals(signum)
        if not is_first:
            self._end_now()
        elif self._may_raise:
            raise SignalException(f"received {self.received.name}", self.received)
