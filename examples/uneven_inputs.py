"""Ranks with different amounts of data: all of it is used, and each sample has the same weight.

paceline run -n 2 examples/uneven_inputs.py

With ``join``, a rank without inputs takes part in the steps of the other ranks. With ``weigh``, each rank's
batch is weighed by its number of samples. The result is that of one process, whose batch in each step
contains the batches of all ranks that still have one. All in float64, so that only rounding differs.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel

BATCH = 16
Batch = tuple[Tensor, Tensor]


def batches_of(rank: int) -> list[Batch]:
    """A rank's data: 53 samples on rank 0, 123 on rank 1, and 70 more on each rank after that."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(53 + 70 * rank, 8, generator=generator, dtype=torch.float64)
    return list(zip(x.split(BATCH), x.sin().sum(1, keepdim=True).split(BATCH), strict=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def train_together(batches: list[Batch]) -> nn.Module:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            with model.weigh(len(x)):
                loss.backward()
            optimizer.step()
    return model.module


def train_alone(ranks: int) -> nn.Module:
    """Train one process on the data of all ranks."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    everyone = [batches_of(rank) for rank in range(ranks)]
    for step in range(max(map(len, everyone))):
        there = [batches[step] for batches in everyone if step < len(batches)]
        x, y = (torch.cat(parts) for parts in zip(*there, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def main() -> None:
    dist.init_process_group("gloo")
    batches = batches_of(dist.get_rank())
    together = train_together(batches)
    alone = train_alone(dist.get_world_size())
    samples = sum(len(x) for x, _ in batches)
    print(f"{samples} samples in {len(batches)} batches, the last of {len(batches[-1][0])}")
    if dist.get_rank() == 0:
        print(f"training moved parameters by up to {difference(alone, network()):.2f}")
    print(f"parameters differ from those of one process by {difference(together, alone):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
