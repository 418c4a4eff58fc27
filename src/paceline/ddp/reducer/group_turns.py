"""Several wrappers on one group: their collectives go in one order on every rank.

Each reducer alone issues the same collectives on every rank. Two in one backward could still mix them in
another order on each rank, because what arrives when depends on what a rank uses. So while another reducer
of the group has a forward without a backward, nothing leaves before the end of backward, and there they go
one after the other, in the order in which they were made.
"""

import weakref
from collections.abc import Sequence
from typing import Protocol

from paceline.ddp.reducer.step_report import Outcome


class Member(Protocol):
    """What a lane knows of a reducer.

    Attributes:
        expected: whether a forward was called since the last backward of the lane.
    """

    expected: bool

    def is_in(self, backward: int) -> bool:
        """Whether it has begun a step in that backward."""

    def finish(self) -> None:
        """End its step."""

    def follow_up(self) -> None:
        """Do what follows a step that has ended well, on this rank alone."""

    def give_up(self, outcome: Outcome, reason: str) -> None:
        """Tell the other ranks that its step is lost."""

    def drop(self) -> None:
        """Forget its step without a word to the other ranks."""


class Lane:
    """The reducers of one group, in the order in which they were made."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[Member]] = []

    def join(self, member: Member) -> None:
        """Add a reducer."""
        self._members.append(weakref.ref(member))

    def leave(self, member: Member) -> None:
        """Take a reducer out."""
        self._members = [known for known in self._members if known() not in (None, member)]

    def is_shared(self, member: Member) -> bool:
        """Whether another reducer may have collectives to issue in the same backward."""
        return any(other.expected for other in self._alive() if other is not member)

    def fail(self, members: Sequence[Member], outcome: Outcome, reason: str) -> None:
        """Have the first reducer that the other ranks will finish tell them; they drop the rest, as do we."""
        first, *others = [member for member in self._alive() if member in members]
        for member in others:
            member.drop()
        first.give_up(outcome, reason)

    def fail_forward(self, member: Member, reason: str) -> None:
        """A forward raised: what was expected of the lane's next backward will not come."""
        members = [other for other in self._alive() if other is member or other.expected]
        self.fail(members, Outcome.RAISED_IN_FORWARD, reason)

    def fail_backward(self, backward: int) -> None:
        """A backward raised."""
        if members := [member for member in self._alive() if member.is_in(backward)]:
            self.fail(members, Outcome.RAISED_IN_BACKWARD, "an exception")

    def finish(self, backward: int) -> None:
        """End every step of a backward, in order; once one has failed the rest fail on every rank alike."""
        failed: BaseException | None = None
        for member in self._alive():
            member.expected = False
        ended = []
        for member in [member for member in self._alive() if member.is_in(backward)]:
            if failed is not None:
                member.drop()
                continue
            try:
                member.finish()
                ended.append(member)
            except BaseException as error:  # raised below, when the others are done
                failed = error
        for member in ended:
            try:
                member.follow_up()
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # or the error, its traceback and this frame would keep each other alive

    def _alive(self) -> list[Member]:
        return [member for known in self._members if (member := known()) is not None]


_lanes: dict[str, Lane] = {}


def lane_of(group_name: str) -> Lane:
    """The lane of a group, by the name that all ranks know it by."""
    return _lanes.setdefault(group_name, Lane())
