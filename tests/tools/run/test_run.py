"""``paceline run`` with scripts that do well and scripts that do not."""

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from left_processes import is_running
from running import EXITS_AT_ONCE, TIMEOUT, Ran, in_rank, paceline, script

from paceline.recording.recorder import FOLDER_VARIABLE
from paceline.testing import run_ranks
from paceline.tools.run import agent
from paceline.tools.run.command import ranks_parser
from paceline.tools.run.worker import FOLDER

CORES = len(os.sched_getaffinity(0))
FIRST = "if os.environ['RANK'] == '1':"
PRELUDE = "import os, signal, subprocess, sys, time\n"


def test_ranks_run_a_script_as_python_would(tmp_path: Path) -> None:
    text = f"""{PRELUDE}
print(sys.argv, sys.path[0], __name__, os.environ["OMP_NUM_THREADS"], os.environ["PACELINE_RECORD"])
print("torch" in sys.modules, "paceline" in sys.modules)
print("to stderr", file=sys.stderr)
import beside
print("no end", end="")
"""
    (tmp_path / "beside.py").touch()
    world = CORES + 1
    options = ["-n", str(world), "--log-dir", "logs", "--nnodes", "1", "--record", "acts"]
    ran = paceline("run", *options, script(tmp_path, text), "--flag", "-n", "7", folder=tmp_path)
    said = [
        f"['script.py', '--flag', '-n', '7'] {tmp_path} __main__ 1 {tmp_path}/acts",
        "False False",
        "no end",
    ]
    assert ran.code == 0
    lines = [f"[{rank}] {line}" for rank in range(world) for line in said]
    assert sorted(ran.lines) == sorted(lines)
    assert sorted(ran.stderr.splitlines()) == sorted(
        [
            f"paceline: {world} ranks share {CORES} cores: each gets 1 thread",
            *(f"[{rank}] to stderr" for rank in range(world)),
        ]
    )
    for rank in range(world):
        assert (tmp_path / f"logs/rank-{rank}/stdout.log").read_text() == "\n".join(said)
        assert (tmp_path / f"logs/rank-{rank}/stderr.log").read_text() == "to stderr\n"
    assert ran.left == []


@pytest.mark.parametrize(
    ("threads", "told"), [("4", "4 threads"), ("1", "1 thread"), ("4,2", "OMP_NUM_THREADS=4,2")]
)
def test_the_threads_that_ranks_get_are_told_if_they_share_cores(
    threads: str, told: str, tmp_path: Path
) -> None:
    text = "import os; print(os.environ['OMP_NUM_THREADS'])"
    options, variables = ["-n", str(CORES + 1)], {"OMP_NUM_THREADS": threads}
    ran = paceline("run", *options, script(tmp_path, text), folder=tmp_path, environment=variables)
    assert {line.split()[1] for line in ran.lines} == {threads}
    assert ran.stderr == f"paceline: {CORES + 1} ranks share {CORES} cores: each gets {told}\n"


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 exited with code 3"),
        ("os.kill(os.getpid(), 9)", 128 + 9, "rank 1 killed by SIGKILL: by a user, or by the kernel"),
        ("os.abort()", 128 + 6, 'script.py", line 5 in <module>'),
        ("os.kill(os.getpid(), 15)", 128 + 15, "rank 1 exited with code 143"),
        (
            "import atexit; atexit.register(os._exit, 9); 1 / 0",
            1,
            "ZeroDivisionError: division by zero",
        ),
    ],
    ids=["exit", "kill", "crash", "end", "another end after failure"],
)
def test_a_rank_that_ends_badly_gives_its_exit_code(ends: str, code: int, words: str, tmp_path: Path) -> None:
    text = f"{PRELUDE}{FIRST}\n    time.sleep(0.3)\n    print('now')\n    {ends}\ntime.sleep(60)\n"
    ran = paceline("run", script(tmp_path, text), folder=tmp_path)
    assert ran.code == code
    assert words in ran.stderr
    assert ran.stderr.endswith("rank 0: stopped\n")
    assert ran.left == []


