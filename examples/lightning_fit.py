"""Train a small network with Lightning; nothing in here is specific to paceline.

paceline run --patch -n 2 examples/lightning_fit.py [--save FILE]
"""

import argparse
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """A network that learns a sum of sines."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=8, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(";")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="the number of ranks that the launcher starts")
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the network's parameters here")
    arguments = parser.parse_args()
    lightning.seed_everything(0)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=arguments.ranks,
        strategy="ddp",
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, batches())
    if arguments.save and trainer.is_global_zero:
        torch.save(model.state_dict(), arguments.save)


if __name__ == "__main__":
    main()
