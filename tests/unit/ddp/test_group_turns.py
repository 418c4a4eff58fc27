import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paceline.ddp.reducer import group_turns
from paceline.ddp.reducer.group_turns import GroupTurns, turns_of
from paceline.ddp.reducer.step_report import StepOutcome
from paceline.testing import ScriptedGroup


class StandIn:
    """Notes what is done to it, in a log that several share."""

    def __init__(
        self,
        name: str,
        log: list[str],
        *,
        is_syncing: bool = True,
        fails: str = "",
        is_manual: bool = False,
        group: ScriptedGroup | None = None,
        is_awaited: bool = False,
    ) -> None:
        self.group = group or ScriptedGroup(size=1)
        self.awaited = is_awaited
        self.step_number = 0
        self.counts = SimpleNamespace(forwards=0)
        self.name = name
        self.is_syncing = is_syncing
        self.is_launched = False
        self.is_nested = False
        self.unraised: BaseException | None = None
        # What had been done to all when its backward ended; None if it had the backward for itself.
        self.ended_after: list[str] | None = None
        self._log = log
        self._fails = fails
        self._is_manual = is_manual

    def end_shared_backward(self) -> None:
        self.ended_after = [*self._log]

    def finish(self) -> None:
        self._note("finish")
        self.is_launched = self.is_syncing and self._is_manual
        self.is_syncing = False

    def finalize(self) -> None:
        self.is_launched = False
        self._note("finalize")

    def follow_up(self) -> None:
        self._note("follow_up")

    def give_up(self, outcome: StepOutcome, reason: str | None) -> None:
        self._note("give_up", outcome.name, reason or "what backward raises")

    def drop(self, *, counts: bool = False) -> None:
        self.is_syncing = False
        self._note("drop", *["counted"] * counts)

    def is_awaited(self) -> bool:
        return self.awaited

    def are_buffers_awaited(self) -> bool:
        return False

    def send_buffers(self) -> None:
        pass

    def note_lost_backward(self) -> None:
        self._note("note_lost_backward")

    def _note(self, what: str, *more: str) -> None:
        self._log.append(" ".join((self.name, what, *more)))
        if what == self._fails:
            raise ValueError(self.name)


def group_of(*reducers: StandIn) -> GroupTurns:
    turns = GroupTurns()
    for reducer in reducers:
        turns.join(reducer)
    return turns


def backward(*hooks: Callable[[], object]) -> None:
    """A real backward that calls the hooks one after the other, the first of them first."""

    def call(hook: Callable[[], object], _: Tensor) -> None:
        hook()

    with torch.enable_grad():
        value = torch.ones((), requires_grad=True)
        for hook in reversed(hooks):
            value = value * 2
            value.register_hook(partial(call, hook))
        value.backward()


def begin(turns: GroupTurns, *reducers: StandIn) -> Callable[[], None]:
    def hook() -> None:
        for reducer in reducers:
            turns.begin(reducer)

    return hook


def fail() -> None:
    raise ZeroDivisionError("planned")


def test_reducers_finish_in_the_order_in_which_they_were_made() -> None:
    log: list[str] = []
    first, second = StandIn("first", log), StandIn("second", log)
    turns = group_of(first, second)
    backward(begin(turns, second), lambda: log.append("between"), begin(turns, first))
    assert log == ["between", "first finish", "second finish", "first follow_up", "second follow_up"]


def test_a_backward_that_several_share_ends_for_all_before_the_first_finishes() -> None:
    log: list[str] = []
    first, second, alone = (StandIn(name, log) for name in ("first", "second", "alone"))
    turns = group_of(first, second, alone)
    backward(begin(turns, second, first))
    assert first.ended_after == second.ended_after == []
    backward(begin(turns, alone))
    assert alone.ended_after is None


def test_only_those_at_work_finish_and_only_those_in_sync_follow_up() -> None:
    log: list[str] = []
    first, idle, last = StandIn("first", log, is_syncing=False), StandIn("idle", log), StandIn("last", log)
    turns = group_of(first, idle, last)
    backward(begin(turns, first, last))
    assert log == ["first finish", "last finish", "last follow_up"]


