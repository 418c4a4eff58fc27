"""What the launcher says of ranks that do not go on, and when it ends a stalled run."""

import pytest

from paceline.tools.run import run_watch
from paceline.tools.run.processes import ProcessEntry, ProcessId
from paceline.tools.run.run_watch import StalledRunError, Watch, only_stopped, parse_stall
from paceline.tools.run.stalls import Stall


def process(pid: int, state: str) -> ProcessEntry:
    return ProcessEntry(ProcessId(pid, started=1), parent=1, session=pid, state=state)


@pytest.mark.parametrize(("text", "seconds"), [("kill:30", 30.0), ("kill:0.5", 0.5)])
def test_the_option_says_after_how_many_seconds_a_stalled_run_is_ended(text: str, seconds: float) -> None:
    assert parse_stall(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "kill", "kill:", "kill:-1", "kill:0", "kill:nan", "warn:30", "kill:3s"]
)
def test_another_value_of_the_option_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be kill:SECONDS, for example kill:30 \(--stall: "):
        parse_stall(text)


@pytest.mark.parametrize(
    ("states", "stopped"),
    [
        ({}, {}),
        ({1: "T"}, {1: 101}),
        ({3: "T", 1: "T"}, {1: 101, 3: 103}),
        ({0: "S", 1: "T"}, {}),
        ({0: "R"}, {}),
        # In a debugger.
        ({0: "t"}, {}),
    ],
)
def test_stopped_ranks_count_if_no_other_rank_is_running(
    states: dict[int, str], stopped: dict[int, int]
) -> None:
    ranks = {rank: process(100 + rank, state) for rank, state in states.items()}
    assert only_stopped(ranks) == stopped


@pytest.fixture
def at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watch, "WATCH_SECONDS", 0.0)


@pytest.mark.usefixtures("at_every_look")
def test_it_is_said_once_that_ranks_are_stopped() -> None:
    looks = ["S", "T", "S", "T", "T", "T", "S", "T", "T"]
    said: list[str] = []
    states = iter(looks)
    watching = Watch(
        lambda: {1: process(77, next(states))},
        said.append,
        lambda: None,
        stall_seconds=None,
    )
    said_after = []
    for _ in looks:
        watching.look()
        said_after.append(len(said))
    assert said_after == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    [text] = said
    assert text.startswith("rank 1 is stopped by a signal, and no other rank of this host is running.")
    assert "kill -CONT 77;" in text


def test_ranks_are_looked_at_about_once_a_second() -> None:
    looks: list[int] = []
    watching = Watch(lambda: looks.append(0) or {}, print, lambda: None, stall_seconds=None)  # type: ignore[func-returns-value]
    watching.look()
    watching.look()
    assert len(looks) == 1


@pytest.mark.usefixtures("at_every_look")
def test_a_run_is_ended_when_a_rank_is_stalled_for_as_long_as_is_allowed() -> None:
    stalls = iter([None, Stall(2, 29.9), Stall(2, 30.4, "in step 7, at train.py:3")])
    watching = Watch(dict, print, lambda: next(stalls), stall_seconds=30.0)
    watching.look()
    watching.look()
    with pytest.raises(StalledRunError, match=r"rank 2 was stalled for 30 s.*\nin step 7"):
        watching.look()
    assert watching.stall == Stall(2, 30.4, "in step 7, at train.py:3")


@pytest.mark.usefixtures("at_every_look")
def test_a_stalled_run_is_not_ended_unless_it_was_asked_for() -> None:
    Watch(dict, print, lambda: Stall(0, 1e9), stall_seconds=None).look()
