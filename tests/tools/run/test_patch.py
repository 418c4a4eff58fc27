"""torch's wrappers in a script that nobody edits become paceline's, and give the same bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from environments import PACKAGES, Environment
from pages import ROOT
from running import paceline, script
from training_scripts import SCRIPTS, saved

from paceline.tools.run.command import NOTHING_PATCHED
from paceline.tools.run.patch_torch import python_path

# Runs a script that says nothing of its wrapper, and says what the names mean, before torch is imported in
# this process and in one that it spawns.
TELLING = """
import multiprocessing
import os
import runpy
import sys

def spawned():
    assert "torch" not in sys.modules
    from torch.nn.parallel import DistributedDataParallel
    return DistributedDataParallel.__module__

if __name__ == "__main__":
    assert "torch" not in sys.modules
    if os.environ["RANK"] == "0":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print("spawned", pool.apply(spawned))
    from torch import nn
    wrappers = [nn.parallel.DistributedDataParallel, nn.parallel.distributed.DistributedDataParallel]
    print(*(wrapper.__module__ for wrapper in wrappers))
    names = [nn.DataParallel, nn.parallel.DataParallel, nn.parallel.data_parallel]
    print(*(name.__module__ for name in names))
    heavy = ["click", "rich", "cloudpickle", "torch.distributed.elastic"]
    print("imported", [name for name in heavy if name in sys.modules])
    folder, name = os.path.split(sys.argv[1])
    sys.path.insert(0, folder)
    del sys.argv[0]
    names = runpy.run_path(f"{folder}/{name}", run_name="__main__")
    print(type(names["model"]).__module__)
"""


def test_a_script_ends_with_the_parameters_of_torchs_wrapper(tmp_path: Path) -> None:
    folder = tmp_path / "paceline"
    folder.mkdir()
    plain = str(SCRIPTS / "plain.py")
    telling = script(tmp_path, TELLING)
    # Three processes import torch, one of them after another has.
    ran = paceline("run", "--patch", "-n", "2", telling, plain, str(folder), folder=tmp_path, timeout=90.0)
    assert ran.code == 0, ran.stderr
    assert NOTHING_PATCHED not in ran.stderr
    said = [
        "paceline.ddp.wrapper paceline.ddp.wrapper",
        "paceline.data_parallel.wrapper paceline.data_parallel.wrapper paceline.data_parallel.wrapper",
        "imported []",
        "paceline.ddp.wrapper",
    ]
    expected = saved("plain", "torch", 2, tmp_path / "torch")
    for rank, lines in enumerate([["spawned paceline.ddp.wrapper", *said], said]):
        assert [line for line in ran.lines if line.startswith(f"[{rank}]")] == [
            f"[{rank}] {line}" for line in lines
        ]
        theirs, ours = expected[rank], torch.load(folder / f"{rank}.pt")
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def on_path(*folders: Path) -> str:
    """The variable PYTHONPATH with these folders first."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


IMPORTED_BEFORE = """
import sys
assert "torch" in sys.modules
from torch.nn import DataParallel, Linear
print(type(DataParallel(Linear(1, 1))).__module__)
"""
PATCHED = "[0] paceline.data_parallel.wrapper"


def test_torch_is_patched_that_a_sitecustomize_has_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("from torch.nn import DataParallel")
    variables = {"PYTHONPATH": on_path(tmp_path)}
    target = script(tmp_path, IMPORTED_BEFORE)
    ran = paceline("run", "--patch", "-n", "1", target, folder=tmp_path, environment=variables, timeout=90.0)
    assert (ran.code, ran.lines, ran.stderr) == (0, [PATCHED], "")


def test_torch_is_patched_that_a_pth_file_has_imported(tmp_path: Path) -> None:
    python = Environment(tmp_path / "venv", linked=(PACKAGES, ROOT / "src"))
    (python.packages / "then.pth").write_text("import torch.nn.parallel")
    variables = {"PYTHON_EXEC": str(python.python)}
    target = script(tmp_path, IMPORTED_BEFORE)
    ran = paceline("run", "--patch", "-n", "1", target, folder=tmp_path, environment=variables, timeout=90.0)
    assert (ran.code, ran.lines, ran.stderr) == (0, [PATCHED], "")


