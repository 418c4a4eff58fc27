"""``paceline run --heal`` of a script whose ranks kill themselves, and what a quiet run of it gives."""

import functools
import json
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from running import Ran, paceline

SCRIPT = Path(__file__).parent / "launcher_scripts" / "healed.py"
SECONDS = 90.0


def heal(
    folder: Path,
    *arguments: str,
    plan: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    sends: Sequence[tuple[str, signal.Signals]] = (),
) -> Ran:
    """``paceline run`` of the script; ``plan`` says which rank is killed when."""
    shutil.copy(SCRIPT, folder)
    environment = {"PLAN": json.dumps(plan or {}), "OPTIONS": json.dumps(options or {})}
    command = ("run", *arguments, SCRIPT.name)
    return paceline(*command, folder=folder, sends=sends, timeout=SECONDS, environment=environment)


def results(ran: Ran) -> list[str]:
    """What each rank printed at its end."""
    return re.findall(r"rank \d of \d: .*", ran.stdout)


@functools.cache
def quiet() -> str:
    """Steps and sha256 of a run on one rank to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        ran = heal(Path(folder), "-n", "1")
    assert ran.code == 0, ran.stderr
    return results(ran)[0].partition(": ")[2]


def check_ended_well(ran: Ran, world: int) -> None:
    assert (ran.code, ran.left) == (0, []), ran.stderr
    assert sorted(results(ran)) == [f"rank {rank} of {world}: {quiet()}" for rank in range(world)]
