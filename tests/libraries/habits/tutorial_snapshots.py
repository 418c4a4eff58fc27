"""The habits of PyTorch's DDP video tutorials: one class that trains, a sampler, a snapshot that a later run
goes on from, rank 0 that saves every few epochs.

    tutorial_snapshots.py FOLDER EPOCHS SAVE_EVERY
"""

import os
import sys

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(
        self,
        model: nn.Module,
        data: DataLoader,
        optimizer: torch.optim.Optimizer,
        save_every: int,
        snapshot: str,
    ) -> None:
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.model, self.data, self.optimizer = model, data, optimizer
        self.save_every, self.snapshot = save_every, snapshot
        self.epochs_run = 0
        if os.path.exists(snapshot):
            found = torch.load(snapshot, map_location="cpu")
            self.model.load_state_dict(found["MODEL_STATE"])
            self.epochs_run = found["EPOCHS_RUN"]
        self.model = DDP(self.model)

    def run_epoch(self, epoch: int) -> None:
        assert len(next(iter(self.data))[0])  # looks at a batch first
        self.data.sampler.set_epoch(epoch)
        for source, targets in self.data:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(source), targets).backward()
            self.optimizer.step()

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            self.run_epoch(epoch)
            if self.local_rank == 0 and epoch % self.save_every == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(state, self.snapshot)


def main(folder: str, epochs: str, save_every: str) -> None:
    init_process_group(backend="gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(128, 20), torch.rand(128, 1))
    model = nn.Linear(20, 1)
    data = DataLoader(dataset, batch_size=16, shuffle=False, sampler=DistributedSampler(dataset))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    Trainer(model, data, optimizer, int(save_every), f"{folder}/snapshot.pt").train(int(epochs))
    destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
