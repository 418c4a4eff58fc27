"""A forward that no whole backward will follow on this rank, while other ranks wait for that backward.

Note [Which wrapper to tell]. A rank whose forward or backward raised has to tell the others, by collectives
of the wrapper whose step they wait in. If the group has several wrappers, it cannot know which one that is:
after ``D(G(z).detach())`` the others wait in D, after ``D(G(z))`` in G. So it looks at their notes, which say
what they wait for, and tells them there. The rank has an exception to raise, so it does not look for long.
What is left is done when a wrapper of the group is used next.

Note [Forwards without a backward]. A rank may also have caught an exception between forward and backward, for
example in the loss, and go on with the next batch. Then its next forward comes while the others wait for the
backward of the last one. Two forwards before one backward are allowed, so this rank looks again whether the
others wait. They do not if they call forward a second time too, or have raised.

Note [Points]. A rank that has come to a point may be past it when another looks: all ranks have lost a
forward there, so nobody was told, and it has lost another one since. As every step is one of all ranks, it
cannot have passed the point otherwise.
"""

import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

from paceline.comm.group import Group
from paceline.ddp.reducer.step_report import StepOutcome
from paceline.ddp.reducer.user_counts import UserCounts

# How often other ranks' notes are read, in seconds.
_LOOK_EVERY = 0.05

# For each wrapper, by name, the number of its step, and perhaps of forwards since its last step.
Point = Mapping[str, Sequence[int]]


class TellsOfLoss(Protocol):
    """A reducer, as far as it is needed here."""

    step_number: int
    counts: UserCounts

    @property
    def group(self) -> Group:
        """Its ranks."""

    def is_awaited(self) -> bool:
        """Whether another rank waits for its step."""

    def are_buffers_awaited(self) -> bool:
        """Whether another rank waits for its module buffers."""

    def send_buffers(self) -> None:
        """Take part in the others' broadcast of module buffers, if this rank has not."""

    def give_up(self, outcome: StepOutcome, reason: str | None) -> None:
        """Tell the other ranks that its step is lost."""

    def drop(self, *, counts: bool = False) -> None:
        """Forget its step, without telling the other ranks."""


class LookResult(Enum):
    """What a look at the other ranks has shown."""

    A_RANK_WAITS = auto()
    NOBODY_WAITS = auto()
    UNKNOWN = auto()


class LostForward:
    """Finds out in which wrapper's step other ranks wait, and tells them there that it is lost.

    Args:
        reducers: those of the group that were used lately, in the order in which they were made.
        outcome: how the forward was lost.
        reason: why, in words; None if the running backward is about to raise it.
    """

    def __init__(self, reducers: Sequence[TellsOfLoss], outcome: StepOutcome, reason: str | None) -> None:
        self._reducers = reducers
        self._outcome = outcome
        self._reason = reason
        self._notes = reducers[0].group.group_notes
        # Ranks that raise need not have come equally far in their steps; those that call forward again have.
        self._raised = outcome is not StepOutcome.ABANDONED
        self._point = {
            each.group.wrapper: [each.step_number]
            if self._raised
            else [each.step_number, each.counts.forwards]
            for each in reducers
        }
        self._notes.note_lost_forward(self._point, raised=self._raised)
        for each in reducers:
            each.group.peer_notes.begin_looking()

    def settle(self, seconds: float) -> LookResult:
        """Look for ranks that wait, and tell them; for some seconds at most."""
        until = time.monotonic() + seconds
        while True:
            waited_for = next((each for each in self._reducers if each.is_awaited()), None)
            if waited_for is not None:
                self._tell(waited_for)
                return LookResult.A_RANK_WAITS
            for each in self._reducers:
                if each.are_buffers_awaited():  # the others go on to the step in which they are told
                    each.send_buffers()
            if self._have_all_come():
                return LookResult.NOBODY_WAITS
            if time.monotonic() > until:
                self._reason = self._reason or "an exception"  # by then it has been raised
                return LookResult.UNKNOWN
            time.sleep(_LOOK_EVERY)

    def _have_all_come(self) -> bool:
        """Whether no other rank will wait, because all have lost a forward at this point."""
        come = [has_come(theirs, self._point) for theirs in self._notes.lost_forwards(raised=True)]
        if not self._raised:
            repeated = self._notes.lost_forwards(raised=False)
            come = [
                each or has_come(theirs, self._point) for each, theirs in zip(come, repeated, strict=True)
            ]
        return all(come)

    def drop_all(self) -> None:
        """Every rank has lost its forward, so nobody is told; all count the steps as lost."""
        for reducer in self._reducers:
            reducer.drop(counts=True)

    def _tell(self, reducer: TellsOfLoss) -> None:
        for other in self._reducers:
            if other is not reducer:
                other.drop()
        reducer.send_buffers()
        reducer.give_up(self._outcome, self._reason)


def has_come(theirs: Point, point: Point) -> bool:
    """Whether a rank has come to a point, by its last note: see Note [Points].

    It may have wrappers of which only it knows. A note without one of ours is of an earlier time.
    """
    return all(name in theirs and _is_at(theirs[name], own) for name, own in point.items())


def _is_at(theirs: Sequence[int], own: Sequence[int]) -> bool:
    """Whether the numbers are the same or later; a note of an exception does not tell of forwards."""
    return [*theirs] >= [*own][: len(theirs)]
