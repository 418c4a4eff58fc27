import time

import pytest
from torch import distributed

from paceline.watch import peers as module
from paceline.watch.peers import Peers
from paceline.watch.process_state import ProcessState
from paceline.watch.rank_page import Activity, PageAddress
from paceline.watch.stall import RankStatus


def address(rank: int) -> PageAddress:
    return PageAddress(
        rank=rank,
        host=f"host {rank}",
        node="node",
        namespace=1,
        pid=1,
        started=1,
        page="/no/page",
        stacks="/no/stacks",
        signal=0,
    )


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    """Of rank 0; rank 1 is on another host, whose word was heard 100 s ago."""
    monkeypatch.setattr(module, "_talk_for", lambda _: None)
    made = Peers(distributed.HashStore(), [0, 1], address(0))  # type: ignore[attr-defined]  # in no __all__
    made._addresses[1] = address(1)
    status = RankStatus(1, ProcessState.BUSY, Activity.FORWARD, step=3)
    word = {"number": 7, "by": 1, "ranks": [status.to_json()]}
    made._words["host 1"] = time.monotonic() - 100, word
    return made


def test_a_host_is_not_silent_because_nobody_listened(peers: Peers) -> None:
    peers.ask(5.0)
    [status] = peers.statuses()
    assert status.state is ProcessState.BUSY
    assert status.seen_seconds == pytest.approx(100, abs=1)


def test_a_host_that_says_nothing_while_somebody_listens_is_silent(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENT_ALONE_SECONDS", 0.05)
    peers.ask(5.0)
    peers.ask(5.0)  # goes on listening
    [status] = peers.statuses()
    assert status.state is ProcessState.SILENT
    assert status.is_gone
