import os
import signal
import subprocess
import sys
import time

import pytest

from paceline.watch.process_state import ProcessFacts, ProcessState, judge, read_facts
from paceline.watch.rank_page import start_time


def state(before: ProcessFacts | None, after: ProcessFacts | None, age: float = 0.5) -> ProcessState:
    return judge(before, after, heartbeat_age=age)


def facts(letter: str = "S", ticks: int = 100, faults: int = 0, waits: int = 7) -> ProcessFacts:
    return ProcessFacts(letter, ticks, faults, waits)


@pytest.mark.parametrize(
    ("before", "after", "age", "wanted"),
    [
        (facts(), None, 0.5, ProcessState.ENDED),
        (None, None, 0.5, ProcessState.ENDED),
        (facts(), facts("T"), 9.0, ProcessState.STOPPED),
        (facts(), facts("t"), 9.0, ProcessState.TRACED),
        (facts("D"), facts("D"), 9.0, ProcessState.DISK),
        (facts("D"), facts("S"), 0.5, ProcessState.SLEEPING),
        (facts(), facts(faults=50), 0.5, ProcessState.SWAPPED),
        (facts(), facts("R"), 0.5, ProcessState.BUSY),
        (facts(), facts(ticks=108), 0.5, ProcessState.BUSY),
        (facts("R"), facts("R", waits=27), 9.0, ProcessState.HOLDS_LOCK),
        (facts("R"), facts("R", waits=27), 0.5, ProcessState.BUSY),
        (facts("R"), facts("R", waits=9), 9.0, ProcessState.BUSY),  # it was stopped, and has just gone on
        (facts(), facts(), 0.5, ProcessState.SLEEPING),
    ],
)
def test_a_state_is_judged(
    before: ProcessFacts | None, after: ProcessFacts | None, age: float, wanted: ProcessState
) -> None:
    assert state(before, after, age) is wanted


def test_a_process_that_stops_and_ends_is_seen() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = start_time(process.pid)
    assert started is not None
    os.kill(process.pid, signal.SIGSTOP)
    until = time.monotonic() + 10
    while (found := read_facts(process.pid, 0, started)) is None or found.state != "T":
        assert time.monotonic() < until
        time.sleep(0.01)
    process.kill()
    while read_facts(process.pid, 0, started) is not None:  # also while nobody has waited for it
        assert time.monotonic() < until
        time.sleep(0.01)
    process.wait()
    assert read_facts(process.pid, 0, started) is None


def test_another_process_with_the_same_number_is_another() -> None:
    started = start_time(os.getpid())
    assert started is not None
    assert read_facts(os.getpid(), 0, started) is not None
    assert read_facts(os.getpid(), 0, started + 1) is None
