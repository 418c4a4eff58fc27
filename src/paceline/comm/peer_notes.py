"""Which ranks are missing, and why: notes in the group's store, written only when something goes wrong.

A rank that waits long writes down what it waits for, so the rank that has written nothing is the one to look
for. A rank that raises writes down why.
"""

import contextlib
from datetime import timedelta
from typing import Any

# torch 2.13: what a store raises when it, or the rank that holds it, is gone.
_STORE_ERRORS = (RuntimeError, OSError)
_ALL_STOPPED_TIMEOUT = timedelta(seconds=10)


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

    @property
    def can_be_left(self) -> bool:
        """Whether notes reach the other ranks."""
        return self._store is not None

    def note_waiting(self, step: int, bucket: int) -> None:
        """Note that this rank waits for a bucket of a step."""
        self._write(f"waiting/{self._rank}", f"{step} {bucket}")

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

    def note_stopped(self, step: int, where: str) -> None:
        """Note where in a step this rank stopped issuing the collectives that the others expect."""
        self._write(f"stopped/{step}/{self._rank}", where)

    def stopped(self, step: int) -> dict[int, str]:
        """The ranks that stopped issuing collectives in a step, and where."""
        found = {rank: self._read(f"stopped/{step}/{rank}") for rank in range(self._size)}
        return {rank: where for rank, where in found.items() if where is not None}

    def wait_until_all_stopped(self, step: int) -> dict[int, str]:
        """What ``stopped`` returns once every rank has stopped, or after ten seconds."""
        keys = [self._key(f"stopped/{step}/{rank}") for rank in range(self._size)]
        if self._store is not None:
            with contextlib.suppress(*_STORE_ERRORS):
                self._store.wait(keys, _ALL_STOPPED_TIMEOUT)
        return self.stopped(step)

    def _waits_for(self, rank: int) -> tuple[int, int]:
        text = self._read(f"waiting/{rank}")
        if text is None:
            return (-1, -1)
        step, bucket = map(int, text.split())
        return (step, bucket)

    def _write(self, key: str, text: str) -> None:
        # The error that is about to be raised says more than a second one about the store would.
        if self._store is not None:
            with contextlib.suppress(*_STORE_ERRORS):
                self._store.set(self._key(key), text)

    def _read(self, key: str) -> str | None:
        if self._store is None:
            return None
        try:
            key = self._key(key)
            return self._store.get(key).decode() if self._store.check([key]) else None
        except _STORE_ERRORS:
            return None

    def _key(self, key: str) -> str:
        return f"paceline/{self._wrapper}/{key}"
