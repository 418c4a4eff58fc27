"""One training script for every launcher: it takes rank, world and address from whichever one started it.

paceline run -n 2 examples/any_launcher.py

It runs unchanged under torchrun, mpirun, srun, Kubeflow and Ray; docs/launchers.md has the commands. With the
same number of ranks it ends with the same parameters under each, to the bit, and rank 0 prints their sha256.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

import paceline

STEPS = 20
ROWS = 16  # per step, of all ranks


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def sha256_of(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in network.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    torch.set_num_threads(1)  # launchers give a rank different numbers of cores, and sums depend on it
    me = paceline.init()
    model = paceline.DistributedDataParallel(network().to(me.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randn(ROWS, 8, generator=data)
        own = batch[me.rank :: me.world_size].to(me.device)
        optimizer.zero_grad()
        (model(own) - own.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    # In one piece, because ranks may share the output.
    print(
        f"rank {me.rank} of {me.world_size}, local rank {me.local_rank}, on {me.device}\n", end="", flush=True
    )
    dist.barrier()
    if me.rank == 0:
        print(f"sha256 {sha256_of(model.module)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
