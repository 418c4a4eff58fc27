"""The habits of PyTorch's first DDP tutorials: processes of ``mp.spawn`` that choose the port, a plain loop,
a checkpoint that rank 0 saves and all load behind a barrier, a model on two devices.

    tutorial_spawn.py FOLDER PORT
"""

import os
import sys

import torch
import torch.multiprocessing as mp
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))


class ToyModelOnTwoDevices(ToyModel):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.net1.to(first)
        self.net2.to(second)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x.to(self.first))).to(self.second))


def a_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    nn.MSELoss()(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()


def with_checkpoint(rank: int, path: str) -> nn.Module:
    model = DDP(ToyModel())
    if rank == 0:
        torch.save(model.state_dict(), path)
    distributed.barrier()
    model.load_state_dict(torch.load(path, map_location={"cuda:0": f"cuda:{rank}"}, weights_only=True))
    a_step(model)
    distributed.barrier()  # before the file is removed
    if rank == 0:
        os.remove(path)
    return model


def process(rank: int, world: int, folder: str, port: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    distributed.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # so they start from rank 0's parameters, and have different data
    plain = DDP(ToyModel())
    for _ in range(3):
        a_step(plain)
    loaded = with_checkpoint(rank, f"{folder}/model.checkpoint")
    split = DDP(ToyModelOnTwoDevices("cpu", "cpu"))
    a_step(split)
    if rank == 0:
        states = {"plain": plain, "loaded": loaded, "split": split}
        torch.save({name: each.state_dict() for name, each in states.items()}, f"{folder}/final.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(process, args=(2, *sys.argv[1:]), nprocs=2, join=True)
