"""A static graph whose blocks are checkpointed, one of them used twice."""

import sys

import torch
from task import batches
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(4, 48)
        self.block = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))
        self.spare = nn.Linear(48, 48)
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


distributed.init_process_group("gloo")
rank = distributed.get_rank()
model = DistributedDataParallel(Checkpointed(), static_graph=True, bucket_cap_mb=0.01)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for points, arms in batches(rank):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points), arms).backward()
    optimizer.step()

torch.save(model.module.state_dict(), f"{sys.argv[1]}/{rank}.pt")
distributed.destroy_process_group()
