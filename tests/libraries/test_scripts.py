"""Scripts that know nothing of paceline end with the same bits under torchrun and under ``run --patch``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = Path(sys.executable).parent
TORCHRUN = [PROGRAMS / "torchrun", "--standalone", "--nproc-per-node", "2"]
PACELINE = [PROGRAMS / "paceline", "run", "--patch", "-n", "2", "--record", "record"]
# The same for both, since sums depend on it.
THREADS = {"OMP_NUM_THREADS": "1"}
# Now and then torch alone ends so, after a training that went well: see Note [Works that gloo drops].
TORCHS_ABORT = "terminate called without an active exception"


@pytest.mark.timeout(300)  # two launches or more, that import a large library
@pytest.mark.parametrize("name", ["accelerate_loop", "lightning_fit", "transformers_trainer"])
def test_it_ends_with_the_parameters_that_torchrun_gives(name: str, tmp_path: Path) -> None:
    theirs, ours = (saved(launcher, name, tmp_path) for launcher in (TORCHRUN, PACELINE))
    assert theirs.keys() == ours.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key
    recorded = {path.name for path in (tmp_path / "record").iterdir()}
    assert {"rank0-wrapper0-plan0.json", "rank1-wrapper0-plan0.json"} <= recorded, "our wrapper was not used"


def saved(launcher: list[Path | str], name: str, folder: Path) -> dict[str, Tensor]:
    command = [*launcher, EXAMPLES / f"{name}.py", "--epochs", "1", "--save", "net.pt"]
    ran = run(command, folder)
    while launcher is TORCHRUN and ran.returncode and TORCHS_ABORT in ran.stderr:
        ran = run(command, folder)
    assert ran.returncode == 0, ran.stderr
    parameters: dict[str, Tensor] = torch.load(folder / "net.pt")
    (folder / "net.pt").unlink()
    return parameters


def run(command: list[Path | str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=folder, env=os.environ | THREADS, capture_output=True, text=True, timeout=100
    )
