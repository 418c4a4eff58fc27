"""Ranks that are started again find nothing in their store that those before them have left."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import restarts
from launcher_runs import free_port
from running import Ran, in_rank, paceline, script

from paceline.testing import run_ranks

# Two ranks leave a key, and fail at the first start.
LEAVES_A_KEY = """
import os, sys
from pathlib import Path
from torch.distributed import TCPStore

store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
print("found", store.check(["left"]))
started = Path(f"started {os.environ['LOCAL_RANK']}")
is_first = not started.exists()
# Before the others are told: the first that fails may end this rank, at any time.
started.touch()
store.set(f"looked {os.environ['RANK']}", "")
store.wait(["looked 0", "looked 1"])
store.set("left", "")
if is_first:
    sys.exit(1)
"""
ON_THIS_HOST = ["--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
TIMEOUT = 180.0


@pytest.mark.parametrize(
    "rendezvous",
    # With is_host, the launcher takes torch's rendezvous also for one host.
    [[], [*ON_THIS_HOST, "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-conf", "is_host=1"]],
    ids=["ours", "torch's"],
)
def test_ranks_of_one_host_have_a_store_for_each_start(rendezvous: list[str], tmp_path: Path) -> None:
    options = ["-n", "2", "--max-restarts", "1", *rendezvous]
    ran = paceline("run", *options, script(tmp_path, LEAVES_A_KEY), folder=tmp_path, timeout=TIMEOUT)
    assert ran.code == 0, ran.stderr
    assert sorted(ran.lines) == ["[0] found False"] * 2 + ["[1] found False"] * 2


def launcher_of_host(host: int, options: list[str], folder: Path) -> Ran:
    """One of two launchers, each with one rank and a folder of its own."""
    own = folder / str(host)
    own.mkdir()
    options = [option.replace("HOST", str(host)) for option in options]
    script(own, LEAVES_A_KEY)
    return in_rank(host, ["run", "-n", "1", "--nnodes", "2", *options, "script.py"], own)


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_ranks_of_two_hosts_have_a_store_for_each_start(rendezvous: str, tmp_path: Path) -> None:
    port = str(free_port())
    options = {
        "c10d": [*ON_THIS_HOST, "--rdzv-endpoint", f"127.0.0.1:{port}"],
        "static": ["--node-rank", "HOST", "--master-addr", "127.0.0.1", "--master-port", port],
    }[rendezvous]
    args = (["--max-restarts", "1", *options], tmp_path)
    hosts = run_ranks(launcher_of_host, 2, args=args, backend=None, timeout=TIMEOUT)
    for ran in hosts:
        assert isinstance(ran, Ran)
        assert ran.code == 0, ran.stderr
        assert [line.partition("] ")[2] for line in ran.lines] == ["found False"] * 2


def test_the_soak_ends_a_launcher_that_ignores_sigterm() -> None:
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-uc", text], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        restarts.end(launcher, 0.1)
    assert launcher.returncode == -signal.SIGKILL
