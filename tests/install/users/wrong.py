"""A user's program with mistakes."""

import torch
from torch import Tensor, nn
from torch.futures import Future

import paceline
from paceline.nn.parallel import DataParallel, DistributedDataParallel


def takes_one(bucket: object) -> Future[Tensor]:
    raise NotImplementedError


def returns_a_tensor(state: None, bucket: object) -> Tensor:
    raise NotImplementedError


net = nn.Linear(2, 2)
model = DistributedDataParallel(net, bucket_cap_mb="25")  # wrong
DistributedDataParallel(net, bucket_cap=25)  # wrong
DistributedDataParallel(net, transport="tcp")  # wrong
DistributedDataParallel([net])  # wrong
model.register_comm_hook(None, takes_one)  # wrong
model.register_comm_hook(None, returns_a_tensor)  # wrong
model.backward(torch.ones(()), weight="all")  # wrong
DataParallel(net, gather="sum")  # wrong
paceline.ShardedSampler(10, num_replica=2)  # wrong
numbers: list[str] = paceline.launch(float, n=2)  # wrong
wrapper = paceline.DistributedDataparallel  # wrong