def test_a_rank_that_ended_early_is_named_when_others_miss_it(tmp_path: Path) -> None:
    text = f"""{PRELUDE}
from pathlib import Path
{FIRST}
    Path("pid").write_text(str(os.getpid()))
    os.rename("pid", "pid of rank 1")
    sys.exit()

def is_running(stat):
    try:
        return stat.read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

while not os.path.exists("pid of rank 1"):
    time.sleep(0.01)
while is_running(Path("/proc", Path("pid of rank 1").read_text(), "stat")):
    time.sleep(0.01)
raise RuntimeError('Connection closed by peer [127.0.0.1]:1')"""
    ran = paceline("run", script(tmp_path, text), folder=tmp_path)
    assert ran.code == 1
    assert ran.stderr.endswith("\nrank 1 had ended before, with exit code 0\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x = = 1", 'script.py", line 1\n      x = = 1\n          ^\n  SyntaxError: invalid syntax'),
        (
            "try:\n    {}[3]\nexcept KeyError as e:\n    e.add_note('a note')\n    raise OSError from e",
            "KeyError: 3\n  a note\n\n  The above exception was the direct cause",
        ),
    ],
    ids=["syntax", "chain"],
)
def test_a_script_that_raises_at_import_is_shown_once(text: str, shown: str, tmp_path: Path) -> None:
    ran = paceline("run", script(tmp_path, text), folder=tmp_path)
    assert ran.code == 1
    assert ran.stderr.count(shown) == 1
    assert "worker.py" not in ran.stderr
    assert ran.stderr.startswith("paceline: rank")
    assert f"(host {socket.gethostname()}, pid " in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "the following arguments are required: SCRIPT\n"),
        (["--record", "a file", "."], 2, "there is a file of this name (--record: a file)"),
        (["--checkpoint", "a file", "."], 2, "there is a file of this name (--checkpoint: a file)"),
        (["--log-dir", "a file/logs", "."], 2, "Not a directory (--log-dir: a file/logs)"),
        (["missing.py"], 2, "there is no such script (script: missing.py"),
        (["-n", "0", "."], 2, "at least one rank is needed (ranks: 0)"),
        (["-n", "many", "."], 2, "many"),
        (["--no-python", "--patch", "true"], 2, "only Python scripts can be patched"),
        (["--duplicate-stdout-filters", "x", "."], 2, "use --log-dir (options: duplicate_stdout_filters)"),
        (["--redirects", "3", "."], 2, "use --log-dir (options: redirects)"),
        (["--stall", "30", "."], 2, "--stall must be kill:SECONDS, for example kill:30 (--stall: 30)"),
        (["--no-python", "./missing"], 127, "could not be started"),
        (["-m", "missing_module"], 1, "No module named missing_module"),
    ],
    ids=[
        "nothing",
        "record",
        "checkpoint",
        "log-dir",
        "script",
        "no ranks",
        "not a number",
        "patch",
        "filters",
        "redirects",
        "stall",
        "program",
        "module",
    ],
)
def test_what_cannot_be_run_is_said(arguments: list[str], code: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    ran = paceline("run", *arguments, folder=tmp_path)
    assert (ran.code, ran.stdout, ran.left) == (code, "", [])
    assert words in ran.stderr


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ran = paceline("run", "--master-port", port, script(tmp_path, ""), folder=tmp_path)
    assert ran.code == 1
    assert f"port: {port}" in ran.stderr
    assert "the port is in use" in ran.stderr


def test_nothing_that_ranks_start_is_left(tmp_path: Path) -> None:
    text = f"""{PRELUDE}
# One that ignores SIGTERM; one in a session and an environment of its own, whose parent has ended.
stubborn = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 60; sleep 60"])
command = ["setsid", "env", "-i", "sh", "-c", "sleep 60 >/dev/null & echo $!"]
print("children", stubborn.pid, subprocess.check_output(command, text=True).strip())
"""
    ran = paceline("run", script(tmp_path, text), folder=tmp_path)
    pids = [int(pid) for line in ran.lines for pid in line.split()[2:]]
    assert ran.code == 0
    assert len(pids) == 4
    assert ran.left == []
    assert [pid for pid in pids if is_running(pid)] == []


SAVES = f"""{PRELUDE}
try:
    print("up")
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    print("saved", os.environ["RANK"])
    raise
"""
STUBBORN = f"""{PRELUDE}
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_IGN)
print("up")
time.sleep(60)
"""
EXITS = f"""{PRELUDE}
import atexit
atexit.register(lambda: print("exit handler"))
print("up")
time.sleep(60)
"""


def test_ctrl_c_lets_ranks_save(tmp_path: Path) -> None:
    sends = [("[0] up", signal.SIGINT)]
    ran = paceline("run", "-n", "1", script(tmp_path, SAVES), folder=tmp_path, sends=sends)
    assert (ran.code, ran.left) == (130, [])
    assert ran.lines == ["[0] up", "[0] saved 0"]
    # In the line after the one that printed, or while that ends.
    where = rf"{tmp_path}/script\.py:[45] in <module>"
    assert re.search(rf"stopped by SIGINT\nrank 0: interrupted at {where}\n$", ran.stderr)


def test_ctrl_c_twice_ends_ranks_at_once(tmp_path: Path) -> None:
    sends = [("[0] up", signal.SIGINT), ("a second signal stops them at once", signal.SIGINT)]
    ran = paceline("run", "-n", "1", script(tmp_path, STUBBORN), folder=tmp_path, sends=sends)
    assert (ran.code, ran.left) == (130, [])


def interrupt(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail(_: Path) -> None:
    raise KeyError("a column")


def with_last_line(_: int, read: Callable[[Path], None], folder: Path) -> Ran:
    """A run in whose last line something happens."""
    agent.read_whole = read  # type: ignore[attr-defined,assignment]
    return in_rank(0, ["run", "-n", "1", "script.py"], folder)


@pytest.mark.parametrize(("read", "told"), [(interrupt, ""), (fail, "is off (KeyError: 'a column')\n")])
def test_what_happens_in_the_last_line_does_not_change_how_a_run_has_ended(
    read: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    script(tmp_path, "print('done')")
    [ran] = run_ranks(with_last_line, 1, args=(read, tmp_path), backend=None, timeout=TIMEOUT)
    assert isinstance(ran, Ran)
    assert (ran.code, ran.lines) == (0, ["[0] done"])
    assert ran.stderr.endswith(told)
    assert len(ran.stderr.splitlines()) == bool(told)


def test_sigterm_ends_ranks_through_their_exit_handlers(tmp_path: Path) -> None:
    sends = [("[0] up", signal.SIGTERM)]
    ran = paceline("run", "-n", "1", script(tmp_path, EXITS), folder=tmp_path, sends=sends)
    assert (ran.code, ran.left) == (143, [])
    assert ran.lines == ["[0] up", "[0] exit handler"]


def test_sigterm_ends_an_exit_handler_without_a_word(tmp_path: Path) -> None:
    text = f"{PRELUDE}import atexit\natexit.register(print, 'next')\natexit.register(time.sleep, 60)\n"
    text += "atexit.register(print, 'up')"
    sends = [("[0] up", signal.SIGTERM)]
    ran = paceline("run", "-n", "1", script(tmp_path, text), folder=tmp_path, sends=sends)
    assert (ran.lines, ran.left) == (["[0] up", "[0] next"], [])
    assert "Exception ignored" not in ran.stderr


@pytest.mark.parametrize(
    ("option", "variable", "seconds"), [("3", "5", 3), (None, "5", 5), (None, None, None)]
)
def test_ranks_have_the_time_to_end_that_is_given(
    option: str | None, variable: str | None, seconds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", variable)
    arguments = [] if option is None else ["--shutdown-timeout", option]
    options = ranks_parser()[0].parse_args([*arguments, "script.py"])
    assert agent.shutdown_seconds(options.shutdown_timeout) == seconds


def test_a_rank_that_is_stuck_has_no_longer_than_is_given(tmp_path: Path) -> None:
    text = f"{PRELUDE}signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(60)"
    sends = [("[0] up", signal.SIGTERM)]
    options = ["-n", "1", "--shutdown-timeout", "0"]
    ran = paceline("run", *options, script(tmp_path, text), folder=tmp_path, sends=sends)
    assert "waiting up to 0 s for the ranks to end" in ran.stderr
    assert (ran.code, ran.left) == (143, [])


def test_a_rank_that_is_stuck_is_ended_when_another_fails(tmp_path: Path) -> None:
    # A loop in C, in which no signal reaches Python.
    text = f"{PRELUDE}{FIRST}\n    time.sleep(0.5)\n    raise ValueError\nsum(range(10**12))"
    ran = paceline("run", script(tmp_path, text), folder=tmp_path)
    assert (ran.code, ran.left) == (1, [])
    assert ran.stderr.endswith("ValueError\nrank 0: stopped\n")


def test_ranks_are_started_again_and_both_attempts_told(tmp_path: Path) -> None:
    text = f"{PRELUDE}now, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']\n"
    text += "print(now)\nassert now == '1' or rank == '1', 'first'"
    options = ["-n", "2", "--max-restarts", "1", "--log-dir", "logs", "--redirects", "1:1"]
    ran = paceline("run", *options, script(tmp_path, text), folder=tmp_path)
    assert (ran.code, ran.lines) == (0, ["[0] 0", "[0] 1"])
    assert "AssertionError: first\n" in ran.stderr
    assert ran.stderr.endswith("starting the ranks again (restarts left: 0)\n")
    assert [(tmp_path / f"logs/rank-{rank}/stdout.1.log").read_text() for rank in (0, 1)] == ["1\n"] * 2


def test_after_the_last_restart_the_failure_of_that_start_gives_the_exit_code(tmp_path: Path) -> None:
    text = (
        f"{PRELUDE}{FIRST}\n    sys.exit(3 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))\ntime.sleep(60)"
    )
    ran = paceline("run", "-n", "2", "--max-restarts", "2", script(tmp_path, text), folder=tmp_path)
    assert re.findall(r"exited with code \d|left: \d", ran.stderr) == [
        *("exited with code 3", "left: 1", "exited with code 4", "left: 0", "exited with code 5")
    ]
    assert (ran.code, ran.left) == (5, [])


def test_a_script_spawns_and_forks_processes(tmp_path: Path) -> None:
    text = f"""{PRELUDE}
import dataclasses
import multiprocessing
@dataclasses.dataclass
class Square:
    of: int
def square(x):
    return Square(x * x)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3]))
    os.chdir("/")
    print(len(open(__file__).read()) > 100)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    print(child.exitcode)
"""
    ran = paceline("run", "-n", "1", "--patch", script(tmp_path, text), folder=tmp_path)
    assert (ran.code, ran.lines) == (0, ["[0] [Square(of=9)]", "[0] True", "[0] -15"])


@pytest.mark.parametrize(
    ("child", "words"),
    [("raise ValueError('its own')", "ValueError: its own"), ("sys.exit('its words')", "its words")],
    ids=["raises", "exits"],
)
@pytest.mark.parametrize("code", [0, 3])
def test_the_error_of_a_forked_child_is_shown_as_its_own(
    code: int, child: str, words: str, tmp_path: Path
) -> None:
    text = f"{PRELUDE}if os.fork() == 0:\n    {child}\nos.wait()\nprint('goes on')\nos._exit({code})"
    ran = paceline("run", "-n", "1", script(tmp_path, text), folder=tmp_path)
    assert (ran.code, ran.lines) == (code, ["[0] goes on"])
    assert f"[0] {words}\n" in ran.stderr
    assert ran.stderr.count(words) == 1
    assert "worker.py" not in ran.stderr
    assert ("rank 0 exited with code 3" in ran.stderr) == (code == 3)


def test_a_run_in_a_rank_of_another_leaves_that_ones_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Any = SimpleNamespace(environment={})
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv(FOLDER_VARIABLE, "/somewhere")
    assert agent._record_folder(job, tmp_path) == Path("/somewhere")
    monkeypatch.setenv(FOLDER, "/of another run")
    assert agent._record_folder(job, tmp_path) == tmp_path / "record"
    job.environment[FOLDER_VARIABLE] = "/asked for"
    assert agent._record_folder(job, tmp_path) == Path("/asked for")


def test_a_rank_exits_after_torchs_threads_have_dropped_what_they_hold(tmp_path: Path) -> None:
    ran = paceline("run", "-n", "2", script(tmp_path, EXITS_AT_ONCE), folder=tmp_path)
    assert (ran.code, sorted(ran.lines)) == (0, ["[0] False", "[1] False"])
