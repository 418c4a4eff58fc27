"""Train with any number of ranks, change their number in mid-run, and end with the same bits.

paceline run -n 2 examples/same_bits.py

Rank 0 prints the sha256 of parameters and optimizer state. It is the same with ``-n 1``, ``-n 3`` or
``-n 8``, and if a run with ``--steps N --checkpoint FILE`` goes on, by the same command, with another number
of ranks.
"""

import argparse
import hashlib
from pathlib import Path

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
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint", type=Path)
    arguments = parser.parse_args()
    me = paceline.init()
    ddp = paceline.DistributedDataParallel(network(), shards=SHARDS)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    data = dataset()
    sampler = paceline.ShardedBatchSampler(data, shards=SHARDS, batch_size=64)
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
    state = paceline.TrainingState(ddp, optimizer, sampler=sampler)
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        paceline.load(arguments.checkpoint, state)
    done = 0
    while done < arguments.steps:
        for batch in loader:  # this rank's shards of one step
            optimizer.zero_grad()
            for x, y in ddp.shards(batch):
                nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            done += 1
            if done == arguments.steps:
                break
        else:
            sampler.set_epoch(sampler.epoch + 1)
    if arguments.checkpoint is not None:
        paceline.save(arguments.checkpoint, state)
    if me.rank == 0:
        print(f"{done} steps on {me.world_size} ranks, sha256 {sha256_of(ddp.module, optimizer)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
