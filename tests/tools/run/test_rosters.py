"""Which members a run has in each generation."""

import json
from typing import Any

import pytest
import torch.distributed as dist

from paceline.comm.roster import FAILED_KEY, ROSTER_KEY, LostRank, Roster, again_key, host_key, opened_key
from paceline.tools.run import rosters
from paceline.tools.run.rosters import HostError, Rosters, next_roster

FIRST = Roster(3, ("0.0.0", "0.1.0", "0.2.1"))


def test_the_first_roster_has_all_members() -> None:
    assert next_roster(None, ["0.0.0", "0.1.0"], {}, at=1.0) == Roster(0, ("0.0.0", "0.1.0"), at=1.0)


def test_the_same_members_need_no_new_roster_unless_they_ask() -> None:
    assert next_roster(FIRST, FIRST.members, {}, at=1.0) is None
    assert next_roster(FIRST, FIRST.members, {}, at=1.0, again=True) == Roster(4, FIRST.members, at=1.0)


def test_lost_ranks_are_named_with_the_reason() -> None:
    new = next_roster(FIRST, ["0.0.0", "0.1.1"], {"0.1.0": "SIGKILL"}, at=2.0)
    assert new == Roster(4, ("0.0.0", "0.1.1"), (LostRank(1, "SIGKILL"), LostRank(2, "lost")), 2.0)


def test_what_was_lost_before_anybody_has_trained_is_not_forgotten() -> None:
    before = Roster(4, ("0.0.0", "0.1.1"), (LostRank(1, "SIGKILL"),), at=2.0)
    new = next_roster(before, ["0.0.1", "0.1.1"], {"0.0.0": "SIGBUS"}, at=3.0, was_opened=False)
    assert new == Roster(5, ("0.0.1", "0.1.1"), (LostRank(1, "SIGKILL"), LostRank(0, "SIGBUS")), 2.0)
    later = next_roster(before, ["0.0.1", "0.1.1"], {"0.0.0": "SIGBUS"}, at=3.0)
    assert later == Roster(5, ("0.0.1", "0.1.1"), (LostRank(0, "SIGBUS"),), 3.0)


def test_a_training_that_is_over_stays_over() -> None:
    assert next_roster(Roster(1, ("0.0.0",), is_over=True), ["0.0.1"], {}, at=1.0) is None


def test_a_roster_survives_the_store() -> None:
    roster = Roster(2, ("0.0.0",), (LostRank(1, "SIGKILL"),), 1.5, is_over=True)
    assert Roster.from_json(roster.to_json()) == roster


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def in_store(store: Any) -> Roster:
    return Roster.from_json(store.get(ROSTER_KEY))


def test_the_first_host_writes_what_all_hosts_have(store: Any) -> None:
    first, second = (Rosters(store, host, 2, silent_after=60) for host in (0, 1))
    first.say(["0.0.0"], {})
    assert not store.check([ROSTER_KEY])  # the other host has said nothing
    second.say(["1.0.0"], {})
    first.say(["0.0.0"], {})
    assert in_store(store).members == ("0.0.0", "1.0.0")
    store.set(opened_key(0), "1")
    second.say(["1.0.1"], {"1.0.0": "SIGKILL"})
    first.say(["0.0.0"], {})
    assert in_store(store).lost == (LostRank(1, "SIGKILL"),)


def test_a_host_that_is_silent_is_left_out_and_ends(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Rosters(store, host, 2, silent_after=5) for host in (0, 1))
    second.say(["1.0.0"], {})
    first.say(["0.0.0"], {})
    now = rosters.time.monotonic()
    monkeypatch.setattr(rosters.time, "monotonic", lambda: now + 6)
    first.say(["0.0.0"], {})
    assert in_store(store).lost == (LostRank(1, "its host was silent for 5 s"),)
    with pytest.raises(HostError, match="have gone on without this one"):
        second.say(["1.0.0"], {})


def test_an_exception_on_one_host_ends_the_others(store: Any) -> None:
    first, second = (Rosters(store, host, 2, silent_after=60) for host in (0, 1))
    second.fail("rank 3 has failed, on another host")
    with pytest.raises(HostError, match="rank 3 has failed"):
        first.say(["0.0.0"], {})
    assert store.check([FAILED_KEY])


def test_members_that_cannot_open_a_group_get_another_generation(store: Any) -> None:
    alone = Rosters(store, 0, 1, silent_after=60)
    alone.say(["0.0.0", "0.1.0"], {})
    store.set(again_key(0), "1")
    alone.say(["0.0.0", "0.1.0"], {})
    assert (in_store(store).generation, in_store(store).lost) == (1, ())


def test_members_that_end_the_training_win_against_a_launcher_that_reads_late(store: Any) -> None:
    alone = Rosters(store, 0, 1, silent_after=60)
    alone.say(["0.0.0", "0.1.0"], {})
    over = Roster(**{**vars(in_store(store)), "is_over": True})
    store.set(ROSTER_KEY, over.to_json())
    alone.say(["0.0.0", "0.1.1"], {"0.1.0": "SIGKILL"})
    assert in_store(store) == over
    assert alone.is_over


def test_the_first_host_waits_until_the_others_have_left(store: Any) -> None:
    first, second = (Rosters(store, host, 2, silent_after=60) for host in (0, 1))
    second.say(["1.0.0"], {})
    first.say(["0.0.0"], {})
    second.leave()
    first.leave()
    assert json.loads(store.get(host_key(0)))["has_left"]
