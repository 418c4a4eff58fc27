"""Several wrappers on one group take turns, so that every rank issues their collectives in one order.

Each reducer alone issues the same collectives on every rank. Two in one backward could still mix them in
another order on each rank, because what arrives when depends on what a rank uses. So while another reducer
of the group has a forward without a backward, no bucket is launched before the end of backward, and there
the reducers go one after the other, in the order in which they were made.

Note [Lost with one]. A rank that has lost a forward does not know which wrappers would have been in the
backward that the others wait in. So with one step all reducers of the group lose their gradients, on every
rank alike. If each rank dropped what it knows of, an optimizer might step on some ranks only.
"""

import contextlib
import inspect
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from paceline.comm.group import Group
from paceline.ddp.reducer.autograd_hooks import at_end_of_backward, current_backward
from paceline.ddp.reducer.lost_forward import LookResult, LostForward
from paceline.ddp.reducer.step_report import StepOutcome
from paceline.ddp.reducer.user_counts import UserCounts
from paceline.watch.stacks import stack_of, users_line

# Wrappers are used together if one is used during so many forwards of the other: a GAN's generator may be
# used in a few steps only. One that is not used any more, and still lives, is none of them.
_FORWARDS_TOGETHER = 8
# How long a rank that has an exception to raise looks for ranks that wait for it, in seconds.
_TELL_SECONDS = 5.0
# How long a rank that calls forward again looks for ranks that wait for a backward, in seconds. Those that
# wait say so after two seconds. If nobody does, they may wait for this rank in a collective of the user.
_REPEAT_SECONDS = 30.0


class TakesTurns(Protocol):
    """A reducer, as far as it is needed here; reducer.py imports this file."""

    step_number: int
    counts: UserCounts
    # What its step ended with before its user ended it. Not kept here: its traceback leads to the reducer.
    unraised: BaseException | None

    @property
    def group(self) -> Group:
        """Its ranks."""

    @property
    def is_syncing(self) -> bool:
        """Whether its backward has begun a step; otherwise it only accumulates."""

    @property
    def is_launched(self) -> bool:
        """Whether all its buckets are launched, and ``finalize`` ends the step."""

    @property
    def is_nested(self) -> bool:
        """Whether another wrapper averages the same gradients, perhaps in another group."""

    def end_shared_backward(self) -> None:
        """Note when a backward ended that other reducers took part in."""

    def finish(self) -> None:
        """End its part of a backward: average the gradients or launch them, if it is syncing."""

    def finalize(self) -> None:
        """End a step that is launched."""

    def follow_up(self) -> None:
        """Do what follows a step that has ended well; what this raises does not lose the step."""

    def give_up(self, outcome: StepOutcome, reason: str | None) -> None:
        """Tell the other ranks that its step is lost; the running backward is about to raise if None."""

    def drop(self, *, counts: bool = False) -> None:
        """Forget its step, without telling the other ranks; ``counts`` if they count it as a step too."""

    def is_awaited(self) -> bool:
        """Whether another rank waits for its step."""

    def are_buffers_awaited(self) -> bool:
        """Whether another rank waits for its module buffers."""

    def send_buffers(self) -> None:
        """Take part in the others' broadcast of module buffers, if this rank has not."""

    def note_lost_backward(self) -> None:
        """Its backward raised; what it has accumulated so far stays."""


