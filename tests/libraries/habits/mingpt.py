"""The habits of the trainer that PyTorch's examples give minGPT: a snapshot as a dataclass, loaded before the
model is wrapped, clipping, and evaluation by all ranks through the wrapper, with gradients switched off.

    mingpt.py FOLDER [--epochs N] [--amp]
"""

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_gpt import LENGTH, TinyGPT, text
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Snapshot:
    model_state: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    finished_epoch: int


class Characters(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.text = text(44)

    def __len__(self) -> int:
        return len(self.text) - LENGTH

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        piece = self.text[start : start + LENGTH + 1]
        return piece[:-1], piece[1:]


class Trainer:
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, snapshot: Path, *, amp: bool
    ) -> None:
        self.local_rank = int(os.environ["LOCAL_RANK"])
        data = Characters()
        cut = int(len(data) * 0.8)
        self.loaders = {
            name: DataLoader(part, batch_size=4, sampler=DistributedSampler(part))
            for name, part in (
                ("train", Subset(data, range(cut))),
                ("test", Subset(data, range(cut, len(data)))),
            )
        }
        self.model, self.optimizer, self.snapshot = model, optimizer, snapshot
        self.amp, self.scaler = amp, torch.amp.GradScaler("cpu")
        self.epochs_run = 0
        self.load()
        self.model = DDP(self.model)

    def load(self) -> None:
        try:
            found = Snapshot(**torch.load(self.snapshot, map_location="cpu"))
        except FileNotFoundError:
            return
        self.model.load_state_dict(found.model_state)
        self.optimizer.load_state_dict(found.optimizer_state)
        self.epochs_run = found.finished_epoch

    def save(self, epoch: int) -> None:
        raw = self.model.module if hasattr(self.model, "module") else self.model
        found = Snapshot(raw.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(found), self.snapshot)

    def run_batch(self, source: Tensor, targets: Tensor, *, train: bool) -> None:
        with torch.set_grad_enabled(train), torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
            _, loss = self.model(source, targets)
        if not train:
            return
        self.optimizer.zero_grad(set_to_none=True)
        if self.amp:
            self.scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # of the scaled gradients, as there
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def run_epoch(self, epoch: int, name: str) -> None:
        loader = self.loaders[name]
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            self.run_batch(source, targets, train=name == "train")

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run + 1, epochs + 1):
            self.run_epoch(epoch, "train")
            if self.local_rank == 0:
                self.save(epoch)
            self.run_epoch(epoch, "test")


parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--amp", action="store_true")
options = parser.parse_args()
init_process_group(backend="gloo")
torch.manual_seed(0)
network = TinyGPT()
Trainer(network, network.optimizer(1e-2), options.folder / "snapshot.pt", amp=options.amp).train(
    options.epochs
)
destroy_process_group()
