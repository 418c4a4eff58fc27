"""Train a small convolutional network on the digits of scikit-learn, on several ranks.

paceline run -n 2 --record DIR examples/digits.py [--epochs N]
paceline report DIR

To compare the speed, the same network is also trained with torch's wrapper. The two wrappers take turns, one
epoch each.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import paceline

BATCH = 128  # for all ranks together


@dataclass(frozen=True)
class Data:
    """Images and labels for training, and others for the test."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load() -> Data:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.split([360, len(order) - 360])
    return Data(images[train], labels[train], images[test], labels[test])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Training:
    """A wrapped network and its optimizer, on this rank."""

    def __init__(self, model: nn.Module, data: Data, count: Callable[[int], None]) -> None:
        self.model = model
        self.seconds: list[float] = []
        self.loss = float("nan")
        self._data = data
        self._count = count
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def run_epoch(self, number: int) -> None:
        """Train on every image once; each rank takes its rows of each batch."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        order = torch.randperm(len(self._data.labels), generator=torch.Generator().manual_seed(number))
        self.model.train()
        dist.barrier()
        start = time.perf_counter()
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            self._step(batch[rank::ranks])
        self.seconds.append(time.perf_counter() - start)

    def _step(self, rows: torch.Tensor) -> None:
        self._count(len(rows))
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self._data.images[rows]), self._data.labels[rows])
        loss.backward()
        self._optimizer.step()
        self.loss = loss.item()

    @torch.no_grad()
    def accuracy(self) -> float:
        """On the test images. Only this rank computes it, so it calls the network and not the wrapper."""
        network = self.model.get_submodule("module").eval()
        return float((network(self._data.test_images).argmax(1) == self._data.test_labels).float().mean())

    @property
    def images_a_second(self) -> float:
        """In the median epoch, without the first, which is slower."""
        images = len(self._data.labels) // BATCH * BATCH
        return images / statistics.median(self.seconds[1:])


def train(epochs: int) -> dict[str, Training]:
    data = load()
    ours = paceline.DistributedDataParallel(network())
    theirs = torch.nn.parallel.DistributedDataParallel(network())
    sides = {
        "paceline": Training(ours, data, lambda number: ours.recorder.count(number, "images")),
        "torch": Training(theirs, data, lambda _: None),
    }
    for number in range(1, epochs + 1):
        for side in sides.values():
            side.run_epoch(number)
        if dist.get_rank() == 0:
            print(f"epoch {number} of {epochs}: loss {sides['paceline'].loss:.4f}")
    return sides


def tell(sides: dict[str, Training]) -> None:
    ours, theirs = sides["paceline"], sides["torch"]
    ratios = [their / our for our, their in zip(ours.seconds[1:], theirs.seconds[1:], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"test accuracy {ours.accuracy():.1%} (torch's wrapper: {theirs.accuracy():.1%})")
    print(
        f"{ours.images_a_second:,.0f} images/s on {dist.get_world_size()} ranks, {middle:.2f} times torch's "
        f"{theirs.images_a_second:,.0f} (epoch by epoch: {low:.2f} to {high:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.epochs < 3:
        parser.error("the speed is taken from the second epoch on, and needs two of them")
    dist.init_process_group("gloo")
    sides = train(arguments.epochs)
    if dist.get_rank() == 0:
        tell(sides)
    sides.clear()  # torch's wrapper must not outlive the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
