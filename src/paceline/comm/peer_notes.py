"""Which ranks are missing, and why: notes in the group's store, written only when something goes wrong.

A rank that waits long writes down what it waits for, so the rank that has written nothing is the one to look
for. A rank that raises writes down why.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from paceline.comm.store_questions import NoAnswerError, ask_store

# torch 2.13: what a store raises when it, or the rank that holds it, is gone.
_STORE_ERRORS = (RuntimeError, OSError)
_ALL_STOPPED_TIMEOUT = timedelta(seconds=10)
_REASON_TIMEOUT = timedelta(seconds=1)
# For how long a store that did not answer is not asked again.
_LOST_SECONDS = 60.0
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.02


class PeerNotes:
    """Notes that the ranks of one wrapper leave for each other.

    Args:
        store: the group's key-value store; None if it has none, and then no note is ever found.
        wrapper: a text that names the wrapper on all ranks.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, store: Any, wrapper: str, *, rank: int, size: int) -> None:
        self._store = store
        self._wrapper = wrapper
        self._rank = rank
        self._size = size
        self._times = itertools.count()
        self._seen: dict[int, str | None] = {}
        self._lost_until = 0.0

    @property
    def can_be_left(self) -> bool:
        """Whether notes reach the other ranks."""
        return self._store is not None

    def note_waiting(self, step: int, bucket: int) -> None:
        """Note that this rank waits for a bucket of a step."""
        self._write(f"waiting/{self._rank}", f"{step} {bucket} {next(self._times)}")

    def missing(self, step: int, bucket: int) -> list[int]:
        """Ranks without a note that they wait for this bucket, or for a later one."""
        others = (rank for rank in range(self._size) if rank != self._rank)
        return [rank for rank in others if self._waits_for(rank) < (step, bucket)]

    def note_reason(self, step: int, reason: str) -> None:
        """Note why this rank gave up a step."""
        self._write(f"reason/{step}/{self._rank}", reason)

    def reason(self, step: int, rank: int) -> str | None:
        """Why a rank gave up a step; None if it left no note."""
        return self._read(f"reason/{step}/{rank}")

    def note_missing(self, step: int, words: str) -> None:
        """Note that this rank gave up a step because of another one, which the words name."""
        self._write(f"missing/{step}/{self._rank}", words)

    def said_missing(self, step: int, rank: int) -> str | None:
        """Because of which rank a rank gave up a step; None if it left no note."""
        return self._read(f"missing/{step}/{rank}")

    def wait_for_reason(self, step: int, rank: int) -> str | None:
        """What ``reason`` returns, of a rank that may be about to write it."""
        self._wait_for([f"reason/{step}/{rank}"], _REASON_TIMEOUT)
        return self.reason(step, rank)

    def note_non_finite(self, step: int, what: str) -> None:
        """Note which gradients of this rank are not finite in a step."""
        self._write(f"non-finite/{step}/{self._rank}", what)

    def wait_for_non_finite(self, step: int, rank: int) -> str | None:
        """What a rank has noted by ``note_non_finite``, or is about to note; None if nothing."""
        key = f"non-finite/{step}/{rank}"
        self._wait_for([key], _REASON_TIMEOUT)
        return self._read(key)

    def note_lost_forward(self, point: Mapping[str, Sequence[int]], *, raised: bool) -> None:
        """Note at which point of its wrappers' steps this rank has lost a forward.

        Args:
            point: the numbers of each wrapper, by its name.
            raised: whether the rank has an exception to raise; if not, it repeats a forward.
        """
        self._write(f"{_lost_forward(raised=raised)}/{self._rank}", json.dumps(point))

    def lost_forwards(self, *, raised: bool) -> list[dict[str, list[int]]]:
        """What each other rank has noted last by ``note_lost_forward`` of this kind; empty if nothing."""
        others = (rank for rank in range(self._size) if rank != self._rank)
        texts = [self._read(f"{_lost_forward(raised=raised)}/{rank}") for rank in others]
        return [{} if text is None else json.loads(text) for text in texts]

    def is_awaited(self, step: int) -> bool:
        """Whether another rank has noted since ``begin_looking`` that it waits for a bucket of this step."""
        return any(
            self._waits_for(rank)[0] >= step
            for rank, seen in self._seen.items()
            if self._read(f"waiting/{rank}") != seen
        )

    def begin_looking(self) -> None:
        """From now on look for ranks that wait; a rank that does writes its note anew each second."""
        others = (rank for rank in range(self._size) if rank != self._rank)
        self._seen = {rank: self._read(f"waiting/{rank}") for rank in others}

    def note_stopped(self, step: int, where: str) -> None:
        """Note where in a step this rank stopped issuing the collectives that the others expect."""
        self._write(f"stopped/{step}/{self._rank}", where)

    def stopped(self, step: int) -> dict[int, str]:
        """The ranks that stopped issuing collectives in a step, and where."""
        found = {rank: self._read(f"stopped/{step}/{rank}") for rank in range(self._size)}
        return {rank: where for rank, where in found.items() if where is not None}

    def wait_until_all_stopped(self, step: int) -> dict[int, str]:
        """What ``stopped`` returns once every rank has stopped, or after ten seconds."""
        self._wait_for([f"stopped/{step}/{rank}" for rank in range(self._size)], _ALL_STOPPED_TIMEOUT)
        return self.stopped(step)

    def _wait_for(self, keys: Iterable[str], timeout: timedelta) -> None:
        """Wait until all notes are there, for some time at most."""
        until, wanted = time.monotonic() + timeout.total_seconds(), [*map(self._key, keys)]
        # Not by the store's own wait: if ranks are threads, questions of others have to come in between.
        while self._is_there and not self._ask(lambda store: store.check(wanted)):
            if time.monotonic() > until:
                return
            time.sleep(_LOOK_SECONDS)

    def _waits_for(self, rank: int) -> tuple[int, int]:
        text = self._read(f"waiting/{rank}")
        if text is None:
            return (-1, -1)
        step, bucket, _ = map(int, text.split())
        return (step, bucket)

    def _write(self, key: str, text: str) -> None:
        # An exception's words may have characters that cannot be encoded.
        text = text.encode(errors="backslashreplace").decode()
        self._ask(lambda store: store.set(self._key(key), text))

    def _read(self, key: str) -> str | None:
        key = self._key(key)
        text: str | None = self._ask(lambda store: store.get(key).decode() if store.check([key]) else None)
        return text

    def _ask(self, ask: Callable[[Any], Any]) -> Any:
        """What the store answers; None if it does not."""
        if not self._is_there:
            return None
        try:
            return ask_store(partial(ask, self._store), _ANSWER_SECONDS)
        except (*_STORE_ERRORS, NoAnswerError):
            # The error that is about to be raised says more than a second one about the store would.
            self._lost_until = time.monotonic() + _LOST_SECONDS
            return None

    @property
    def _is_there(self) -> bool:
        return self._store is not None and time.monotonic() >= self._lost_until

    def _key(self, key: str) -> str:
        return f"paceline/{self._wrapper}/{key}"


def _lost_forward(*, raised: bool) -> str:
    return "raised-forward" if raised else "repeated-forward"
