"""Examples that know nothing of paceline, on two ranks: with torch's wrapper, and under ``run --patch``."""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch
from running import paceline
from torch import distributed

from paceline.testing import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"


def as_torchrun_tells(rank: int) -> None:
    """Be a rank that was started by torchrun."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in told.items()} | {"TORCHELASTIC_RUN_ID": "test"}


def assert_same_under_patch(name: str, pair: RankPool, folder: Path) -> None:
    """Compare what the example leaves, and make sure that it was our wrapper that trained."""
    script = EXAMPLES / name
    pair.run(_in_rank, script, folder / "torchs.pt")
    arguments = ("--record", "record", str(script), "--epochs", "1", "--save", "ours.pt")
    ran = paceline("run", "--patch", "-n", "2", *arguments, folder=folder, timeout=110)
    assert ran.code == 0, ran.stderr
    recorded = {path.name for path in (folder / "record").iterdir()}
    assert {"rank0-wrapper0-plan0.json", "rank1-wrapper0-plan0.json"} <= recorded
    theirs, ours = (torch.load(folder / file) for file in ("torchs.pt", "ours.pt"))
    assert theirs.keys() == ours.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


def _in_rank(rank: int, script: Path, file: Path) -> None:
    """Run it where the libraries have been imported: a launch of its own would take as long again."""
    as_torchrun_tells(rank)
    arguments = [str(script), "--epochs", "1", "--save", str(file)]
    # The ranks are needed after it.
    kept = mock.patch.object(distributed, "destroy_process_group")
    with mock.patch.object(sys, "argv", arguments), kept:
        runpy.run_path(str(script), run_name="__main__")
