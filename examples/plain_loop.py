"""The smallest whole training loop: shared-out data, a wrapped network, evaluation, a saved model.

paceline run -n 2 examples/plain_loop.py

Any number of ranks will do. At the end one process loads the saved model by itself and answers for the whole
test set: its answers must be those that the ranks have put together.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel, ShardedSampler, gather_in_order

EPOCHS = 15
BATCH = 32  # of each rank
SAVED = Path("build/plain_loop.pt")


def points(count: int, seed: int) -> TensorDataset:
    """Points of a square; the label says which of them are inside a circle."""
    where = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(where, (where.norm(dim=1) < 0.8).long())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def train(model: DistributedDataParallel, data: TensorDataset) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ShardedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # another order in each
        with model.join():  # some ranks may have a sample, and so a batch, more than others
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                with model.weigh(len(x)):  # the last batches may be of different sizes
                    loss.backward()
                optimizer.step()


@torch.no_grad()
def answers(network: nn.Module, data: TensorDataset) -> Tensor:
    """What the ranks together say of each point, in the order of the data, on every rank."""
    sampler = ShardedSampler(data, shuffle=False)
    own = [network(x).argmax(1) for x, _ in DataLoader(data, BATCH, sampler=sampler)]
    found: Tensor = gather_in_order(torch.cat(own), sampler)
    return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(network())  # all ranks start with what rank 0 has
    train(model, points(1001, seed=0))
    test = points(403, seed=1)
    model.eval()
    found = answers(model.module, test)  # the network, not the wrapper: nothing is to be averaged here
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
