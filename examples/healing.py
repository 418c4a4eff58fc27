"""Train on ranks that may be killed, and end with the bits of a quiet run.

paceline run --heal -n 3 examples/healing.py

Kill a rank while it trains (``kill -9 PID``): a spare process takes its place, and the step that was lost is
done again. The sha256 at the end is the same as without ``--heal``, whatever you kill.
"""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

SHARDS = 8


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(500, 10, generator=generator)
    return TensorDataset(x, (x.square().sum(1) > 10).long())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))


def sha256_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    for tensor in (*module.parameters(), *module.buffers(), *moments):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that each step takes longer")
    arguments = parser.parse_args()
    paceline.init()
    ddp = paceline.DistributedDataParallel(network(), shards=SHARDS)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    data = dataset()
    sampler = paceline.ShardedBatchSampler(data, shards=SHARDS, batch_size=64)
    loader = DataLoader(data, batch_sampler=sampler)
    run = paceline.Run(ddp, optimizer, loader, epochs=arguments.epochs, scheduler=scheduler)
    print(f"pid {os.getpid()}", flush=True)
    for step in run:  # a step that was lost comes again
        with step:  # a lost rank ends the block, not the program
            time.sleep(arguments.pause)
            for x, y in step.shards():
                nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            scheduler.step()
    if dist.get_rank() == 0:
        print(f"{run.steps} steps, sha256 {sha256_of(ddp.module, optimizer)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
