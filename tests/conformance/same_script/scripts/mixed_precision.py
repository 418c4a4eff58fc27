"""Forward and backward run in bfloat16, gradients are added up and applied in float32."""

import sys

import torch
from task import Classifier, batches
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

distributed.init_process_group("gloo")
rank = distributed.get_rank()
low = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = DistributedDataParallel(Classifier(), mixed_precision=low, bucket_cap_mb=0.01)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for step, (points, arms) in enumerate(batches(rank)):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points).float(), arms).backward()
    if step > 0:  # a warm-up: before its buckets are rebuilt, torch's gradients are uninitialised memory
        optimizer.step()

torch.save(model.module.state_dict(), f"{sys.argv[1]}/{rank}.pt")
distributed.destroy_process_group()
