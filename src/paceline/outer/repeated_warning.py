"""Tells what a host waits for if that takes long."""

import time
import warnings
from collections.abc import Callable


class RepeatedWarning:
    """Tells of a wait that takes long: after some seconds, and then whenever twice as many are over.

    Args:
        seconds: after how many it tells first.
    """

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._told_after = seconds

    def tell(self, words: Callable[[], str]) -> None:
        """Warn if it is time."""
        if time.monotonic() - self._began > self._told_after:
            self._told_after *= 2
            warnings.warn(words(), stacklevel=2)
