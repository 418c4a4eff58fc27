"""How ranks that meet in a store reach one verdict."""

import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed

from paceline.comm import meeting as meeting_module
from paceline.comm import meeting_store
from paceline.comm.launcher_claims import Launcher
from paceline.comm.launchers import LaunchedWorld, MeetingPlace
from paceline.comm.meeting import Meeting, tell_waiting_ranks
from paceline.errors import MeetingError


class SlowStore:
    """A store that another rank uses whenever this one has written to it."""

    def __init__(self, store: Any, between: Any) -> None:
        self._store = store
        self._between = between

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            result = getattr(self._store, name)(*args)
            if name in ("add", "compare_set"):
                self._between()
            return result

        return call


def meeting(
    rank: int,
    store: Any,
    *,
    size: int = 2,
    port: int = 1,
    seconds: float = 5.0,
    joined: set[str] | None = None,
    launcher: Launcher = Launcher.VARIABLES,
) -> Meeting:
    agent = launcher.has_agent
    world = LaunchedWorld(
        launcher, rank=rank, size=size, address="127.0.0.1", port=port, is_agent_listening=agent
    )
    return Meeting(world, seconds=seconds, joined=set() if joined is None else joined, store=store)


def hash_store() -> Any:
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


def come(each: Meeting) -> "Future[None]":
    """Call the roll in another thread."""
    future: Future[None] = Future()

    def call() -> None:
        try:
            future.set_result(each.call_the_roll())
        except MeetingError as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def wait_for_key(store: Any, key: str) -> None:
    until = time.monotonic() + 5.0
    while not store.check([key]):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_problem_is_found_by_a_rank_that_comes_in_between() -> None:
    store = hash_store()
    found: list[str] = []

    def come_in_between() -> None:
        try:
            meeting(0, store).agree("roll", None)
        except MeetingError as error:
            found.append(str(error))

    other = threading.Thread(target=come_in_between)

    def let_the_other_come() -> None:
        if other.ident is None:
            other.start()
            other.join(0.5)

    with pytest.raises(MeetingError, match="a wrong port"):
        meeting(1, SlowStore(store, let_the_other_come)).agree("roll", "a wrong port")
    other.join(5.0)
    assert found == ["a wrong port"]


# --- which meeting ---


def test_a_rank_that_comes_first_waits_for_the_next_meeting() -> None:
    store = hash_store()
    joined: list[set[str]] = [set(), set()]
    for _ in range(3):
        later = come(meeting(1, store, joined=joined[1]))
        time.sleep(0.02)
        meeting(0, store, joined=joined[0]).call_the_roll()
        later.result(5.0)
    assert joined[0] == joined[1]
    assert len(joined[0]) == 3


def test_after_a_refusal_ranks_can_meet_in_the_same_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "_TELL_SECONDS", 0.1)
    store = hash_store()
    joined: list[set[str]] = [set(), set()]
    zero = come(meeting(0, store, size=3, seconds=1.0, joined=joined[0]))
    with pytest.raises(MeetingError, match="missing: rank 2"):
        meeting(1, store, size=3, joined=joined[1]).call_the_roll()
    with pytest.raises(MeetingError, match="missing: rank 2"):
        zero.result(5.0)
    one = come(meeting(1, store, joined=joined[1]))
    meeting(0, store, joined=joined[0]).call_the_roll()
    one.result(5.0)


def test_a_rank_0_that_has_met_others_before_meets_a_new_process() -> None:
    store, joined = hash_store(), {"an earlier one", "another one"}
    one = come(meeting(1, store))
    meeting(0, store, joined=joined).call_the_roll()
    one.result(5.0)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_torchs_agent_started_anew_do_not_take_the_last_meeting_for_theirs(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    store, agent = hash_store(), Launcher.TORCHRUN
    one = come(meeting(1, store, launcher=agent))
    meeting(0, store, launcher=agent).call_the_roll()
    one.result(5.0)
    monkeypatch.setenv("PACELINE_HOST_ID", "other processes")
    others = [come(meeting(rank, store, size=size, launcher=agent)) for rank in range(1, size)]
    time.sleep(0.05)
    assert not any(other.done() for other in others)
    meeting(0, store, size=size, launcher=agent).call_the_roll()
    for other in others:
        other.result(5.0)


def test_ranks_that_torchs_agent_started_anew_do_not_take_a_refusal_for_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, agent = hash_store(), Launcher.TORCHRUN
    with pytest.raises(MeetingError, match="missing: rank 1"):
        meeting(0, store, launcher=agent, seconds=0.0).call_the_roll()
    monkeypatch.setenv("PACELINE_HOST_ID", "other processes")
    one = come(meeting(1, store, launcher=agent))
    time.sleep(0.1)
    meeting(0, store, launcher=agent).call_the_roll()
    one.result(5.0)


def test_a_refusal_that_nothing_follows_reaches_a_rank_that_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_module, "_TELL_SECONDS", 0.2)
    store, agent = hash_store(), Launcher.TORCHRUN
    with pytest.raises(MeetingError, match="missing: rank 1"):
        meeting(0, store, launcher=agent, seconds=0.0).call_the_roll()
    with pytest.raises(MeetingError, match="missing: rank 1"):
        meeting(1, store, launcher=agent).call_the_roll()


