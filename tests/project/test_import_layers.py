"""The import layers of pyproject.toml are checked: a broken rule fails."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(copied: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    environment = {"PYTHONPATH": str(copied / "src")}
    return subprocess.run(command, cwd=copied, env=environment, capture_output=True, text=True, timeout=60)


def ruff(source: str, path: str) -> subprocess.CompletedProcess[str]:
    command = [
        Path(sys.executable).with_name("ruff"),
        "check",
        "--select=TID251",
        "--stdin-filename",
        path,
        "-",
    ]
    return subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, timeout=60)


def append(path: Path, line: str) -> None:
    path.write_text(f"{path.read_text()}\n{line}\n")


def test_the_package_passes_the_checks(copied: Path) -> None:
    assert lint_imports(copied).returncode == 0


def test_an_import_from_a_layer_above_is_refused(copied: Path) -> None:
    append(copied / "src/paceline/tensors/tree.py", "import paceline.data_parallel.wrapper")
    result = lint_imports(copied)
    assert result.returncode == 1
    assert "paceline.tensors is not allowed to import paceline.data_parallel" in result.stdout


def test_an_import_cycle_inside_a_folder_is_refused(copied: Path) -> None:
    append(copied / "src/paceline/data_parallel/threads.py", "import paceline.data_parallel.backward")
    result = lint_imports(copied)
    assert result.returncode == 1
    assert "No import cycles between siblings BROKEN" in result.stdout


def test_a_folder_that_no_layer_lists_is_refused(copied: Path) -> None:
    (copied / "src/paceline/attic.py").write_text("")
    result = lint_imports(copied)
    assert result.returncode == 1
    assert "attic" in result.stdout


@pytest.mark.parametrize("line", ["import torch.distributed", "from torch import distributed"])
def test_torch_distributed_is_refused_outside_comm(line: str) -> None:
    result = ruff(f"{line}\n", "src/paceline/data_parallel/new.py")
    assert result.returncode == 1
    assert "imported only inside paceline.comm" in result.stdout
    assert ruff(f"{line}\n", "src/paceline/comm/new.py").returncode == 0
