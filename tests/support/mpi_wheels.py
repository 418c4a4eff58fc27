"""The programs of Open MPI and MPICH from their wheels, in a folder each: both have an ``mpirun``."""

import fcntl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mpi"
INSTALL_SECONDS = 100


class MissingLauncherError(Exception):
    """A launcher that cannot be had on this machine, with the reason."""


def mpirun(wheel: str) -> str:
    """The path of an MPI's ``mpirun``; it is installed when it is first asked for."""
    program = FOLDER / wheel / "bin" / "mpirun"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{wheel}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes may ask at once
        if not program.exists():
            _install(wheel)
    return str(program)


def _install(wheel: str) -> None:
    # A prefix, because a target would lose the libraries that a wheel has beside its programs.
    options = ["--quiet", "--no-deps", "--constraint", str(ROOT / "constraints.txt")]
    command = [sys.executable, "-m", "pip", "install", *options, "--prefix", str(FOLDER / wheel), wheel]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise MissingLauncherError(f"pip did not install {wheel} in {INSTALL_SECONDS} s") from error
    if ran.returncode:
        raise MissingLauncherError(f"pip cannot install {wheel}: {ran.stderr.strip().splitlines()[-1:]}")
