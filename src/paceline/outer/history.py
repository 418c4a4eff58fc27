"""What a host has decided so far, and how it is told from what others have. Pure, as rounds.py is."""

import hashlib
from collections.abc import Mapping

from paceline.outer.round_parts import Fields

# Ends of the history that a greeting tells.
TAIL = 32


class History:
    """The rounds that a host has decided, by digests.

    Args:
        beginning: what hosts say that began with the same state.

    Attributes:
        decided: how many rounds are decided.
        total: how many changes count in them.
    """

    def __init__(self, beginning: str) -> None:
        self.decided = self.total = 0
        self._tail: dict[int, str] = {0: beginning}

    @property
    def fields(self) -> Fields:
        """What another host needs to go on from it."""
        return {"decided": self.decided, "total": self.total, "tail": [*self._tail.items()]}

    def add(self, digests: Mapping[int, str]) -> None:
        """One more round is decided: the digest of each change that counts, by host."""
        words = f"{self._tail[self.decided]} {[*digests.items()]}".encode()
        self.decided += 1
        self.total += len(digests)
        self._tail[self.decided] = hashlib.sha256(words).hexdigest()[:16]
        self._tail.pop(self.decided - TAIL, None)

    def take(self, fields: Fields) -> None:
        """Go on from another host's."""
        self.decided, self.total, self._tail = fields["decided"], fields["total"], _tail_of(fields)

    def agrees_with(self, fields: Fields) -> bool:
        """Whether another host's is the same, as far as both go."""
        theirs = _tail_of(fields)
        common = theirs.keys() & self._tail.keys()
        return bool(common) and all(theirs[number] == self._tail[number] for number in common)

    def includes(self, fields: Fields) -> bool:
        """Whether another host's is the same as this one, or as how this one began."""
        number = fields["decided"]
        return number in self._tail and _tail_of(fields).get(number) == self._tail[number]


def _tail_of(fields: Fields) -> dict[int, str]:
    return {int(number): str(digest) for number, digest in fields["tail"]}
