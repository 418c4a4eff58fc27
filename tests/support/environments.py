"""Virtual environments that hold what a test installs into them, and nothing else."""

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest
from pages import ROOT

DEADLINE_SECONDS = 240
PACKAGES = Path(pytest.__file__).parents[1]  # what the tests themselves use, torch too


class Environment:
    """A virtual environment; ``linked`` folders of packages are visible in it too."""

    def __init__(self, folder: Path, *, linked: tuple[Path, ...] = ()) -> None:
        venv.create(folder, symlinks=True)
        self.programs = folder / "bin"
        self.python = self.programs / "python"
        [self.packages] = folder.glob("lib/python*/site-packages")
        (self.packages / "linked.pth").write_text("".join(f"{path}\n" for path in linked))

    def install(self, *wanted: str | Path) -> None:
        """Install with the versions that this repository pins."""
        # With the pip of the tests. Files are compiled when they are imported; most never are.
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-compile"]
        run([*pip, "--constraint", ROOT / "constraints.txt", *wanted], ROOT)

    def variables(self) -> dict[str, str]:
        """What a shell has in which the environment is active; nothing of the tests' own."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return kept | {"PATH": f"{self.programs}{os.pathsep}/usr/local/bin:/usr/bin:/bin"}


def run(
    command: list[str | Path], folder: Path, variables: Mapping[str, str] | None = None, *, code: int = 0
) -> str:
    """Run a command that must end with that code; returns what it printed."""
    ran = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert ran.returncode == code, f"{' '.join(map(str, command))}\n{ran.stdout}"
    return ran.stdout
