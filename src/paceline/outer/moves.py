"""What this host's parameters are still to move by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Move:
    """What this host's parameters of a fragment move by.

    Attributes:
        fragment: which one.
        by: the difference.
        at: the step from which on it is used.
        replaces: whether the parameters become ``by`` instead, as those of a host that joins do.
    """

    fragment: int
    by: Tensor
    at: int
    replaces: bool = False


class Moves:
    """Moves that training has not made yet, in their order."""

    def __init__(self) -> None:
        self._waiting: list[Move] = []
        self._due: list[Move] = []

    def due(self, step: int) -> dict[int, Move]:
        """What is to be made in a step, by fragment; it stays due until it was used."""
        self._due = [move for move in self._waiting if move.at <= step]
        return _together(self._due)

    def used(self, fragment: int) -> None:
        """What was due for a fragment has been made."""
        used = [move for move in self._due if move.fragment == fragment]
        self._waiting = [move for move in self._waiting if move not in used]

    def applied_to(self, own: Tensor, fragment: int) -> Tensor:
        """Parameters of a fragment, as if they had already made all of its moves; changes them in place."""
        for move in self._waiting:
            if move.fragment == fragment and move.replaces:
                own.copy_(move.by)
            elif move.fragment == fragment:
                own.add_(move.by)
        return own

    def add(self, move: Move, *, step: int) -> None:
        """Have one more move; those that the next step would make at once become one.

        While training does not step, such as in a long evaluation, their number would grow without limit.
        """
        self._waiting.append(move)
        waiting = [
            each
            for each in self._waiting
            if each.fragment == move.fragment and each.at <= step + 1 and each not in self._due
        ]
        if len(waiting) > 1:
            first, *others = waiting
            merged = _together(waiting)[move.fragment]
            moves = [each for each in self._waiting if each not in others]
            self._waiting = [merged if each is first else each for each in moves]

    def put(self, move: Move) -> None:
        """Have a move in place of all others of its fragment."""
        self._waiting = [each for each in self._waiting if each.fragment != move.fragment]
        self._waiting.append(move)

    def state(self) -> list[tuple[int, Tensor, int, bool]]:
        """All that another process needs to go on."""
        return [(move.fragment, move.by.clone(), move.at, move.replaces) for move in self._waiting]

    def take(self, state: Sequence[Any]) -> None:
        """Go on from a state."""
        self._waiting = [Move(number, by.clone(), *more) for number, by, *more in state]


def _together(moves: Sequence[Move]) -> dict[int, Move]:
    """One move per fragment that does what these do one after the other."""
    together: dict[int, Move] = {}
    for move in moves:
        before = together.get(move.fragment)
        if before is not None and not move.replaces:
            move = replace(before, by=before.by + move.by)
        together[move.fragment] = move
    return together
