"""Train a small convolutional network on the digits of scikit-learn, on two CPU replicas in one process.

python examples/digits.py [--epochs N] [--replicas N]
"""

import argparse
import os
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import nn

import paceline


@dataclass(frozen=True)
class Data:
    """Images and labels, some to learn from and some to be tested on."""

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
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(model: nn.Module, data: Data, *, epochs: int, batch: int, console: Console) -> float:
    """Train the model, and return how many images it saw a second."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    seen, start = 0, time.perf_counter()
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console) as progress:
        task = progress.add_task(
            "train", total=epochs * (len(data.labels) // batch), epoch=0, loss=float("nan")
        )
        for epoch in range(1, epochs + 1):
            for rows in torch.randperm(len(data.labels)).split(batch)[: len(data.labels) // batch]:
                loss = nn.functional.cross_entropy(model(data.images[rows]), data.labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen += len(rows)
                progress.update(task, advance=1, epoch=epoch, loss=loss.item())
    return seen / (time.perf_counter() - start)


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    model.eval()
    return float((model(data.test_images).argmax(1) == data.test_labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--replicas", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    # Each replica may use so many threads at once: the cores are shared out.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // arguments.replicas))

    data = load()
    model = paceline.DataParallel(network(), ["cpu"] * arguments.replicas)
    console = Console()
    console.print(f"digits: {len(data.labels)} images to learn from, {len(data.test_labels)} to be tested on")
    rate = train(model, data, epochs=arguments.epochs, batch=128, console=console)
    right = accuracy(model, data)
    console.print(f"test accuracy {right:.1%}, {rate:,.0f} images/s on {arguments.replicas} CPU replicas")


if __name__ == "__main__":
    main()
