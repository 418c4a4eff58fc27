"""Launchers that are killed, ranks that a signal has stopped, and runs that are stalled."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from left_processes import is_running
from running import Ran, in_rank, marked, paceline, script

from paceline.testing import run_ranks
from paceline.tools.run import agent
from paceline.tools.run.stalls import Stall

SECONDS = 60.0
NOTHING: Any = 0  # as a signal: waits only
PRELUDE = """
import atexit, os, signal, subprocess, sys, time
print("folder", os.environ["PACELINE_RUN_FOLDER"])
"""
IGNORES = f"""{PRELUDE}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600; sleep 600"])
nameless = subprocess.Popen(["setsid", "env", "-i", "sleep", "600"])
print("pids", os.getpid(), stubborn.pid, nameless.pid)
print("up")
sum(range(10**13))  # a loop in C, in which no thread of Python can run
"""
STOPS = f"""{PRELUDE}
from pathlib import Path
print("pids", os.getpid())
atexit.register(Path("exit-handler").touch)
atexit.register(print, "exit handler")
print("up")
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


def killed(_: int, folder: Path, text: str) -> tuple[int, list[str], list[int]]:
    """Kill the launcher; its exit code, what ranks printed, and which processes are left after a while."""
    options = ["run", "-n", "2", "--shutdown-timeout", "2", script(folder, text)]
    ran = in_rank(0, options, folder, [("[0] up", NOTHING), ("[1] up", signal.SIGKILL)])
    until = time.monotonic() + SECONDS / 2
    pids = [int(pid) for line in ran.lines if " pids " in line for pid in line.split()[2:]]
    while (
        left := marked(str(folder)) + [pid for pid in pids if is_running(pid)]
    ) and time.monotonic() < until:
        time.sleep(0.1)
    return ran.code, ran.lines, left


@pytest.mark.parametrize(
    "text", [IGNORES, STOPS], ids=["ranks that ignore SIGTERM", "ranks that are stopped"]
)
def test_a_killed_launcher_leaves_neither_ranks_nor_its_folder(text: str, tmp_path: Path) -> None:
    [(code, lines, left)] = run_ranks(killed, 1, args=(tmp_path, text), backend=None, timeout=SECONDS)
    folders = {Path(line.split()[2]).parent for line in lines if " folder " in line}
    assert (code, left) == (-signal.SIGKILL, [])
    assert len(folders) == 1
    assert not folders.pop().exists()
    assert (tmp_path / "exit-handler").exists() == (text is STOPS)


def test_a_stopped_rank_is_named_when_the_others_have_ended_and_ends_when_asked_to(tmp_path: Path) -> None:
    text = STOPS.replace("os.kill(", "if os.environ['RANK'] == '0': sys.exit()\nos.kill(")
    sends = [("rank 1 is stopped by a signal, and no other rank of this host is running", signal.SIGTERM)]
    ran = paceline("run", script(tmp_path, text), folder=tmp_path, sends=sends)
    assert (ran.code, ran.left) == (128 + signal.SIGTERM, [])
    [pid] = [line.split()[2] for line in ran.lines if line.startswith("[1] pids")]
    assert f"kill -CONT {pid};" in ran.stderr
    assert "[1] exit handler" in ran.lines


def test_ctrl_c_ends_a_stopped_rank(tmp_path: Path) -> None:
    sends = [("rank 0 is stopped by a signal", signal.SIGINT)]
    ran = paceline("run", "-n", "1", script(tmp_path, STOPS), folder=tmp_path, sends=sends)
    assert (ran.code, ran.left) == (128 + signal.SIGINT, [])
    assert "[0] exit handler" in ran.lines


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_another_thread_has_taken_ends_a_rank_that_sleeps(
    signum: signal.Signals, tmp_path: Path
) -> None:
    text = STOPS.replace("SIGSTOP", "SIGCONT").replace(
        "time.sleep", "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}); time.sleep"
    )
    ran = paceline("run", "-n", "1", script(tmp_path, text), folder=tmp_path, sends=[("[0] up", signum)])
    assert (ran.code, ran.left) == (128 + signum, [])
    assert "[0] exit handler" in ran.lines


def test_a_stopped_rank_ends_by_its_exit_handlers_when_another_fails(tmp_path: Path) -> None:
    fails = "if os.environ['RANK'] == '0':\n    time.sleep(1)\n    raise ValueError\nos.kill("
    ran = paceline("run", script(tmp_path, STOPS.replace("os.kill(", fails)), folder=tmp_path)
    assert (ran.code, ran.left) == (1, [])
    assert "[1] exit handler" in ran.lines
    assert "rank 1: stopped" in ran.stderr


WAITS = f"{PRELUDE}\nfrom pathlib import Path\nPath(os.environ['RANK']).touch()\ntime.sleep(600)\n"


def stalled(_: int, folder: Path) -> Ran:
    """Run with a fake that finds a stall when all ranks wait."""

    def find_stall(_: Path) -> Stall | None:
        is_up = all((folder / rank).exists() for rank in "01")
        return Stall(1, 31.4, "it is at script.py:7 in <module>") if is_up else None

    agent.find_stall = find_stall
    return in_rank(0, ["run", "-n", "2", "--stall", "kill:30", script(folder, WAITS)], folder)


def test_a_stalled_run_is_ended_if_asked_for(tmp_path: Path) -> None:
    [ran] = run_ranks(stalled, 1, args=(tmp_path,), backend=None, timeout=SECONDS)
    assert (ran.code, ran.left) == (1, [])
    first = "paceline: rank 1 was stalled for 31 s, so all ranks were stopped\n"
    assert ran.stderr == f"{first}it is at script.py:7 in <module>\nranks 0, 1: stopped\n"
