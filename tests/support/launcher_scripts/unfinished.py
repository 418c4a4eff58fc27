"""Trains until rank 1 fails, or until it is interrupted: ``unfinished.py fail`` and ``unfinished.py run``."""

import sys

import torch
from torch import nn

import paceline

torch.set_num_threads(1)
me = paceline.init()
model = paceline.DistributedDataParallel(nn.Linear(4, 4))
for step in range(10**9):
    if step == 10:
        print(f"rank {me.rank} trains\n", end="", flush=True)
    if step == 20 and me.rank == 1 and sys.argv[1] == "fail":
        raise RuntimeError("this rank fails")
    model(torch.ones(2, 4)).sum().backward()
