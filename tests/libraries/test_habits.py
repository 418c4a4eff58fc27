"""Scripts with the habits of well-known training code end with torch's bits, and know nothing of paceline."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from training_scripts import run_script

HABITS = Path(__file__).parent / "habits"
# Each script, and the arguments of its runs, one after the other in one folder.
RUNS = {
    "nanogpt": ("nanogpt", ["--steps=6"]),
    "nanogpt, resumed": ("nanogpt", ["--steps=3"], ["--steps=6", "--resume"]),
    "nanogpt, compiled and resumed": ("nanogpt", ["--steps=3", "--compile"], ["--steps=6", "--resume"]),
    "mingpt": ("mingpt", ["--epochs=1"], ["--epochs=2"]),
    "mingpt, in bfloat16": ("mingpt", ["--epochs=1", "--amp"]),
    "timm": ("timm_train", []),
    "timm, without broadcast": ("timm_train", ["--no-ddp-bb"]),
    "tutorial with snapshots": ("tutorial_snapshots", ["2", "1"], ["4", "1"]),
}


def content(folder: Path) -> dict[str, list[Any]]:
    """What the script saved: the leaves of each file."""
    return {path.name: tree_leaves(torch.load(path, weights_only=False)) for path in folder.iterdir()}


def assert_same(ours: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> None:
    assert ours
    assert ours.keys() == theirs.keys()
    for name, leaves in ours.items():
        assert any(isinstance(leaf, Tensor) for leaf in leaves)
        for mine, other in zip(leaves, theirs[name], strict=True):
            same = torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other
            assert same, name


@pytest.mark.parametrize("habit", RUNS)
def test_a_script_ends_with_torchs_bits(habit: str, tmp_path: Path) -> None:
    name, *runs = RUNS[habit]
    for wrapper in ("torch, no streams", "paceline, patched"):
        folder = tmp_path / wrapper
        folder.mkdir()
        for number, arguments in enumerate(runs):
            recorded = tmp_path / f"{wrapper}, run {number}"
            environ = {"PACELINE_RECORD": str(recorded)}
            run_script(HABITS / f"{name}.py", wrapper, 2, [str(folder), *arguments], environ)
            assert recorded.exists() == (wrapper == "paceline, patched"), "the other's wrapper was used"
    assert_same(content(tmp_path / "paceline, patched"), content(tmp_path / "torch, no streams"))


def test_every_script_is_run() -> None:
    assert {file.stem for file in HABITS.glob("*.py")} == {name for name, *_ in RUNS.values()} | {
        "tiny_gpt",
        "tutorial_spawn",
    }


@pytest.mark.timeout(200)  # four processes that import torch
def test_a_script_that_spawns_its_processes_ends_with_torchs_bits(tmp_path: Path) -> None:
    """It is started with python, as before: a launcher's variables are not for it. Its import is changed."""
    text = (HABITS / "tutorial_spawn.py").read_text()
    assert text.count("from torch.nn.parallel import") == 1
    for name in ("torch", "paceline"):
        script = tmp_path / f"with_{name}.py"
        script.write_text(text.replace("from torch.nn.parallel import", f"from {name}.nn.parallel import"))
        (tmp_path / name).mkdir()
        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = str(found.getsockname()[1])
        environ = {
            "PACELINE_RECORD": str(tmp_path / f"{name}, recorded"),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # no launcher
        }
        run_script(script, "torch, no streams", 1, [str(tmp_path / name), port], environ)
        assert (tmp_path / f"{name}, recorded").exists() == (name == "paceline")
    assert_same(content(tmp_path / "paceline"), content(tmp_path / "torch"))
