"""Every command of the README and the tutorial runs, and prints what the page says."""

import os
import re
import sys
from pathlib import Path

import pytest
from environments import PACKAGES, Environment, run
from pages import ROOT, Command, commands, files, is_shown, link_repository, mentioned

PAGES = ["README.md", "docs/tutorial.md", "docs/from-data-parallel.md"]
# What takes long: the same, cut short. Of what make does, a whole run is elsewhere: the demo's in
# test_examples.py, conformance's in tests/conformance, and the others are steps of ./check.
SHORTENED = {
    "make conformance": "make --dry-run conformance",
    "make demo": "make --dry-run demo",
    "make docs": "make --dry-run docs",
    "make test": "make --dry-run test",
    "make torture": "python tests/support/torture_table.py --only 'tied weights'",
    "python benchmarks/collectives.py": "python benchmarks/collectives.py --quick --worlds 2 --sizes 4KB",
    "python benchmarks/ddp.py": "python benchmarks/ddp.py --quick --models tiny-layers --parts steps",
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return link_repository(tmp_path / "paceline")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables for commands in an environment of their own, which has all that this one has.

    What a page installs comes first in it, so that its commands use that, and not this repository.
    """
    own = Environment(tmp_path / "venv", linked=(PACKAGES, ROOT / "src"))
    paths = [str(own.programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    return own.variables() | {"PATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("page", PAGES)
def test_its_commands_run_and_print_what_it_shows(
    page: str, folder: Path, environment: dict[str, str]
) -> None:
    for name, text in files(ROOT / page).items():
        (folder / name).write_text(text)
    told = commands(ROOT / page)
    if page == "README.md":  # tests/install runs the others with the wheel alone
        told = [command for command in told if not command.line.startswith("paceline ")]
    assert told
    for command in told:
        check(command, folder, environment)


def test_what_the_readme_mentions_runs_too(folder: Path, environment: dict[str, str]) -> None:
    assert mentioned(ROOT / "docs/tutorial.md") == []
    for line in mentioned(ROOT / "README.md"):
        check(Command(line, 0, ()), folder, environment)


def check(command: Command, folder: Path, environment: dict[str, str]) -> None:
    program = " ".join(command.line.split()[:2])  # whatever options the figures were measured with
    line = SHORTENED.get(command.line, SHORTENED.get(program, command.line))
    printed = run(["bash", "-c", line], folder, environment, code=command.code)
    for shown in command.shown:
        assert is_shown(shown, printed), f"{line}: it does not print {shown!r}\n{printed}"


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_what_it_installs_is_pinned_and_leaves_an_editable_install_editable(page: str) -> None:
    [told] = [command.line for command in commands(ROOT / page) if "pip install" in command.line]
    assert "--constraint constraints.txt --editable ." in told.replace("'", "")


def test_one_process_and_two_ranks_of_the_tutorial_learn_the_same(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    for name, text in files(ROOT / "docs/tutorial.md").items():
        (tmp_path / name).write_text(text)
    one, two = (
        [float(percent) for percent in re.findall(r"([\d.]+)% right", run(command, tmp_path, environment))]
        for command in (["python", "train.py"], ["paceline", "run", "-n", "2", "train_ranks.py"])
    )
    assert len(one) == 10
    # Up to rounding, which may move a few points to the other side.
    assert two == pytest.approx(one, abs=0.3)


def test_the_readme_has_commands_beside_the_two() -> None:
    told = [command.line for command in commands(ROOT / "README.md")]
    assert told[:2] == ["make demo", "make test"]
    assert any(line.startswith("paceline") for line in told)


def test_a_line_is_told_from_another_by_more_than_its_numbers() -> None:
    assert is_shown("epoch 4: 99.0% right", "[0] epoch 0: 9.1% right\n")
    assert is_shown("failed (host …):", "rank 1 failed (host a, pid 2):")
    assert not is_shown("epoch 4: 99.0% right", "[0] epoch 0: 9.1% wrong\n")