def test_a_process_that_the_script_starts_is_patched(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        "from torch.nn import DataParallel, Linear\nprint(type(DataParallel(Linear(1, 1))).__module__)"
    )
    starts = 'import subprocess, sys\nsubprocess.run([sys.executable, "child.py"], check=True)'
    ran = paceline("run", "--patch", "-n", "1", script(tmp_path, starts), folder=tmp_path, timeout=90.0)
    assert (ran.code, ran.lines, ran.stderr) == (0, [PATCHED], "")


def test_a_run_that_makes_no_wrapper_says_so(tmp_path: Path) -> None:
    ran = paceline("run", "--patch", "-n", "2", script(tmp_path, "pass"), folder=tmp_path)
    assert (ran.code, ran.stderr) == (0, f"paceline: {NOTHING_PATCHED}\n")


@pytest.mark.parametrize(
    ("text", "sends"),
    [
        ("raise ValueError('first')", []),
        ("import time; print('up'); time.sleep(60)", [("[0] up", signal.SIGINT)]),
    ],
    ids=["failure", "signal"],
)
def test_of_a_run_that_did_not_end_by_itself_only_the_reason_is_told(
    text: str, sends: list[tuple[str, signal.Signals]], tmp_path: Path
) -> None:
    options = ["--patch", "-n", "1"]
    ran = paceline("run", *options, script(tmp_path, text), folder=tmp_path, sends=sends)
    assert ran.code != 0
    assert NOTHING_PATCHED not in ran.stderr


@pytest.mark.parametrize(
    "own",
    [None, "import sys; sys.path.append('own')", "raise ValueError('own')", "import nosuch"],
    ids=["none", "good", "bad", "incomplete"],
)
def test_the_users_own_sitecustomize_has_its_effect(own: str | None, tmp_path: Path) -> None:
    if own is not None:
        (tmp_path / "sitecustomize.py").write_text(own)
    assert started(python_path(on_path(tmp_path))) == started(on_path(tmp_path))


def started(path: str) -> str:
    """What a Python with this PYTHONPATH finds and prints."""
    command = [sys.executable, "-c", "import sys; print(sys.path)"]
    variables = os.environ | {"PYTHONPATH": path}
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout + ran.stderr


def test_a_python_without_paceline_says_so_and_keeps_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('torch')")
    ran = subprocess.run(
        [sys._base_executable, "-c", "import torch"],  # type: ignore[attr-defined]
        env={"PYTHONPATH": python_path(str(tmp_path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (0, "torch\n")
    [line] = ran.stderr.splitlines()
    assert line.startswith("paceline: --patch has no effect in this process: No module named 'paceline'")


def test_a_rank_that_raises_is_told_before_those_that_lose_it(tmp_path: Path) -> None:
    # paceline is imported, because with torch alone a process may abort when it exits after a collective.
    text = """
import os, torch, paceline
torch.distributed.init_process_group("gloo")
for step in range(10**9):
    if step == 3 and os.environ["RANK"] == "1":
        raise ValueError("in step three")
    torch.distributed.all_reduce(torch.ones(2))
"""
    ran = paceline("run", "-n", "2", script(tmp_path, text), folder=tmp_path)
    assert (ran.code, ran.stdout, ran.left) == (1, "", [])
    first, *trace, other = ran.stderr.splitlines()
    assert first.startswith("paceline: rank 1 failed (")
    assert trace[0] == "  Traceback (most recent call last):"
    assert trace[-1] == "  ValueError: in step three"
    # Ended, if the agent was faster than the news of the lost connection.
    is_told = other.startswith("rank 0: RuntimeError: ") and other.endswith("(because another rank failed)")
    assert is_told or other == "rank 0: stopped"
