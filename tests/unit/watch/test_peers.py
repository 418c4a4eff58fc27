import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch import distributed

from paceline.watch import peers as module
from paceline.watch.peers import Peers
from paceline.watch.process_state import ProcessState
from paceline.watch.rank_page import Activity, PageAddress, own_namespace
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


class CountingStore:
    """A store that counts questions, with the page and the word of each rank; each has its own host."""

    def __init__(self, ranks: int) -> None:
        word = json.dumps({"number": 1, "by": 0, "ranks": []})
        self._texts = {f"paceline/page/{rank}": json.dumps(asdict(address(rank))) for rank in range(ranks)}
        self._texts |= {f"paceline/host/host {rank}": word for rank in range(ranks)}
        self.questions = 0

    def clone(self) -> "CountingStore":
        return self

    def set(self, *_: str) -> None:
        self.questions += 1

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return all(key in self._texts for key in keys)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.questions += 1
        return [self._texts[key].encode() for key in keys]

    def forget(self, key: str) -> None:
        del self._texts[key]


@pytest.fixture
def _only_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no thread, and another rank speaks for the host."""
    monkeypatch.setattr(module, "_talk_for", lambda _: None)
    monkeypatch.setattr(Peers, "_speaks_for_host", lambda _: False)


@pytest.mark.usefixtures("_only_reads")
def test_pages_and_words_take_as_many_questions_with_any_number_of_ranks() -> None:
    asked = []
    for ranks in (2, 100):
        store = CountingStore(ranks)
        made = Peers(store, range(ranks), address(0))
        made.ask(5.0)
        made.talk()
        assert made.is_known
        assert len(made._words) == ranks - 1
        asked.append(store.questions)
    assert asked[0] == asked[1]


@pytest.mark.usefixtures("_only_reads")
def test_a_rank_that_waits_hears_of_the_ranks_that_have_come() -> None:
    store = CountingStore(4)
    store.forget("paceline/page/2")
    store.forget("paceline/host/host 3")
    made = Peers(store, range(4), address(0))
    made.talk()
    assert {*made._addresses} == {0}
    made.ask(5.0)
    made.talk()
    assert {*made._addresses} == {0, 1, 3}
    assert {*made._words} == {"host 1"}


RUNS_PYTHON = """
import importlib, json, sys, threading, time
from pathlib import Path
from paceline.watch.rank_page import RankPage, start_time
from paceline.watch.stacks import StackAnswers

folder = Path(sys.argv[1])
page, answers = RankPage(1, folder), StackAnswers(1, folder)
watcher = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
watcher.start()
page.write_header(watcher=watcher.native_id)
page.beat(time.monotonic_ns() - 60_000_000_000, usual_step=0, thread=0)
identity = {"pid": page.owner, "started": start_time(page.owner)}
where = {"page": page.path, "stacks": answers.path, "signal": answers.signal}
print(json.dumps({**identity, **where}), flush=True)

while True:
    importlib.reload(json.decoder)
"""


@pytest.fixture
def runs_python(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", PageAddress]]:
    """A rank that runs Python code, and whose heartbeat is old, as after a stop, until its watcher runs."""
    with subprocess.Popen(
        [sys.executable, "-c", RUNS_PYTHON, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        yield process, replace(address(1), host="host 0", namespace=own_namespace(), **told)
        process.kill()


def test_a_rank_that_has_just_gone_on_is_not_asked_for_its_stack_which_would_kill_it(
    peers: Peers, runs_python: tuple["subprocess.Popen[str]", PageAddress]
) -> None:
    process, where = runs_python
    peers._own = replace(peers._own, host=where.host, namespace=where.namespace)
    peers._meet(where)
    states = [peers.statuses()[0].state for _ in range(20)]
    assert process.poll() is None
    assert {*states} == {ProcessState.BUSY}
