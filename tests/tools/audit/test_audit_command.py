"""``paceline audit``: the first tensor and step at which checkpoints, runs or ranks differ."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from paceline import DistributedDataParallel
from paceline.recording.audit_file import AuditWriter
from paceline.testing import run_ranks
from paceline.tools.main import main


def audit(*paths: Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["audit", *map(str, paths)])
    return result.exit_code, result.output


def checkpoint() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_equal_checkpoints_do_not_differ(tmp_path: Path) -> None:
    paths = [saved(tmp_path / name, checkpoint()) for name in "ab"]
    assert audit(*paths) == (0, "nothing differs\n")


def test_the_first_tensor_is_named_with_its_first_element(tmp_path: Path) -> None:
    other = checkpoint()
    other["model"]["0.weight"][1, 2] = -0.0
    other["optimizer"]["state"][0]["exp_avg"][0, 0] += 1
    other["epoch"] = 4
    code, output = audit(saved(tmp_path / "a", checkpoint()), saved(tmp_path / "b", other))
    first, second, third = output.splitlines()
    assert code == 1
    assert first.startswith("model.0.weight differs in 1 of 12 elements, the first at [1, 2]: ")
    assert second.startswith("optimizer.state.0.exp_avg differs in 1 of 12 elements")
    assert third == "epoch is 3 in the first and 4 in the second"


def test_nan_and_missing_and_other_shapes(tmp_path: Path) -> None:
    one = {"nan": torch.tensor([torch.nan]), "gone": 1, "shape": torch.zeros(2), "empty": torch.empty(0)}
    other = {"nan": torch.tensor([torch.nan]), "shape": torch.zeros(3), "new": 2, "empty": torch.empty(0)}
    code, output = audit(saved(tmp_path / "a", one), saved(tmp_path / "b", other))
    assert code == 1
    assert output.splitlines() == [
        "gone is in the first checkpoint only",
        "shape is torch.float32 [2] in the first and torch.float32 [3] in the second",
        "new is in the second checkpoint only",
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folders_of_distributed_checkpoints(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for name, value in (("a", 1.0), ("b", 2.0)):
        dcp.save({"w": torch.full((3,), value)}, checkpoint_id=tmp_path / name, no_dist=True)
    assert audit(tmp_path / "a", tmp_path / "a")[0] == 0
    assert "w differs in 3 of 3 elements" in audit(tmp_path / "a", tmp_path / "b")[1]


class Exploit:
    def __reduce__(self) -> Any:
        return print, ("ran",)


def test_code_in_a_checkpoint_is_not_run_and_nonsense_is_refused(tmp_path: Path) -> None:
    paths = [saved(tmp_path / name, Exploit()) for name in "ab"]
    code, output = audit(*paths)
    assert code == 2
    assert "the checkpoint cannot be read" in output
    (tmp_path / "c").write_text("nonsense")
    assert audit(tmp_path / "c", tmp_path / "c")[0] == 2
    assert audit(tmp_path)[0] == 2
    assert audit(paths[0])[0] == 2


def train(rank: int, folder: str, seed: int, flipped_at: int, audited: str) -> None:
    import os

    os.environ["PACELINE_RECORD"] = folder
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ddp = DistributedDataParallel(net, audit=audited)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(seed)
    for step in range(40):
        if step == flipped_at and rank == 1:
            net[0].bias.data.view(torch.int32)[0] ^= 1 << 20
        ddp(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:replicas differ")
def test_the_ranks_of_a_run(tmp_path: Path) -> None:
    run_ranks(train, 2, args=(str(tmp_path / "good"), 1, -1, "warn"))
    assert audit(tmp_path / "good") == (0, "nothing differs\n")
    run_ranks(train, 2, args=(str(tmp_path / "bad"), 1, 20, "heal"))
    code, output = audit(tmp_path / "bad")
    first, told = output.splitlines()
    assert code == 1
    assert first.startswith("rank 0 and rank 1 differ in step 3")
    assert "(equal in step 1" in first
    assert "0.bias" in first
    assert told.startswith("told in the run: replicas differ: 0.bias")


def test_two_runs(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_ranks(train, 1, args=(str(tmp_path / name), seed, -1, "warn"))
    assert audit(tmp_path / "a", tmp_path / "b") == (0, "nothing differs\n")
    code, output = audit(tmp_path / "a", tmp_path / "c")
    assert code == 1
    assert output.startswith(
        "rank 0 of the first run and rank 0 of the second differ in step 16 (equal in step 0)"
    )


def test_names_from_a_file_cannot_send_escape_sequences(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = AuditWriter(tmp_path, rank=rank, wrapper=0)
        writer.write_layout([["\x1b[2Jw"]])
        writer.write_step(0, 0, digest=bytes([rank]) * 8, options=b"o" * 8, hashes=[rank])
        writer.close()
    code, output = audit(tmp_path)
    assert code == 1
    assert "\x1b" not in output
    assert "?[2Jw" in output
