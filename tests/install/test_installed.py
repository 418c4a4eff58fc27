"""The wheel in an environment of its own: the commands of the README, from another folder, and mypy."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from environments import Environment, run
from pages import ROOT, commands

pytestmark = pytest.mark.timeout(600)
USERS = Path(__file__).parent / "users"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """torch and what the wheel asks for; and Accelerate, which is all that the README uses of its extras."""
    folder = tmp_path_factory.mktemp("installed")
    run([sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT], folder)
    made = Environment(folder / "venv")
    made.install(*folder.glob("*.whl"), "accelerate")
    return made


def test_the_commands_of_the_readme_run_in_another_folder(installed: Environment, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    told = [command.line for command in commands(ROOT / "README.md") if command.line.startswith("paceline ")]
    assert {line.split()[1] for line in told} == {"audit", "bench", "doctor", "plan", "report", "run"}
    for line in told:
        run(["bash", "-c", line], tmp_path, installed.variables())
    assert {*(tmp_path / "build/run").glob("*.html")} == {
        tmp_path / f"build/run/{page}.html" for page in ("plan", "report")
    }


def test_it_is_the_installed_package_that_runs_and_knows_its_version(
    installed: Environment, tmp_path: Path
) -> None:
    asked = "import importlib.metadata, paceline; print(paceline.__file__, paceline.__version__)"
    file, version = run([installed.python, "-c", asked], tmp_path, installed.variables()).split()
    assert Path(file).parents[1] == installed.packages
    assert run([installed.programs / "paceline", "--version"], tmp_path) == f"paceline, version {version}\n"
    assert list(installed.packages.glob(f"paceline-{version}.dist-info"))


def test_a_users_mypy_sees_the_types(installed: Environment, tmp_path: Path) -> None:
    """It finds no mistake in a right program, and each in one whose wrong lines say ``wrong``."""
    shutil.copytree(USERS, tmp_path / "users")
    asked = [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed.python]
    asked += ["--cache-dir", tmp_path / "cache", "--config-file", "", "--no-error-summary"]
    said = run([*asked, "right.py", "wrong.py"], tmp_path / "users", code=1)
    found = re.findall(r"^(\S+):(\d+): error: ", said, re.MULTILINE)
    lines = (USERS / "wrong.py").read_text().splitlines()
    wrong = [("wrong.py", str(number)) for number, line in enumerate(lines, 1) if line.endswith("# wrong")]
    assert wrong
    assert found == wrong, said