def test_a_rank_that_waits_goes_over_to_the_meeting_that_a_new_rank_0_begins() -> None:
    store, joined = hash_store(), set[str]()
    store.set("paceline/meeting", "old")
    one = come(meeting(1, store, joined=joined))
    wait_for_key(store, "paceline/meeting/old/roll/came/1")
    meeting(0, store).call_the_roll()
    one.result(5.0)


def test_rank_0_stays_for_all_ranks_of_a_larger_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "_TELL_SECONDS", 60.0)
    store = hash_store()
    zero = come(meeting(0, store))
    for rank in (1, 2):
        wait_for_key(store, "paceline/meeting")
        assert not zero.done()
        with pytest.raises(MeetingError, match="a mixed world"):
            meeting(rank, store, size=3).call_the_roll()
        time.sleep(0.4)  # longer than rank 0 sleeps
    with pytest.raises(MeetingError, match="a mixed world"):
        zero.result(5.0)


class ContestedStore:
    """A store in which a rank of a world of three notes its size, right after another has looked there."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._is_noted = False

    def __getattr__(self, name: str) -> Any:
        def call(key: Any, *args: Any) -> Any:
            result = getattr(self._store, name)(key, *args)
            if "largest" in str(key) and not self._is_noted:
                self._is_noted = True
                self._store.set("paceline/meeting//roll/largest", "3")
            return result

        return call


def test_the_largest_world_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "_TELL_SECONDS", 0.0)
    store = hash_store()
    with pytest.raises(MeetingError, match="a wrong port"):
        meeting(0, ContestedStore(store)).agree("roll", "a wrong port")
    assert store.get("paceline/meeting//roll/largest") == b"3"


# --- ranks that do not come ---


class FrozenStore:
    """A store that does not answer."""

    def check(self, _: list[str]) -> bool:
        return threading.Event().wait()


def test_a_store_that_does_not_answer_is_left_at_the_end_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_store, "_LEAST_SECONDS", 0.1)
    with pytest.raises(MeetingError, match=r"rank 0 does not answer: .*MASTER_PORT=1"):
        meeting(1, FrozenStore(), seconds=0.1).call_the_roll()


def test_of_very_many_missing_ranks_some_are_named() -> None:
    with pytest.raises(MeetingError, match=r"missing: rank 0, rank 2, .*, rank 20 and perhaps more"):
        meeting(1, hash_store(), size=10**9, seconds=0.0).agree("roll", None)


def test_a_rank_that_came_and_then_stopped_is_named() -> None:
    with pytest.raises(MeetingError, match="came, and then stopped: rank 0"):
        meeting(1, hash_store(), seconds=0.0).agree("devices", None)


# --- ports ---


def test_a_port_at_which_nobody_listens_and_that_cannot_be_had_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_module, "_TELL_SECONDS", 0.2)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(MeetingError, match="the port is in use by another program, which does not lis"):
            meeting(0, None, port=port, seconds=60.0).call_the_roll()


def test_ranks_that_come_to_a_place_where_nobody_listens_yet_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_module, "_TELL_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ranks = [come(meeting(rank, None, port=port)) for rank in (1, 2)]
    tell_waiting_ranks(MeetingPlace("127.0.0.1", port), "rank 0 is wrong", joined=set())
    for rank in ranks:
        with pytest.raises(MeetingError, match="rank 0 is wrong"):
            rank.result(5.0)


def test_who_has_told_others_does_not_join_their_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "_TELL_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    first = meeting(0, None, port=port)
    zero, joined = come(first), set[str]()
    while not first._joined:
        time.sleep(0.01)
    tell_waiting_ranks(MeetingPlace("127.0.0.1", port), "rank 1 is wrong", joined=joined)
    with pytest.raises(MeetingError, match="rank 1 is wrong"):
        zero.result(5.0)
    assert joined == first._joined
    one = come(meeting(1, None, port=port, joined=joined))  # while the first store is still there
    first.close()
    again = meeting(0, None, port=port)  # its store must stay until rank 1 has read the verdict
    again.call_the_roll()
    one.result(5.0)
