"""Train two groups of ranks that average their gradients only inside each group, as hosts that are far apart.

paceline run -n 4 examples/outer_loop.py

Ranks 0 and 1 stand for one host, ranks 2 and 3 for another. Between the two, only outer steps travel: every
16 steps the change of the parameters, at half a byte each. Without ``inner``, the ranks of each host are a
group.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline

STEPS = 200


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 64, generator=generator)
    return x, x[:, :10].argmax(1)


def main() -> None:
    rank = paceline.init().rank
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = paceline.DistributedDataParallel(net)
    half, _ = dist.new_subgroups(dist.get_world_size() // 2)
    outer = paceline.OuterLoop(ddp, inner=half, period=16)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x, y = batch(generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        outer.step()
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    outer.finish()
    total = torch.stack([parameter.detach().double().sum() for parameter in net.parameters()]).sum()
    totals = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(totals, total)
    if rank == 0:
        print(f"the same model on all ranks: {len({each.item() for each in totals}) == 1}")


if __name__ == "__main__":
    main()