def test_each_backward_ends_its_own() -> None:
    log: list[str] = []
    first, second = StandIn("first", log), StandIn("second", log)
    turns = group_of(first, second)
    backward(begin(turns, first), lambda: backward(begin(turns, second)), lambda: log.append("outer"))
    assert log == ["second finish", "second follow_up", "outer", "first finish", "first follow_up"]


def test_if_one_fails_those_after_it_are_dropped_and_those_before_it_follow_up() -> None:
    log: list[str] = []
    reducers = [
        StandIn("first", log),
        StandIn("second", log, fails="finish"),
        StandIn("third", log),
        StandIn("fourth", log, is_syncing=False),
    ]
    turns = group_of(*reducers)
    with pytest.raises(ValueError, match="second"):
        backward(begin(turns, *reducers))
    assert log == ["first finish", "second finish", "third drop", "fourth finish", "first follow_up"]


def test_a_follow_up_that_fails_keeps_none_of_the_others_from_theirs() -> None:
    log: list[str] = []
    reducers = [StandIn("first", log, fails="follow_up"), StandIn("second", log)]
    turns = group_of(*reducers)
    with pytest.raises(ValueError, match="first"):
        backward(begin(turns, *reducers))
    assert log[2:] == ["first follow_up", "second follow_up"]


def test_an_error_keeps_nothing_alive(no_gc: None) -> None:  # noqa: ARG001  # a fixture
    reducer = StandIn("first", [], fails="finish")
    turns = group_of(reducer)
    with pytest.raises(ValueError, match="first"):
        backward(begin(turns, reducer))
    is_alive = weakref.ref(reducer)
    del reducer
    assert is_alive() is None


def test_a_backward_is_shared_while_another_one_is_expected() -> None:
    log: list[str] = []
    first, second = StandIn("first", log), StandIn("second", log)
    turns = group_of(first, second)
    assert not turns.is_shared(first)
    turns.expect(first)
    assert not turns.is_shared(first)
    assert turns.is_shared(second)
    turns.expect_no_more(first)
    assert not turns.is_shared(second)


@pytest.mark.parametrize("is_syncing", [True, False])
def test_a_synced_backward_ends_all_expectations(is_syncing: bool) -> None:
    log: list[str] = []
    first, second = StandIn("first", log, is_syncing=is_syncing), StandIn("second", log)
    turns = group_of(first, second)
    turns.expect(second)
    backward(begin(turns, first))
    assert turns.is_shared(first) != is_syncing


def test_a_reducer_that_is_gone_or_has_left_is_not_expected() -> None:
    log: list[str] = []
    first, second, third = (StandIn(name, log) for name in ("first", "second", "third"))
    turns = group_of(first, second, third)
    turns.expect(second)
    turns.expect(third)
    del second
    turns.leave(third)
    assert not turns.is_shared(first)
    backward(begin(turns, first, third))
    assert log == ["first finish", "first follow_up"]


def wrappers_of(group: ScriptedGroup, log: list[str], awaited: str = "") -> list[StandIn]:
    return [
        StandIn(name, log, group=group, is_awaited=name == awaited) for name in ("first", "second", "third")
    ]


@pytest.mark.parametrize("raised", ["first", "second", "third"])
@pytest.mark.parametrize("awaited", ["first", "second", "third"])
def test_a_forward_that_raised_is_told_by_the_one_that_others_wait_for(raised: str, awaited: str) -> None:
    log: list[str] = []
    reducers = wrappers_of(ScriptedGroup(), log, awaited)
    turns = group_of(*reducers)
    for reducer in reducers:
        turns.expect(reducer)
    turns.fail_forward(next(each for each in reducers if each.name == raised), "ValueError()")
    others = [f"{each.name} drop" for each in reducers if each.name != awaited]
    assert log == [*others, f"{awaited} give_up RAISED_IN_FORWARD ValueError()"]


def test_if_no_rank_waits_because_all_have_raised_nobody_is_told() -> None:
    log: list[str] = []
    group = ScriptedGroup()
    group.notes_of(1).note_lost_forward({"": [0]}, raised=True)
    reducers = wrappers_of(group, log)
    turns = group_of(*reducers)
    for reducer in reducers:
        turns.expect(reducer)
    turns.fail_forward(reducers[1], "ValueError()")
    assert log == [f"{each.name} drop counted" for each in reducers]


