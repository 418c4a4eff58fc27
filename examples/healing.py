"""Train on ranks that may be killed, and end with the bits of a quiet run.

paceline run --heal -n 3 examples/healing.py --kill 12

In step 12 rank 1 kills itself. A spare process takes its place, and the step is done again. The sha256 at
the end is the same without ``--kill``, without ``--heal``, with any other number of ranks, and whichever
ranks you kill yourself (``kill -9 PID``).
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from same_bits import SHARDS, dataset, network, sha256_of
from torch import nn
from torch.utils.data import DataLoader

import paceline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--kill", type=int, help="the step in which rank 1 kills itself")
    arguments = parser.parse_args()
    me = paceline.init()
    ddp = paceline.DistributedDataParallel(network(), shards=SHARDS)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    data = dataset()
    sampler = paceline.ShardedBatchSampler(data, shards=SHARDS, batch_size=64)
    loader = DataLoader(data, batch_sampler=sampler)
    run = paceline.Run(ddp, optimizer, loader, epochs=arguments.epochs, scheduler=scheduler)
    steps = 0
    for step in run:  # a step that was lost comes again
        with step:  # a lost rank ends the block, not the program
            for x, y in step.shards():
                nn.functional.cross_entropy(ddp(x), y).backward()
            if me.rank == 1 and step.number == arguments.kill and steps:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            scheduler.step()
            steps += 1
    print(f"process {os.getpid()} did {steps} of {run.steps} steps", flush=True)
    if dist.get_rank() == 0:
        print(f"sha256 {sha256_of(ddp.module, optimizer)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
