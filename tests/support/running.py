"""The command ``paceline`` in a process of its own, started from one that has imported torch already."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from paceline.testing import forkserver, run_ranks

# What the command imports takes a quarter of a second, which each of its processes would spend anew.
forkserver.PRELOADED = (*forkserver.PRELOADED, "paceline.tools.main")

MARK = "PACELINE_TEST_FOLDER"
TIMEOUT = 40.0
# A program that exits while a thread of gloo has the only reference to a collective. The thread needs the
# interpreter once for each tensor, and the loop leaves it none.
EXITS_AT_ONCE = """
import sys, time
import torch
from torch import distributed

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
tensors = [torch.ones(1) for _ in range(2000)]
sys.setswitchinterval(100)
distributed.group.WORLD.allreduce_coalesced(tensors)
until = time.monotonic() + 0.2
while time.monotonic() < until:
    pass
print("paceline" in sys.modules)
"""


@dataclass(frozen=True)
class Ran:
    """How the command ended, what it printed, and the processes that it left."""

    code: int
    stdout: str
    stderr: str
    left: list[int]

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()


def paceline(
    *arguments: str,
    folder: Path,
    sends: Sequence[tuple[str, signal.Signals]] = (),
    timeout: float = TIMEOUT,
    environment: Mapping[str, str] | None = None,
) -> Ran:
    """Run ``paceline`` in ``folder``; each signal is sent once its text has appeared."""
    [ran] = run_ranks(in_rank, 1, args=(arguments, folder, sends, environment), backend=None, timeout=timeout)
    assert isinstance(ran, Ran)
    return ran


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def in_rank(
    _: int,
    arguments: Sequence[str],
    folder: Path,
    sends: Sequence[tuple[str, signal.Signals]] = (),
    environment: Mapping[str, str] | None = None,
) -> Ran:
    """The same, from a rank that may have prepared what the command is to find."""
    out, err = folder / "stdout", folder / "stderr"
    pid = os.fork()
    if pid == 0:
        _be_the_command(arguments, folder, out, err, environment or {})
    for text, signum in sends:
        _wait_for(text, out, err)
        os.kill(pid, signum)
    _, status = os.waitpid(pid, 0)
    printed = without_gloos(out.read_text())
    return Ran(os.waitstatus_to_exitcode(status), printed, err.read_text(), marked(str(folder)))


def without_gloos(text: str) -> str:
    """What was printed, without gloo's lines about who is connected, which some versions of torch have."""
    return "".join(line for line in text.splitlines(keepends=True) if "[Gloo] Rank" not in line)


def _be_the_command(
    arguments: Sequence[str], folder: Path, out: Path, err: Path, environment: Mapping[str, str]
) -> NoReturn:
    code = 99
    try:
        os.chdir(folder)
        os.environ[MARK] = str(folder)
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        from paceline.tools.main import main

        main(list(arguments), prog_name="paceline")
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 98
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait_for(text: str, *files: Path) -> None:
    until = time.monotonic() + TIMEOUT / 2
    while not any(file.exists() and text in file.read_text() for file in files):
        assert time.monotonic() < until, f"{text!r} has not appeared"
        time.sleep(0.02)


def marked(folder: str) -> list[int]:
    """Processes of the command, other than this one."""
    mark, found = f"{MARK}={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                found += [int(entry.name)] if mark in (entry / "environ").read_bytes().split(b"\0") else []
            except OSError:
                continue
    return found
