"""The training of all sides of the benchmark of healing: the network, the samples and the options."""

import argparse
import faulthandler
import hashlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from heal_notes import Notes, Phase
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

SHARDS = 8
BATCH = 64
SAMPLES = 500
EPOCH_STEPS = math.ceil(SAMPLES / BATCH)
# So small that the gradients of the first layers are reduced before those of the last are there.
BUCKET_CAP_MB = 0.001


def parse(rank: int) -> tuple[argparse.Namespace, Notes]:
    """The options, and the notes of this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--notes", type=Path, required=True, help="the folder for notes")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True, help="seconds that each phase takes longer")
    parser.add_argument("--workers", type=int, default=0, help="of the data loader")
    parser.add_argument("--snapshot-every", type=int, default=20, help="steps per snapshot")
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # if the run hangs, it is asked where
    torch.set_num_threads(1)
    return arguments, Notes(arguments.notes, rank, arguments.pause)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 10, generator=generator)
    return TensorDataset(x, (x.square().sum(1) > 10).long())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))


def optimizer_of(net: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.9)


def load(samples: list[Any], notes: Notes) -> Any:
    """Make a batch of samples; takes a while, as reading them would."""
    notes.enter(Phase.LOADING)
    batch = default_collate(samples)
    notes.enter(Phase.OUTSIDE, share=0)
    return batch


def batches(start: int, epochs: int, rank: int, world: int, notes: Notes) -> Iterator[tuple[int, Any]]:
    """A rank's part of the batch of each step from one step on, with the number of the step."""
    samples = dataset()
    for step in range(start, epochs * EPOCH_STEPS):
        epoch, number = divmod(step, EPOCH_STEPS)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        own = order[number * BATCH : (number + 1) * BATCH][rank::world]
        yield step, load([samples[each] for each in own], notes)


def prolong(
    net: nn.Sequential, optimizer: torch.optim.Optimizer, notes: Notes, *, share: float = 1.0
) -> None:
    """Make backward and the optimizer last: in the middle of the one, at both ends of the other."""

    def in_backward(_: Tensor) -> None:
        notes.enter(Phase.BACKWARD, share=share)

    def in_optimizer(*_: object) -> None:
        notes.enter(Phase.OPTIMIZER, share=0.5)

    weight = net[1].weight
    assert isinstance(weight, Tensor)
    weight.register_hook(in_backward)
    optimizer.register_step_pre_hook(in_optimizer)
    optimizer.register_step_post_hook(in_optimizer)


def train_on(model: nn.Module, batch: Any, notes: Notes, *, share: float = 1.0) -> None:
    """Forward and backward."""
    x, y = batch
    notes.enter(Phase.FORWARD, share=share)
    loss = nn.functional.cross_entropy(model(x), y)
    notes.enter(Phase.BACKWARD, share=0)
    loss.backward()


def digests(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """sha256 of parameters and optimizer state, and of module buffers."""
    moments = [
        value for state in optimizer.state.values() for _, value in sorted(state.items()) if value is not None
    ]
    rates = [torch.tensor(group["lr"], dtype=torch.float64) for group in optimizer.param_groups]
    return {"state": _sha256([*net.parameters(), *moments, *rates]), "buffers": _sha256([*net.buffers()])}


def _sha256(tensors: list[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return total.hexdigest()


def own_rank() -> int:
    return int(os.environ["RANK"])
