"""A training that kills its own ranks, and prints the sha256 of its result.

PLAN in the environment has what happens: ``{"STEP RANK": PHASE}``, each once. A phase is one of ``PHASES``.
"""

import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import paceline
from paceline.comm.membership import Membership

PHASES = ("data", "forward", "backward", "reduction", "between", "optimizer", "after optimizer", "outside")
SHARDS = 4
PLAN: dict[str, str] = json.loads(os.environ.get("PLAN", "{}"))
OPTIONS: dict[str, Any] = json.loads(os.environ.get("OPTIONS", "{}"))


def strike(phase: str, step: int, rank: int | None = None) -> None:
    """Do what the plan has for this rank, step and phase, unless a process has done it before."""
    rank = dist.get_rank() if rank is None else rank
    planned = PLAN.get(f"{step} {rank}")
    done = Path(f"done-{step}-{rank}")
    if planned is None or not planned.startswith(phase) or done.exists():
        return
    done.touch()
    if planned.endswith("stops"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif planned.endswith("raises"):
        raise ValueError("a mistake in the script")
    elif phase == "reduction":
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        strike("forward", run.steps - 1)
        self.seen += x.sum()
        result: Tensor = self.layers(x) + 0.01 * self.seen
        result.register_hook(lambda _: strike("backward", run.steps - 1))
        return result


open_group = Membership.open_group


def open_group_or_die(self: Membership, roster: Any) -> None:
    if roster.generation:
        strike("healing", -roster.generation, roster.members.index(self.member))
    open_group(self, roster)


def collate(rows: Any) -> Any:
    strike("data", run.steps)
    return default_collate(rows)


def sha256_of(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:12]


Membership.open_group = open_group_or_die  # type: ignore[method-assign]
if OPTIONS.get("dies at start") and not os.environ.get("PACELINE_MEMBER", ".0").endswith(".0"):
    os.kill(os.getpid(), signal.SIGKILL)
paceline.init()
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(90, 6, generator=generator), torch.randint(0, 3, (90,), generator=generator))
ddp = paceline.DistributedDataParallel(Net(), shards=SHARDS)
optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
sampler = paceline.ShardedBatchSampler(data, shards=SHARDS, batch_size=10)
workers = OPTIONS.get("workers", 0)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=None if workers else collate, num_workers=workers)
run = paceline.Run(ddp, optimizer, loader, epochs=OPTIONS.get("epochs", 3), scheduler=scheduler)
optimizer.register_step_pre_hook(lambda *_: strike("optimizer", run.steps - 1))
print(f"pid {os.getpid()}", flush=True)
for step in run:
    with step:
        time.sleep(OPTIONS.get("pause", 0.01))
        scale = 1 + 0.1 * torch.rand(())  # a random number outside of shards
        for x, y in step.shards():
            loss = nn.functional.cross_entropy(ddp(x), y)
            strike("reduction", step.number)
            time.sleep(0.05 * (dist.get_rank() == 0 and "reduction" in PLAN.values()))
            try:
                (scale * loss).backward()
            except RuntimeError:
                if not OPTIONS.get("catches"):
                    raise
        strike("between", step.number)
        optimizer.step()
        strike("after optimizer", step.number)
        if OPTIONS.get("collective after optimizer"):
            dist.barrier()
        scheduler.step()
    strike("outside", step.number)
    if step.number == OPTIONS.get("leaves"):
        break
    if step.number == OPTIONS.get("says"):
        print("says", flush=True)
moments = [each for state in optimizer.state.values() for each in (state["exp_avg"], state["exp_avg_sq"])]
result = sha256_of(*ddp.module.parameters(), *ddp.module.buffers(), *moments)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {run.steps} steps, {result}", flush=True)
