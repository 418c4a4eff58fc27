"""Tensor parallel inside pairs of ranks, data parallel across the pairs."""

import sys

import torch
from task import Classifier, batches
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
rank = distributed.get_rank()
net = parallelize_module(Classifier(), mesh["tensor"], {"3": ColwiseParallel(), "5": RowwiseParallel()})
_pre_dp_module_transform(net)
parameters = dict(net.named_parameters())
model = DistributedDataParallel(net, process_group=mesh["data"].get_group(), bucket_cap_mb=0.005)
optimizer = torch.optim.Adam(parameters.values(), lr=0.01)

for points, arms in batches(mesh["data"].get_local_rank()):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points), arms).backward()
    optimizer.step()

torch.save(parameters, f"{sys.argv[1]}/{rank}.pt")
distributed.destroy_process_group()
