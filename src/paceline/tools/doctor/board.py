"""What ranks tell each other through the store, which works where nothing else does."""

import json
import time
from datetime import timedelta
from typing import Any


class Board:
    """Each rank's words under a name.

    Args:
        store: where ranks meet.
        rank: this rank.
        world: how many there are.
        seconds: so long others are waited for.
    """

    def __init__(self, store: Any, *, rank: int, world: int, seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._seconds = seconds

    def share(self, name: str, own: Any) -> list[Any]:
        """Everyone's words, in the order of the ranks; None for a rank that has said nothing in time."""
        self._store.set(self._key(name, self._rank), json.dumps(own))
        until = time.monotonic() + self._seconds
        return [self._read(name, rank, until) for rank in range(self._world)]

    def _read(self, name: str, rank: int, until: float) -> Any:
        key = self._key(name, rank)
        # A wait of no time at all would be one without end.
        left = timedelta(seconds=max(0.1, until - time.monotonic()))
        try:
            self._store.wait([key], left)
        except RuntimeError:
            return None
        return json.loads(self._store.get(key))

    def _key(self, name: str, rank: int) -> str:
        return f"doctor/{name}/{rank}"