def test_if_it_is_not_known_who_waits_the_others_are_told_before_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_turns, "_TELL_SECONDS", 0.0)
    log: list[str] = []
    group = ScriptedGroup()
    group.notes_of(1).note_lost_forward({"": [7]}, raised=True)  # of an earlier time
    reducers = wrappers_of(group, log)
    for reducer in reducers:
        reducer.step_number = 8
    turns = group_of(*reducers)
    for reducer in reducers:
        turns.expect(reducer)
    turns.fail_forward(reducers[1], "ValueError()")
    assert log == []
    reducers[2].awaited = True
    turns.finish_telling(group)
    turns.finish_telling(group)
    assert log == ["first drop", "second drop", "third give_up RAISED_IN_FORWARD ValueError()"]


@pytest.mark.parametrize("waits", [True, False])
def test_a_forward_that_is_called_again_is_told_only_if_others_wait(waits: bool) -> None:
    log: list[str] = []
    group = ScriptedGroup()
    reducer = StandIn("only", log, group=group, is_awaited=waits)
    turns = group_of(reducer)
    reducer.counts.forwards = 1
    if not waits:
        group.notes_of(1).note_lost_forward({"": [0, 1]}, raised=False)
    assert turns.abandon_forward(reducer) != waits
    assert [line.partition(" called")[0] for line in log] == ["only give_up ABANDONED"] * waits


def test_a_wrapper_that_is_used_no_more_does_not_delay_the_telling() -> None:
    log: list[str] = []
    group = ScriptedGroup()
    old, new = StandIn("old", log, group=group), StandIn("new", log, group=group)
    turns = group_of(old)
    turns.expect(old)
    turns.join(new)
    turns.fail_forward(new, "ValueError()")
    assert log == ["old drop", "new give_up RAISED_IN_FORWARD ValueError()"]


def test_a_forward_that_raised_in_the_only_wrapper_is_told_at_once() -> None:
    log: list[str] = []
    reducer = StandIn("only", log, group=ScriptedGroup())
    group_of(reducer).fail_forward(reducer, "ValueError()")
    assert log == ["only give_up RAISED_IN_FORWARD ValueError()"]


def test_a_backward_that_raises_is_told_by_the_one_that_others_wait_for() -> None:
    log: list[str] = []
    group = ScriptedGroup()
    reducers = [
        StandIn("first", log, is_syncing=False, group=group),
        StandIn("second", log, group=group, is_awaited=True),
        StandIn("third", log, group=group),
    ]
    turns = group_of(*reducers)
    with pytest.raises(ZeroDivisionError, match="planned"):
        backward(begin(turns, *reversed(reducers)), fail)
    noted, told = log[:3], log[3:]
    assert sorted(noted) == [f"{name} note_lost_backward" for name in ("first", "second", "third")]
    assert told == ["first drop", "third drop", "second give_up RAISED_IN_BACKWARD what backward raises"]


def test_a_backward_that_raises_and_is_not_synced_is_not_told() -> None:
    log: list[str] = []
    turns = group_of(reducer := StandIn("first", log, is_syncing=False))
    with pytest.raises(ZeroDivisionError, match="planned"):
        backward(begin(turns, reducer), fail)
    assert log == ["first note_lost_backward"]


def test_what_fails_while_a_lost_backward_is_told_does_not_hide_its_exception() -> None:
    log: list[str] = []
    turns = group_of(reducer := StandIn("first", log, fails="give_up"))
    with pytest.raises(ZeroDivisionError, match="planned"):
        backward(begin(turns, reducer), fail)
    assert log[-1] == "first give_up RAISED_IN_BACKWARD what backward raises"


def test_after_a_lost_backward_the_next_one_ends_as_ever() -> None:
    log: list[str] = []
    turns = group_of(reducer := StandIn("first", log))
    with pytest.raises(ZeroDivisionError):
        backward(begin(turns, reducer), fail)
    log.clear()
    backward(begin(turns, reducer))
    assert log == ["first finish", "first follow_up"]


def test_a_backward_may_outlive_the_wrapper() -> None:
    log: list[str] = []
    turns = GroupTurns()

    def begin_and_forget() -> None:
        reducer = StandIn("first", log)
        turns.join(reducer)
        turns.begin(reducer)

    backward(begin_and_forget)
    assert log == ["first finish", "first follow_up"]


