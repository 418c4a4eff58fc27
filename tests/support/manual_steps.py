"""Steps that are ended by finalize_backward, and what they must leave."""

from typing import Any

import torch
from torch import nn
from wrappers import Net, grads, of_whole_batch, train

from paceline import DistributedDataParallel


def make(**options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(Net().double(), **{"bucket_cap_mb": 1e-5, **options})
    ddp.require_manual_backward_finalization = True
    return ddp


def step(ddp: Any, rank: int, number: int) -> None:
    train(ddp, rank, number)
    ddp.finalize_backward()


def assert_right(ddp: nn.Module, number: int) -> None:
    torch.testing.assert_close(grads(ddp), of_whole_batch(Net().double(), number), rtol=1e-12, atol=1e-15)
