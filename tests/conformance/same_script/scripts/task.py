"""What the scripts beside this file learn: points in the plane, each on an arm of a spiral."""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ARMS = 3
STEPS = 20
BATCH = 16


def spirals(count: int) -> TensorDataset:
    """Noisy points with their sines and cosines, and the arm of each."""
    generator = torch.Generator().manual_seed(11)
    arm = torch.randint(ARMS, (count,), generator=generator)
    along = torch.rand(count, generator=generator)
    angle = 2 * math.pi * (arm / ARMS + along) + 0.1 * torch.randn(count, generator=generator)
    x, y = along * angle.cos(), along * angle.sin()
    return TensorDataset(torch.stack([x, y, (3 * x).sin(), (3 * y).sin()], 1), arm)


def batches(rank: int, replicas: int = 2) -> DataLoader[tuple[Tensor, ...]]:
    """One replica's share of the points, in batches."""
    data = spirals(replicas * STEPS * BATCH)
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, replicas, rank, seed=5))


class Classifier(nn.Sequential):
    """A few layers of several sizes."""

    def __init__(self, width: int = 48) -> None:
        torch.manual_seed(7)
        super().__init__(
            nn.Linear(4, width),
            nn.LayerNorm(width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, ARMS),
        )
