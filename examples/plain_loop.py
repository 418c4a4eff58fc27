"""The smallest complete training loop: sharded data, a wrapped network, evaluation, a saved model.

paceline run -n 2 examples/plain_loop.py

It works with any number of ranks. At the end one process loads the saved model and classifies the whole test
set. Its answers must be the same as those that were gathered from the ranks.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel, ShardedSampler, gather_in_order

EPOCHS = 15
BATCH = 32  # per rank
SAVED = Path("build/plain_loop.pt")


def points(count: int, seed: int) -> TensorDataset:
    """Random points in a square; the label says whether a point is inside a circle."""
    where = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(where, (where.norm(dim=1) < 0.8).long())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def train(model: DistributedDataParallel, data: TensorDataset) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ShardedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # a new order for each epoch
        with model.join():  # a rank may have one sample, and so one batch, more than another
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                with model.weigh(len(x)):  # the last batches may have different sizes
                    loss.backward()
                optimizer.step()


@torch.no_grad()
def answers(network: nn.Module, data: TensorDataset) -> Tensor:
    """The class of each point, computed by all ranks, in the order of the data; the same on every rank."""
    sampler = ShardedSampler(data, shuffle=False)
    own = [network(x).argmax(1) for x, _ in DataLoader(data, BATCH, sampler=sampler)]
    found: Tensor = gather_in_order(torch.cat(own), sampler)
    return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(network())  # all ranks start with the parameters of rank 0
    train(model, points(1001, seed=0))
    test = points(403, seed=1)
    model.eval()
    found = answers(model.module, test)  # the network, not the wrapper: there is nothing to average
    if dist.get_rank() == 0:
        SAVED.parent.mkdir(exist_ok=True)
        torch.save(model.module_state_dict(), SAVED)
        check(found, test)
    dist.destroy_process_group()


def check(found: Tensor, test: TensorDataset) -> None:
    x, y = test.tensors
    alone = network()
    alone.load_state_dict(torch.load(SAVED))
    with torch.no_grad():
        differ = int((alone(x).argmax(1) != found).sum())
    right = float((found == y).float().mean())
    print(
        f"test accuracy {right:.1%} on {len(found)} points, put together from {dist.get_world_size()} ranks"
    )
    print(f"{SAVED} in one process: {differ} of {len(x)} answers differ")


if __name__ == "__main__":
    main()
