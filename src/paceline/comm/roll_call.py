"""Who has come how far, told through the group's store, and only when a wait takes unusually long."""

import contextlib
from datetime import timedelta
from typing import Any

# torch 2.13: what reading a store raises when it, or the rank that holds it, is gone.
_GONE = (RuntimeError, OSError)
_PATIENCE = timedelta(seconds=10)


class RollCall:
    """Ranks that have waited long write where they stand; who has written nothing is the one to look for.

    Args:
        store: the group's key-value store.
        member: the number of the wrapper among those of the group.
        rank: this rank.
        size: how many ranks there are.
    """

    def __init__(self, store: Any, member: int, *, rank: int, size: int) -> None:
        self._store = store
        self._member = member
        self._rank = rank
        self._size = size

    def post(self, step: int, bucket: int) -> None:
        """Say that this rank waits for a bucket of a step."""
        self._write(f"at/{self._rank}", f"{step} {bucket}")

    def missing(self, step: int, bucket: int) -> list[int]:
        """Ranks that have not said that they wait for this bucket, or for a later one."""
        return [rank for rank in range(self._size) if rank != self._rank and self._at(rank) < (step, bucket)]

    def tell_why(self, step: int, reason: str) -> None:
        """Leave word of why this rank gave up a step."""
        self._write(f"why/{step}/{self._rank}", reason)

    def why(self, step: int, rank: int) -> str | None:
        """A rank's word of why it gave up a step."""
        return self._read(f"why/{step}/{rank}")

    def break_off(self, step: int, where: str) -> None:
        """Leave word of where in a step this rank stopped to follow the others' collectives."""
        self._write(f"broken/{step}/{self._rank}", where)

    def broken(self, step: int) -> dict[int, str]:
        """The ranks that stopped to follow the others in a step, and where."""
        found = {rank: self._read(f"broken/{step}/{rank}") for rank in range(self._size)}
        return {rank: where for rank, where in found.items() if where is not None}

    def all_broken(self, step: int) -> dict[int, str]:
        """The same once every rank has left word; after ten seconds without it."""
        keys = [self._key(f"broken/{step}/{rank}") for rank in range(self._size)]
        with contextlib.suppress(*_GONE):
            self._store.wait(keys, _PATIENCE)
        return self.broken(step)

    def _at(self, rank: int) -> tuple[int, int]:
        text = self._read(f"at/{rank}")
        if text is None:
            return (-1, -1)
        step, bucket = map(int, text.split())
        return (step, bucket)

    def _write(self, key: str, text: str) -> None:
        with contextlib.suppress(*_GONE):  # the error at hand says more than that it could not be told
            self._store.set(self._key(key), text)

    def _read(self, key: str) -> str | None:
        try:
            key = self._key(key)
            return self._store.get(key).decode() if self._store.check([key]) else None
        except _GONE:
            return None

    def _key(self, key: str) -> str:
        return f"paceline/{self._member}/{key}"
