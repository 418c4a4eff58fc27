"""How many batches torch's data loaders have given to this process.

Only the loader of the last step counts, as long as it gives some. Others may be for evaluation, perhaps on
one rank alone.
"""

import functools
import time
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from paceline.recording.recorder import waited_for_loader
from paceline.torch_private import after_each_batch, sampler_iterator_of


class KnowsGiven:
    """An iterator over a sampler that is told how far training has come.

    Attributes:
        given: how many batches the loader that reads from it has given; it may have read more.
    """

    given = 0


class _Iteration:
    """One iteration over a loader: how many batches it has given."""

    batches = 0


class _Iterations:
    """The iterations that are not over, and the last one that has given a batch."""

    def __init__(self) -> None:
        self._living: weakref.WeakKeyDictionary[Iterator[Any], _Iteration] = weakref.WeakKeyDictionary()
        self.latest = _Iteration()

    def add(self, iterator: Iterator[Any], asked: int) -> None:
        waited_for_loader(asked)
        iteration = self._living.setdefault(iterator, _Iteration())
        iteration.batches += 1
        self.latest = iteration
        if isinstance(source := sampler_iterator_of(iterator), KnowsGiven):
            source.given += 1


_iterations = _Iterations()
after_each_batch(_iterations.add)


def _record_starts() -> None:
    """Record how long loaders take to begin an iteration: they may start processes."""
    begin = DataLoader.__iter__

    @functools.wraps(begin)
    def begin_and_record(self: DataLoader[Any]) -> Any:
        asked = time.monotonic_ns()
        iterator = begin(self)
        waited_for_loader(asked)
        return iterator

    DataLoader.__iter__ = begin_and_record  # type: ignore[method-assign]


_record_starts()


class BatchCounter:
    """How many batches were taken for a step."""

    def __init__(self) -> None:
        self._main = _iterations.latest
        self._before = self._main.batches

    def begin(self) -> None:
        """Another step begins."""
        if self._main.batches == self._before:
            self._main = _iterations.latest
        self._before = self._main.batches

    def now(self) -> int:
        """How many batches were taken since then."""
        if self._main.batches > self._before:
            return self._main.batches - self._before
        latest = _iterations.latest
        return 0 if latest is self._main else latest.batches
