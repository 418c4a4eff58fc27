"""torchft: a replica is killed in backward and comes back, and both replicas end with the same parameters."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import paceline
from paceline.testing import run_ranks

PROGRAMS = Path(sys.executable).parent
PROGRAM = Path(__file__).parents[1] / "support" / "torchft_replica.py"
SECONDS = 170


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse, where replicas meet."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    yield server.address()
    server.shutdown()


def start(folder: Path, replica: int, kind: str, address: str) -> "subprocess.Popen[str]":
    """Start one replica with the launcher, which starts it once more when it dies."""
    patch = ["--patch"] if kind == "torchft's wrapper" else []
    command = [PROGRAMS / "paceline", "run", *patch, "-n", "1", "--max-restarts", "1"]
    return subprocess.Popen(
        [*command, PROGRAM, folder, str(replica), kind],
        env=os.environ | {"TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("kind", ["managed group", "synchronous quorum", "torchft's wrapper"])
def test_a_replica_is_killed_and_comes_back(tmp_path: Path, lighthouse: str, kind: str) -> None:
    replicas = [start(tmp_path, replica, kind, lighthouse) for replica in range(2)]
    try:
        said = [replica.communicate(timeout=SECONDS)[0] for replica in replicas]
    finally:
        for replica in replicas:
            replica.kill()
    assert [replica.returncode for replica in replicas] == [0, 0], "\n\n".join(said)
    survivor, other = (json.loads((tmp_path / f"{replica}.json").read_text()) for replica in range(2))
    assert survivor["parameters"] == other["parameters"]
    assert [world for world, _ in itertools.groupby(survivor["worlds"])][-3:] == [2, 1, 2]
    if kind != "torchft's wrapper":
        assert survivor["lost"] >= 1, "the step in which the other replica died"
        assert min(survivor["compared"], other["compared"]) >= 4


def configured(rank: int, port: int) -> None:
    """A group of torchft's without a manager; its ranks meet again with other ranks in between."""
    from torchft.process_group import ProcessGroupGloo

    group = ProcessGroupGloo(timeout=timedelta(seconds=30))

    def meet(prefix: str, members: list[int]) -> None:
        group.configure(f"localhost:{port}/{prefix}", "test", members.index(rank), len(members))

    meet("first", [0, 1])
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    ddp = paceline.DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.000001)

    def grad(value: float) -> float:
        ddp.zero_grad()
        ddp(torch.full((1, 2), value, dtype=torch.float64)).backward()
        assert net[0].weight.grad is not None
        return float(net[0].weight.grad[0, 0] / net[1].weight.detach()[0, 0])

    assert grad(float(rank)) == 0.5
    assert grad(1.0 + rank) == pytest.approx(1.5, rel=1e-12)
    if rank == 0:
        meet("alone", [0])
        assert grad(7.0) == 7.0
    meet("again", [1, 0])
    assert grad(float(rank)) == 0.5
    weights = [torch.zeros_like(net[0].weight) for _ in range(2)]
    group.allgather(
        [weights], [net[0].weight.detach()], distributed.distributed_c10d.AllgatherOptions()
    ).wait()
    assert torch.equal(*weights), "rank 0's values are everyone's"


def test_a_group_meets_again_with_other_ranks() -> None:
    store: Any = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    run_ranks(configured, 2, args=(store.port,), backend=None)


REFUSED = {
    "join": (lambda ddp: ddp.join(), "ranks may change"),
    "weights": (lambda ddp: ddp.weigh(1.0).__enter__(), "ranks may change"),
    "our hooks": (lambda ddp: ddp.register_comm_hook(None, paceline.hooks.int8()), "use torch's hooks"),
    "sharded": (lambda ddp: paceline.ShardedOptimizer(ddp, torch.optim.SGD, lr=1.0), "may change"),
    "no quorum": (lambda ddp: ddp(torch.ones(1, 2)).sum().backward(), "start a quorum before backward"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_ranks_that_stay_is_refused(what: str) -> None:
    from torchft.process_group import ProcessGroupWrapper

    class Unmet(ProcessGroupWrapper):
        def size(self) -> int:
            return 0

    ddp = paceline.DistributedDataParallel(nn.Linear(2, 2), process_group=Unmet())
    act, text = REFUSED[what]
    with pytest.raises(paceline.PacelineError, match=text):
        act(ddp)
