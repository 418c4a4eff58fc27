"""Which processes count as a rank's when numbers are given to others, and who gets signals."""

import signal
import subprocess

import pytest

from paceline.tools.run.processes import (
    ProcessEntry,
    ProcessId,
    in_sessions,
    read_process,
    remaining_sessions,
    send,
    with_descendants,
)

LAUNCHER = 10
RANK = ProcessId(100, started=5000)


def table(*rows: tuple[int, int, int, int, str]) -> dict[int, ProcessEntry]:
    """A table of processes from (pid, started, parent, session, state)."""
    return {
        pid: ProcessEntry(ProcessId(pid, started), parent, session, state)
        for pid, started, parent, session, state in rows
    }


ORPHAN = (101, 5001, LAUNCHER, 100, "S")


@pytest.mark.parametrize(
    ("rows", "found", "is_remembered"),
    [
        ([(100, 5000, LAUNCHER, 100, "R"), (101, 5001, 100, 100, "S")], {100, 101}, True),
        ([(100, 5000, LAUNCHER, 100, "Z"), ORPHAN], {101}, True),
        ([ORPHAN, (102, 5002, 101, 100, "S")], {101, 102}, True),
        ([(100, 5000, LAUNCHER, 100, "Z")], set(), False),
        ([], set(), False),
        ([(100, 9000, 1, 100, "S"), (101, 9001, 100, 100, "S")], set(), False),
        # The caller of ``launch`` has started a process that has got the number.
        ([(100, 9000, LAUNCHER, 100, "S"), (101, 9001, 100, 100, "S")], set(), False),
        ([(101, 9001, 1, 100, "S")], set(), True),
    ],
    ids=[
        "a rank and its child",
        "a rank that has ended and its orphan",
        "orphans of a rank that is gone",
        "only a rank that has ended",
        "nobody",
        "strangers with its number",
        "a stranger below the launcher",
        "a stranger whose leader has ended",
    ],
)
def test_a_session_counts_as_a_ranks_only_while_its_number_is_the_ranks(
    rows: list[tuple[int, int, int, int, str]], found: set[int], is_remembered: bool
) -> None:
    processes = table((LAUNCHER, 1, 1, 1, "S"), *rows)
    assert in_sessions(processes, {RANK}, launcher=LAUNCHER) == found
    assert remaining_sessions(processes, {RANK}) == ({RANK} if is_remembered else set())


def test_descendants_are_found_in_a_table_that_was_read_while_it_changed() -> None:
    # Each is the other's parent: a number was given anew between two lines.
    processes = table((1, 0, 0, 1, "S"), (20, 1, 21, 20, "S"), (21, 2, 20, 20, "S"), (22, 3, 21, 20, "S"))
    assert with_descendants(processes, {21, 99}) == {20, 21, 22}
    assert in_sessions(processes, {ProcessId(19, 0)}, launcher=LAUNCHER) == set()
    assert in_sessions({22: processes[22]} | processes, {ProcessId(20, 1)}, launcher=1) == {20, 21, 22}


def test_a_signal_reaches_the_process_that_was_meant_and_no_other() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        entry = read_process(sleeper.pid)
        assert entry is not None
        send([entry._replace(id=ProcessId(sleeper.pid, entry.id.started - 1))], signal.SIGKILL)
        with pytest.raises(subprocess.TimeoutExpired):
            sleeper.wait(0.5)
        send([entry], signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT)
        assert sleeper.wait(20) == -signal.SIGTERM
        send([entry], signal.SIGKILL)
