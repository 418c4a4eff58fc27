"""Runs of ray_scenarios.py."""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from running import MARK, marked

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/ray_train.py"
SCENARIOS = Path(__file__).parent / "ray_scenarios.py"
TIMEOUT = 500.0  # for a busy machine: Ray starts some twenty processes that import torch

OURS = re.compile("paceline|plasma|ray")  # names of shared memory; tests that run beside this one have others


@dataclass(frozen=True)
class RayRun:
    """What the scenarios saw, and what was left of them after Ctrl-C.

    Attributes:
        resumed: what ranks saw after they had continued a training; a list of each rank's.
        failures: by rank, the type and the text of the error that ended a training.
        notes: what happened on the workers.
        code: the exit code after Ctrl-C.
        left: processes that Ctrl-C did not end: of the first node all, and the workers of the second.
        memory: what is left in /dev/shm.
    """

    resumed: dict[str, list[Any]]
    failures: dict[str, list[str]]
    notes: list[str]
    code: int
    left: list[int]
    memory: list[str]


def environment(folder: Path) -> dict[str, str]:
    """For a Ray that keeps to itself: its files are in ``folder``, and it tells nobody anything."""
    return os.environ | {
        MARK: str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLE.parent), str(SCENARIOS.parent)]),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_DEDUP_LOGS": "0",  # lines of two workers that differ in a number alone would be shown as one
        "RAY_TMPDIR": str(folder),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less per training
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def run_scenarios() -> RayRun:
    # Ray's sockets are in this folder, and the length of their paths is limited.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        notes, output = folder / "notes", folder / "output"
        with output.open("w") as file:
            ran = subprocess.Popen(
                [sys.executable, SCENARIOS, folder],
                env=environment(folder),
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            _wait_for("rank 0 of 2: did an epoch", ran, notes, output)
            os.killpg(ran.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
            return RayRun(
                json.loads((folder / "resumed.json").read_text()),
                json.loads((folder / "failures.json").read_text()),
                notes.read_text().splitlines(),
                ran.wait(60),
                _left(folder),
                [path.name for path in Path("/dev/shm").iterdir() if OURS.search(path.name)],
            )
        finally:
            for pid in [*marked(str(folder)), *marked(str(folder / "node"))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _wait_for(text: str, ran: subprocess.Popen[bytes], notes: Path, output: Path) -> None:
    until = time.monotonic() + TIMEOUT
    while not notes.exists() or text not in notes.read_text():
        told = f"{text!r} has not appeared in the notes:\n{notes.exists() and notes.read_text()}"
        assert ran.poll() is None, f"the scenarios ended early; {told}\n{output.read_text()}"
        assert time.monotonic() < until, f"{told}\n{output.read_text()}"
        time.sleep(0.1)


def _left(folder: Path) -> list[int]:
    """Processes that do not end, though Ray's own may take a while."""
    workers = [int(path.name) for path in (folder / "workers").iterdir()]
    until = time.monotonic() + 20
    while left := [*marked(str(folder)), *(pid for pid in workers if Path(f"/proc/{pid}").exists())]:
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return left
