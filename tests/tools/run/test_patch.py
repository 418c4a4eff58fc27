"""torch's wrappers in a script that nobody edits become paceline's, and give the same bits."""

from pathlib import Path

import torch
from running import paceline, script
from training_scripts import SCRIPTS, saved

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