class GroupTurns:
    """The reducers of one group, in the order in which they were made."""

    def __init__(self) -> None:
        self._reducers: list[weakref.ref[TakesTurns]] = []
        # Those with a forward since the last synced backward.
        self._expected: weakref.WeakSet[TakesTurns] = weakref.WeakSet()
        # Those at work, by backward; not weak, because a backward may outlive the wrapper.
        self._at_work: dict[int, list[TakesTurns]] = {}
        # Those whose users have to end the step, which may have ended without them.
        self._unfinalized: weakref.WeakSet[TakesTurns] = weakref.WeakSet()
        # Counts all reducers and their forwards; for each one the numbers of its last forwards.
        self._uses = 0
        self._used: weakref.WeakKeyDictionary[TakesTurns, deque[int]] = weakref.WeakKeyDictionary()
        # What other ranks have to be told before anything else.
        self._untold: LostForward | None = None

    def join(self, reducer: TakesTurns) -> None:
        """Add a reducer."""
        self._reducers.append(weakref.ref(reducer))
        self._uses += 1
        self._used[reducer] = deque([self._uses], maxlen=_FORWARDS_TOGETHER)

    def leave(self, reducer: TakesTurns) -> None:
        """Remove a reducer."""
        self._reducers = [known for known in self._reducers if known() not in (None, reducer)]
        self._expected.discard(reducer)

    def is_expected(self, reducer: TakesTurns) -> bool:
        """Whether a forward of the reducer has no backward yet."""
        return reducer in self._expected

    def expect(self, reducer: TakesTurns) -> None:
        """Note that a forward was called whose backward will be synced."""
        self._expected.add(reducer)
        self._uses += 1
        self._used[reducer].append(self._uses)

    def expect_no_more(self, reducer: TakesTurns) -> None:
        """Note that a reducer's step is over."""
        self._expected.discard(reducer)

    def is_shared(self, reducer: TakesTurns) -> bool:
        """Whether another reducer may have collectives to issue in the same backward."""
        return any(other is not reducer for other in self._expected)

    def begin(self, reducer: TakesTurns) -> None:
        """Call the reducer's ``finish`` when the running backward has ended."""
        backward = current_backward()
        if backward not in self._at_work:
            at_end_of_backward(partial(self._end, backward), partial(self._lose, backward))
        self._at_work.setdefault(backward, []).append(reducer)

    def is_at_work(self, reducer: TakesTurns) -> bool:
        """Whether a backward in which the reducer has begun something still runs."""
        return any(reducer in at_work for at_work in self._at_work.values())

    def finish_inside_backward(self, reducer: TakesTurns) -> None:
        """The user ends a step while its backward still runs: launch it now, for ``finalize``."""
        reducer.finish()
        self._expected.discard(reducer)
        self._unfinalized.add(reducer)

    def awaits_finalize(self, reducer: TakesTurns) -> bool:
        """Whether the user has to end the reducer's step before anything else."""
        return reducer in self._unfinalized

    def finalize(self, reducer: TakesTurns) -> None:
        """End the reducer's step, if it has not ended yet; raises what it ended with."""
        self.finish_launched()
        self._unfinalized.remove(reducer)
        if reducer.unraised is not None:
            try:
                raise reducer.unraised
            finally:
                reducer.unraised = None

    def finish_launched(self) -> BaseException | None:
        """End the step that its user has not ended yet, so that this rank can issue other collectives.

        What it ends with is for its user, who ends the step later. Returns the error if the step is lost, on
        every rank alike.
        """
        # There is one at most, because it ends before another is launched.
        for reducer in [each for each in self._unfinalized if each.is_launched]:
            try:
                reducer.finalize()
            except BaseException as error:
                reducer.unraised = error
                return error
            try:
                reducer.follow_up()
            except BaseException as error:  # the step has ended well, and other steps go on
                reducer.unraised = error
        return None

    def drop_others(self, *reducers: TakesTurns) -> None:
        """A step of one of these reducers is lost: see Note [Lost with one]."""
        for other in self._known():
            if other not in reducers and not other.is_launched:
                other.drop()

    def fail_forward(self, reducer: TakesTurns, reason: str) -> None:
        """A forward raised: no backward will come, neither for it nor for those that wait for theirs."""
        self._fail([reducer], StepOutcome.RAISED_IN_FORWARD, reason)

    def finish_telling(self, group: Group) -> None:
        """Before anything else, tell other ranks of a forward that was lost here, if they were not told."""
        if self._untold is not None:
            self._tell_of_loss(group.timeout.total_seconds())

    def _tell_of_loss(self, seconds: float) -> None:
        assert self._untold is not None
        found = self._untold.settle(seconds)
        if found is LookResult.NOBODY_WAITS:
            self._untold.drop_all()
        if found is not LookResult.UNKNOWN:
            self._untold = None

    def abandon_forward(self, reducer: TakesTurns) -> bool:
        """Forward is called again without a backward: tell other ranks if they wait for that backward.

        Returns:
            Whether to look at the next forward too: all ranks have called forward again.
        """
        line = users_line(stack_of(inspect.currentframe()))
        reason = (
            f"called forward again without a backward ({line}), while others wait for that backward; if it "
            "skips a batch, use skip(), and call forward under torch.no_grad() if no backward is to follow, "
            "as it did"
        )
        used = self._used_with([reducer])
        lost = LostForward(used, StepOutcome.ABANDONED, reason)
        found = lost.settle(min(reducer.group.timeout.total_seconds(), _REPEAT_SECONDS))
        if found is LookResult.A_RANK_WAITS:
            self.drop_others(*used)
        return found is LookResult.NOBODY_WAITS

    def _end(self, backward: int) -> None:
        """End a backward, one reducer after the other; if one fails, the rest fail on every rank alike."""
        failed: BaseException | None = None
        ended: list[TakesTurns] = []
        at_work = self._in_order(self._at_work.pop(backward))
        if any(reducer.is_syncing for reducer in at_work):
            self._expected.clear()
        if len(at_work) > 1:
            for reducer in at_work:  # before the first of them waits for other ranks
                reducer.end_shared_backward()
        for reducer in at_work:
            is_syncing = reducer.is_syncing
            if is_syncing:
                failed = failed or self.finish_launched()
            if failed is not None and is_syncing:
                reducer.drop()
                continue
            try:
                reducer.finish()
            except BaseException as error:  # raised below, when the others are done
                failed = failed or error
            else:
                if reducer.is_launched:
                    self._unfinalized.add(reducer)
                    if reducer.is_nested:  # the other wrapper reads ``.grad`` next
                        failed = failed or self.finish_launched()
                elif is_syncing:
                    ended.append(reducer)
        for reducer in ended:
            try:
                reducer.follow_up()
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # or the error, its traceback and this frame would keep each other alive

    def _lose(self, backward: int) -> None:
        """A backward raised."""
        at_work = self._at_work.pop(backward)
        syncing = [reducer for reducer in at_work if reducer.is_syncing]
        for reducer in at_work:
            reducer.note_lost_backward()
        # That exception is on its way; if the group is gone too, it says more than a second one.
        with contextlib.suppress(Exception):
            if syncing:
                self._fail(syncing, StepOutcome.RAISED_IN_BACKWARD, None)

    def _fail(self, reducers: Sequence[TakesTurns], outcome: StepOutcome, reason: str | None) -> None:
        """Tell the other ranks by the step that they wait in; they drop the rest, as we do."""
        self.finish_launched()  # or this rank would be a step behind others that have ended it
        used, group = self._used_with(reducers), reducers[0].group
        if len(used) > 1 and group.group_notes.can_be_left and not group.may_change:
            self.drop_others(*used)
            self._untold = LostForward(used, outcome, reason)
            self._tell_of_loss(_TELL_SECONDS)
            return
        first = self._in_order(reducers)[0]
        self.drop_others(first)
        first.give_up(outcome, reason)

    def _in_order(self, reducers: Sequence[TakesTurns]) -> list[TakesTurns]:
        return [reducer for reducer in self._known() if reducer in reducers]

    def _used_with(self, reducers: Sequence[TakesTurns]) -> list[TakesTurns]:
        """These, and those with a forward among the last ones of the first: others wait in one of them."""
        since = self._used[reducers[0]][0]
        return [each for each in self._known() if each in reducers or self._used[each][-1] >= since]

    def _known(self) -> list[TakesTurns]:
        return [reducer for reference in self._reducers if (reducer := reference()) is not None]


# By process group and not by name: a group that is made after another was destroyed may have its name.
_turns: "weakref.WeakKeyDictionary[Any, GroupTurns]" = weakref.WeakKeyDictionary()


def turns_of(process_group: Any) -> GroupTurns:
    """The turns of this rank's reducers in a process group."""
    return _turns.setdefault(process_group, GroupTurns())
