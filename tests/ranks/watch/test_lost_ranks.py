"""A rank that has ended: named, and no other, on every rank, wherever the others wait for it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.errors import CollectiveError, StepError
from paceline.testing import RanksError, rank_answers, run_ranks
from paceline.watch.rank_page import read_pages

WORLD = 3
KILLED = 1


class Dies(nn.Module):
    """Kills its rank in one step: before its forward, inside it, or in backward."""

    def __init__(self, rank: int, where: str) -> None:
        super().__init__()
        self.net = nn.BatchNorm1d(4) if where == "buffers" else nn.Linear(4, 4)
        self._is_killed = rank == KILLED
        self._where = where

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        if step == 3 and self._is_killed and self._where != "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        output = self.net(x)
        if step == 3 and self._is_killed:
            output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return output


def train(rank: int, where: str, transport: str, notes: Path) -> None:
    ddp = DistributedDataParallel(Dies(rank, where), transport=transport)  # type: ignore[arg-type]
    time.sleep(1)  # ranks open each other's pages
    inputs = [torch.ones(2, 4)] * (5 if where != "join" or rank else 2)
    try:
        if where == "join":
            with ddp.join():
                run(ddp, inputs, rank)
        else:
            run(ddp, inputs, rank)
    except (StepError, CollectiveError) as error:
        (notes / str(rank)).write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # the others hear of this one's end too, and must not blame it


def run(ddp: DistributedDataParallel, inputs: list[torch.Tensor], rank: int) -> None:
    for step, x in enumerate(inputs):
        if ddp.module._where == "buffers" and step == 3 and rank == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(x, step).sum().backward()


@pytest.mark.parametrize("transport", ["auto", "c10d"])
@pytest.mark.parametrize("where", ["forward", "backward", "buffers", "join"])
def test_a_killed_rank_is_named_alone_on_every_rank(
    where: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_answers, "GRACE_SECONDS", 30.0)
    with pytest.raises(RanksError):
        run_ranks(train, WORLD, args=(where, transport, tmp_path), timeout=60.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]
    for path in tmp_path.iterdir():
        said = path.read_text()
        assert f"rank {KILLED} is missing: it has ended" in said, said
        assert not any(f"rank {other} is missing" in said for other in range(WORLD) if other != KILLED), said


RAISES = """
import sys, time, torch
from torch import nn
from paceline import DistributedDataParallel
rank, store = int(sys.argv[1]), torch.distributed.FileStore(sys.argv[2], 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), transport=sys.argv[3])
time.sleep(1)  # ranks open each other's pages

def loss_of(output, step):
    if step == 3 and rank == 1:
        raise LookupError("a bad batch")
    return output.sum()

for step in range(5):
    loss_of(ddp(torch.ones(2, 4)), step).backward()
"""


@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_a_rank_that_ends_by_an_exception_outside_of_the_wrapper_says_which_and_where(
    transport: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(RAISES)
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "store", transport],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert re.search(r"rank 1 is missing: it [a-z ]+ by LookupError\('a bad batch'\)", said[0]), said[0]
    assert f"({script}:12 in loss_of)" in said[0], said[0]


def test_what_ends_a_rank_is_on_its_page_under_the_launcher_too(tmp_path: Path) -> None:
    script, record = tmp_path / "script.py", tmp_path / "record"
    script.write_text(
        RAISES.replace("sys.argv[1]", "os.environ['RANK']").replace("import sys", "import os, sys")
    )
    command = [Path(sys.executable).with_name("paceline"), "run", "-n", "2", "--record", record, script]
    subprocess.run([*command, "", tmp_path / "store", "auto"], check=False, timeout=100, capture_output=True)
    raised = {page.rank: page.told.text for page in read_pages(record)}
    assert raised[1] == f"LookupError('a bad batch') ({script}:12 in loss_of)"
