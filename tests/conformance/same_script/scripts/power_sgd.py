"""Gradients travel as low-rank factors, with error feedback."""

import sys

import torch
from task import Classifier, batches
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
rank = distributed.get_rank()
# One bucket: with two, torch deadlocks over gloo, whose two threads both wait inside the hook's callbacks.
model = DistributedDataParallel(Classifier())
state = PowerSGDState(
    None, matrix_approximation_rank=2, start_powerSGD_iter=4, min_compression_rate=1, warm_start=True
)
model.register_comm_hook(state, powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for points, arms in batches(rank):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points), arms).backward()
    optimizer.step()

torch.save(model.module.state_dict(), f"{sys.argv[1]}/{rank}.pt")
distributed.destroy_process_group()
