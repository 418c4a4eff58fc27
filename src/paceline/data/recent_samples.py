"""The samples that a sampler has given last, for messages about one step. Pure: no tensors here."""

import weakref
from collections import deque
from collections.abc import Callable

# More are not remembered: nobody reads them, and a message should fit on a page.
MOST_SAMPLES = 256


class RecentSamples:
    """The last samples of one iteration of a sampler.

    A data loader with workers reads ahead: it takes the samples of several batches before the first step,
    and then one batch per step. So the samples of the running step are among the last ones, as many as were
    ever taken between two steps of the iteration. If each step takes as many, they are these.
    """

    def __init__(self) -> None:
        self._indices: deque[int] = deque(maxlen=MOST_SAMPLES)
        self._since_step = 0
        self._most = 0
        self._reference = weakref.ref(self)

    def add(self, index: int) -> None:
        """A sample was taken."""
        self._indices.append(index)
        self._since_step += 1
        _latest[0] = self._reference

    def end_step(self) -> None:
        """A step has ended."""
        self._most = max(self._most, self._since_step)
        self._since_step = 0

    def describe(self) -> str:
        """The samples of the running step in words; empty if they cannot be known."""
        number = max(self._most, self._since_step)
        if not 0 < number <= MOST_SAMPLES:
            return ""
        among = "" if self._since_step == self._most else "among "
        return f"{among}samples {[*self._indices][-number:]}"


# Refers to the iteration that has given a sample last, until it is over.
_latest: list[Callable[[], RecentSamples | None]] = [lambda: None]


def end_step() -> None:
    """A training step has ended on this rank."""
    if (latest := _latest[0]()) is not None:
        latest.end_step()


def samples_of_step() -> str:
    """The samples of the running step in words; empty if they cannot be known."""
    latest = _latest[0]()
    return "" if latest is None else latest.describe()
