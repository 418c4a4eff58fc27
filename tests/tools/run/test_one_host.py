"""Where the stores of a run listen."""

import socket
from pathlib import Path
from typing import Any

import pytest
from running import paceline, script
from torch.distributed.elastic.rendezvous import RendezvousParameters

from paceline.tools.run.one_host import NO_SHARED_STORE, one_host_port

# Prints where the launcher and the rank itself listen, while a group is in use.
LISTENERS = """
import os, sys
from pathlib import Path
import torch
from torch import distributed

def listeners(pid):
    files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in files}

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    total = torch.ones(1)
    distributed.all_reduce(total)
    sys.stdout.write(f"launcher {sorted(listeners(os.getppid()))}\\n")
    sys.stdout.write(f"everywhere {[each for each in listeners(os.getpid()) if set(each) == {'0'}]}\\n")
    sys.stdout.write(f"meets at {os.environ['MASTER_ADDR']}, sum {total.item()}\\n")
    distributed.barrier()
    distributed.destroy_process_group()
    if os.environ["TORCHELASTIC_MAX_RESTARTS"] > os.environ["TORCHELASTIC_RESTART_COUNT"]:
        sys.exit(1)
"""
LOOPBACK = "['0100007F']"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--standalone"],
        ["--nnodes", "1:1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400"],
        ["--master-port", "FREE"],
    ],
    ids=["no options", "standalone", "c10d", "static"],
)
def test_the_stores_of_one_host_listen_on_the_loopback_only(options: list[str], tmp_path: Path) -> None:
    options = [free_port() if option == "FREE" else option for option in options]
    ran = paceline("run", "-n", "2", *options, script(tmp_path, LISTENERS), folder=tmp_path)
    said = [f"launcher {LOOPBACK}", "everywhere []", "meets at 127.0.0.1, sum 2.0"]
    assert sorted(ran.lines) == sorted(f"[{rank}] {line}" for rank in range(2) for line in said), ran.stderr
    assert ran.code == 0


def test_ranks_that_are_started_again_meet_anew(tmp_path: Path) -> None:
    options = ["-n", "2", "--max-restarts", "1"]
    ran = paceline("run", *options, script(tmp_path, LISTENERS), folder=tmp_path)
    assert ran.code == 0, ran.stderr
    assert ran.lines.count("[1] meets at 127.0.0.1, sum 2.0") == 2


@pytest.mark.parametrize(
    ("given", "port"),
    [
        ({}, 0),
        ({"endpoint": "localhost:29400"}, 0),
        ({"endpoint": ""}, 0),
        ({"backend": "static", "endpoint": "127.0.0.1:29500", "rank": 0}, 29500),
        ({"backend": "static", "endpoint": "[::1]:29500", "rank": 0}, 29500),
        ({"local_addr": "127.0.0.1"}, 0),
        ({"max_nodes": 2}, None),
        ({"endpoint": "first-host:29400"}, None),
        ({"local_addr": "10.0.0.1"}, None),
        ({"backend": "etcd"}, None),
        ({"store_type": "file", "endpoint": "/tmp/file"}, None),
        ({"is_host": "0"}, None),
    ],
)
def test_the_own_store_is_for_one_host_whose_endpoint_is_the_loopback(
    given: dict[str, Any], port: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"backend": "c10d", "endpoint": "localhost:0", "run_id": "run", "min_nodes": 1, "max_nodes": 1}
    parameters = RendezvousParameters(**(usual | given))
    monkeypatch.delenv(NO_SHARED_STORE, raising=False)
    assert one_host_port(parameters) == port
    monkeypatch.setenv(NO_SHARED_STORE, "1")
    assert one_host_port(parameters) is None
