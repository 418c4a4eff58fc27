"""One replica of a job under torchft's manager: a program that tests start, kill and start again.

Usage: torchft_replica.py FOLDER REPLICA KIND, with TORCHFT_LIGHTHOUSE and torchrun's variables set.

Once both replicas have trained together, replica 1 kills itself in a backward. It comes back after replica 0
has trained alone. Then both train for some more steps together, and write what they have to FOLDER. In each
step the gradients are compared with those of one process on the batches of the replicas that take part.

torchft's own wrapper tells nobody which parameters a replica has used, so one replica's unused parameters get
no gradient there, under torch's wrapper too: with it both replicas use the same layers.
"""

import contextlib
import copy
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchft import Manager, Optimizer
from torchft.ddp import DistributedDataParallel as TorchftWrapper
from torchft.process_group import ManagedProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo

import paceline

TIMEOUT = timedelta(seconds=60)
DIES_AFTER = 2
STEPS_TOGETHER = 6
DEADLINE = time.monotonic() + 150


class Net(nn.Module):
    """Layers for all replicas, one for each replica alone, and buffers."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        torch.manual_seed(replica)  # the manager gives one replica's values to the others
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.own = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 2)
        self.double()

    def forward(self, x: Tensor, layer: int) -> Tensor:
        return self.last(self.own[layer](self.norm(self.first(x)).tanh()))


def loss(net: nn.Module, replica: int, step: int, layer: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return net(x, layer).square().mean()


def expected(net: Net, replicas: Sequence[int], step: int) -> list[Tensor | None]:
    """The gradients of one process on the batches of some replicas."""
    alone = copy.deepcopy(net)
    alone.zero_grad()
    for replica in replicas:
        loss(alone, replica, step, replica).backward()
    return [None if each.grad is None else each.grad / len(replicas) for each in alone.parameters()]


def wrap(kind: str, net: Net, manager: Manager) -> nn.Module:
    options: dict[str, Any] = {"bucket_cap_mb": 0.0001}
    if kind == "torchft's wrapper":
        wrapper = TorchftWrapper(manager, net, **options)
        assert isinstance(wrapper, paceline.DistributedDataParallel), "started without --patch"
        return wrapper
    return paceline.DistributedDataParallel(net, process_group=ManagedProcessGroup(manager), **options)


def main(folder: Path, replica: int, kind: str) -> None:
    torch.set_num_threads(1)
    has_died = (folder / "died").exists()
    if replica == 1 and has_died:
        wait_for(folder / "alone")
    layer = 0 if kind == "torchft's wrapper" else replica
    net = Net(replica)
    inner = torch.optim.Adam(net.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    group = (ProcessGroupBabyGloo if kind == "another process" else ProcessGroupGloo)(timeout=TIMEOUT)
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica{replica}",
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        use_async_quorum=kind != "synchronous quorum",
    )
    optimizer = Optimizer(manager, inner)
    wrapper = wrap(kind, net, manager)
    if replica == 1 and has_died:
        (folder / "stop").touch()
    said: dict[str, Any] = {"worlds": [], "lost": 0, "compared": 0}
    stop_at = None
    while manager.current_step() != stop_at:
        assert time.monotonic() < DEADLINE, said
        dies = replica == 1 and said["worlds"].count(2) == DIES_AFTER and not has_died
        if dies and kind == "torchft's wrapper":  # its hook has an assertion that fails with a collective
            die(folder)
        optimizer.zero_grad()
        step = manager.current_step()
        if dies:
            net.own[1].weight.register_hook(lambda _: die(folder))
        before = copy.deepcopy(net)
        loss(wrapper, replica, step, layer).backward()
        grads = [None if each.grad is None else each.grad.clone() for each in net.parameters()]
        takes_part = manager.is_participating() and manager.errored() is None
        world = manager.num_participants()
        optimizer.step()
        if manager.current_step() == step:
            said["lost"] += 1
        else:
            said["worlds"].append(world)
            if takes_part and kind != "torchft's wrapper":
                compare(grads, expected(before, [0, 1] if world > 1 else [replica], step))
                said["compared"] += 1
            if world == 1 and (folder / "died").exists():
                (folder / "alone").touch()
        if world == 1:
            time.sleep(0.3)  # the other replica takes a while to start
        stop_at = agreed_end(folder, manager, world) if stop_at is None else stop_at
    said["parameters"] = torch.cat([each.detach().flatten() for each in net.parameters()]).tolist()
    (folder / f"{replica}.json").write_text(json.dumps(said))
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads may still wait for something


def wait_for(path: Path) -> None:
    while not path.exists():
        assert time.monotonic() < DEADLINE, path
        time.sleep(0.05)


def agreed_end(folder: Path, manager: Manager, world: int) -> int | None:
    """The step at which both end: replica 0 says so once the other one has come back and takes part."""
    path = folder / "stop"
    if world > 1 and path.exists():
        if int(os.environ["REPLICA"]) == 0 and not path.read_text():
            (folder / "stop.new").write_text(str(manager.current_step() + STEPS_TOGETHER))
            (folder / "stop.new").rename(path)
        with contextlib.suppress(ValueError):
            return int(path.read_text())
    return None


def compare(found: list[Tensor | None], want: list[Tensor | None]) -> None:
    for ours, whole in zip(found, want, strict=True):
        assert (ours is None) == (whole is None)
        if ours is not None:
            torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-14)


def die(folder: Path) -> None:
    (folder / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    os.environ["REPLICA"] = sys.argv[2]
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
