"""Whether ranks are in the same step of the user's loop. Pure: no tensors here.

Every rank tells in its step report how often the user has called forward, stepped an optimizer and taken
a batch from a data loader since the last step. If a rank has left out a batch, or repeats one, some of these
differ, though collectives still match: then ranks average gradients of different steps.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# After this many steps with as many forwards on all ranks, that number counts as usual.
_STEPS_UNTIL_USUAL = 2
# A rank that left out a batch has taken at least this many times the batches of the others.
_LEFT_OUT = 1.5


class StepCounts(NamedTuple):
    """What the user has done on one rank since the last step.

    Attributes:
        through_forward: whether there was any synced forward of the wrapper, in grad mode.
        forwards: the number of those in training mode.
        optimizer_steps: steps of optimizers that have parameters of the wrapper.
        batches: batches that a data loader gave.
    """

    through_forward: bool = False
    forwards: int = 0
    optimizer_steps: int = 0
    batches: int = 0


class Pairing:
    """Compares the counts of all ranks, step by step.

    Attributes:
        usual_forwards: the number of forwards per step, if it was the same on all ranks for some steps.
        without_inputs: ranks that had none in the last step, under ``join``, and so stepped no optimizer.
    """

    def __init__(self) -> None:
        self.usual_forwards: int | None = None
        self.without_inputs: frozenset[int] = frozenset()
        self._most_forwards = 0
        self._equal_steps = 0
        # What all ranks took in the last step, if it was the same.
        self._last_batches: int | None = None
        self._told: set[str] = set()

    def are_equal(self, counts: Sequence[StepCounts]) -> bool:
        """Whether all ranks have the same counts, as in most steps."""
        if len({*counts}) > 1:
            return False
        self._learn_forwards({counts[0].forwards})
        self._last_batches = counts[0].batches
        return True

    def refusal(self, counts: Mapping[int, StepCounts]) -> str | None:
        """Why a step of these ranks is none, in words; None if it is one.

        A backward that did not go through forward is synced if all ranks run one. If only some do, it is
        theirs alone, and would be averaged with a step of the others.
        """
        outside = [rank for rank, own in counts.items() if not own.through_forward]
        if not 0 < len(outside) < len(counts):
            return None
        return (
            f"the backward of {_named(outside)} did not go through the wrapper's forward, and those of the "
            "other ranks did; a backward of one rank alone belongs into `with ddp.no_sync():`"
        )

    def differences(self, counts: Mapping[int, StepCounts]) -> list[str]:
        """What differs between these ranks, in words; each kind once per rank."""
        counts = {rank: own for rank, own in counts.items() if rank not in self.without_inputs} or counts
        self._learn_forwards({own.forwards for own in counts.values()})
        found = [
            *_different("called forward", "times", {rank: own.forwards for rank, own in counts.items()}),
            *_different(
                "stepped optimizers", "times", {rank: own.optimizer_steps for rank, own in counts.items()}
            ),
            *self._left_out({rank: own.batches for rank, own in counts.items()}),
        ]
        new = [text for key, text in found if key not in self._told]
        self._told.update(key for key, _ in found)
        return new

    def _learn_forwards(self, numbers: set[int]) -> None:
        self._equal_steps = self._equal_steps + 1 if len(numbers) == 1 else 0
        self._most_forwards = max(self._most_forwards, *numbers)
        self.usual_forwards = self._most_forwards if self._equal_steps >= _STEPS_UNTIL_USUAL else None

    def _left_out(self, batches: Mapping[int, int]) -> list[tuple[str, str]]:
        usual = sorted(batches.values())[(len(batches) - 1) // 2]
        last, self._last_batches = self._last_batches, usual if len({*batches.values()}) == 1 else None
        if last is None or not usual:
            return []
        ahead = [rank for rank, taken in batches.items() if taken >= _LEFT_OUT * max(usual, last)]
        if not ahead:
            return []
        took = min(batches[rank] for rank in ahead)
        return [
            (
                f"took {ahead}",
                f"{_named(ahead)} took {took} batches from a data loader since the last step, and the "
                f"others {usual}",
            )
        ]


def _different(verb: str, unit: str, numbers: Mapping[int, int]) -> list[tuple[str, str]]:
    """A key of who differs in what, and the same as text; nothing if all numbers are equal."""
    if len({*numbers.values()}) <= 1:
        return []
    by_number: dict[int, list[int]] = {}
    for rank, number in numbers.items():
        by_number.setdefault(number, []).append(rank)
    # Most ranks are right.
    usual = max(by_number, key=lambda number: len(by_number[number]))
    odd = [rank for rank, number in numbers.items() if number != usual]
    parts = [
        f"{_named(ranks)} {number} {unit if number != 1 else unit.removesuffix('s')}"
        for number, ranks in sorted(by_number.items())
    ]
    return [(f"{verb} {odd}", f"ranks {verb} differently often since the last step: {', '.join(parts)}")]


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
