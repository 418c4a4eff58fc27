"""One bucket's run through a hook that is a generator of collectives."""

from typing import Any

from paceline.comm.pending import OnSlow, Pending
from paceline.errors import BrokenHookError, HookError
from paceline.hooks.hook import Reduction


class HookRun:
    """A bucket between two of its hook's collectives.

    It may be waited for again, when a step is lost after its buckets were reduced.
    """

    def __init__(self, reduction: Reduction, name: str) -> None:
        self._reduction = reduction
        self._name = name
        self._in_flight: Pending | None = None
        self._result: Any = None
        self._resume(None)

    def wait(self, on_slow: OnSlow) -> Any:
        """Wait for one collective after the other; returns what the hook returned."""
        while self._in_flight is not None:
            value = self._in_flight.wait(on_slow)
            try:
                self._resume(value)
            except Exception as error:  # the hook's own, not that of a collective
                raise BrokenHookError(f"a hook raised {error!r} (hook: {self._name})") from error
        return self._result

    def done(self) -> bool:
        """Whether the hook has returned."""
        return self._in_flight is None

    def _resume(self, value: Any) -> None:
        self._in_flight = None
        try:
            pending: object = self._reduction.send(value)
        except StopIteration as stop:
            self._result = stop.value
            return
        if not isinstance(pending, Pending):
            self._reduction.close()
            raise HookError(
                f"a hook must yield a collective in flight (hook: {self._name}, got: {pending!r})"
            )
        self._in_flight = pending
