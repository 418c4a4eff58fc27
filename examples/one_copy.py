"""Keep parameters and optimizer state once per host; each rank steps its part of them.

paceline run -n 2 examples/one_copy.py

The ranks train two equal networks, one with AdamW on every rank, one with a HostOptimizer. Rank 0 prints how
much optimizer state each rank holds, and that the parameters have the same bits.
"""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import paceline
from paceline import DistributedDataParallel, HostOptimizer

STEPS = 20


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 64, generator=generator)
    return x, x[:, :10].argmax(1)


def train(ddp: DistributedDataParallel, optimizer: Optimizer, rank: int) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        schedule.step()


def held(optimizer: Optimizer) -> float:
    """MB of state on this rank."""
    tensors: list[Tensor] = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in tensors) / 1e6


def main() -> None:
    rank = paceline.init().rank
    plain, shared = DistributedDataParallel(network()), DistributedDataParallel(network())
    on_every_rank = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    once = HostOptimizer(shared, torch.optim.AdamW, lr=1e-3)
    train(plain, on_every_rank, rank)
    train(shared, once, rank)
    pairs = zip(plain.parameters(), shared.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    if rank == 0:
        print(f"state on this rank: {held(on_every_rank):.1f} MB with AdamW, {held(once):.1f} MB with parts")
        print(f"the same parameters: {same}")
        torch.save(once.state_dict(), "/dev/null")  # no other rank is needed for it


if __name__ == "__main__":
    main()