def test_groups_take_turns_by_themselves() -> None:
    one, two = ScriptedGroup(name="one").process_group, ScriptedGroup(name="one").process_group
    assert turns_of(one) is turns_of(one)
    assert turns_of(one) is not turns_of(two)


def test_a_step_that_its_user_ends_is_only_launched_by_backward() -> None:
    log: list[str] = []
    manual = StandIn("manual", log, is_manual=True)
    turns = group_of(manual)
    backward(begin(turns, manual))
    assert log == ["manual finish"]
    assert turns.awaits_finalize(manual)
    turns.finalize(manual)
    assert log == ["manual finish", "manual finalize", "manual follow_up"]
    assert not turns.awaits_finalize(manual)


def test_such_a_step_ends_before_another_of_the_group_is_launched() -> None:
    log: list[str] = []
    first, second = StandIn("first", log, is_manual=True), StandIn("second", log, is_manual=True)
    turns = group_of(first, second)
    backward(begin(turns, second, first))
    assert log == ["first finish", "first finalize", "first follow_up", "second finish"]
    turns.finalize(second)
    assert log[4:] == ["second finalize", "second follow_up"]
    assert turns.awaits_finalize(first)
    turns.finalize(first)
    assert log[6:] == []
    assert not turns.awaits_finalize(first)


def test_its_error_is_for_its_user_and_loses_the_others_of_its_backward() -> None:
    log: list[str] = []
    first, second = StandIn("first", log, is_manual=True, fails="finalize"), StandIn("second", log)
    turns = group_of(first, second)
    with pytest.raises(ValueError, match="first"):
        backward(begin(turns, first, second))
    assert log == ["first finish", "first finalize", "second drop"]
    with pytest.raises(ValueError, match="first"):
        turns.finalize(first)
    assert not turns.awaits_finalize(first)


def test_what_follows_it_and_fails_on_this_rank_alone_loses_no_other() -> None:
    log: list[str] = []
    first, second = StandIn("first", log, is_manual=True, fails="follow_up"), StandIn("second", log)
    turns = group_of(first, second)
    backward(begin(turns, first, second))
    assert log == ["first finish", "first finalize", "first follow_up", "second finish", "second follow_up"]
    with pytest.raises(ValueError, match="first"):
        turns.finalize(first)


def test_a_nested_one_ends_with_its_backward_and_still_waits_for_its_user() -> None:
    log: list[str] = []
    nested = StandIn("nested", log, is_manual=True)
    nested.is_nested = True
    turns = group_of(nested)
    backward(begin(turns, nested))
    assert log == ["nested finish", "nested finalize", "nested follow_up"]
    assert turns.awaits_finalize(nested)
    turns.finalize(nested)
    assert log[3:] == []


def test_an_earlier_launched_step_ends_when_another_starts_and_its_error_waits() -> None:
    log: list[str] = []
    first = StandIn("first", log, is_manual=True, fails="finalize")
    turns = group_of(first)
    backward(begin(turns, first))
    error = turns.finish_launched()
    assert isinstance(error, ValueError)
    assert turns.finish_launched() is None
    with pytest.raises(ValueError, match="first"):
        turns.finalize(first)


def test_a_step_can_end_inside_its_backward() -> None:
    log: list[str] = []
    manual = StandIn("manual", log, is_manual=True)
    turns = group_of(manual)

    def finalize() -> None:
        assert turns.is_at_work(manual)
        turns.finish_inside_backward(manual)
        turns.finalize(manual)

    turns.expect(manual)
    backward(begin(turns, manual), finalize, lambda: log.append("more"))
    assert log == ["manual finish", "manual finalize", "manual follow_up", "more", "manual finish"]
    assert not turns.awaits_finalize(manual)
    assert not turns.is_expected(manual)
    assert not turns.is_at_work(manual)


def test_a_reducer_that_is_gone_is_waited_for_no_longer() -> None:
    turns = GroupTurns()
    manual = StandIn("manual", [], is_manual=True)
    turns.join(manual)
    backward(begin(turns, manual))
    del manual
    assert turns.finish_launched() is None
