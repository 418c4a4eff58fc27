"""Models and training with Lightning, for ranks whose process group is open; imports Lightning."""

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline.integrations.lightning  # noqa: F401  # it gives the strategies their name

WIDTH, BATCHES = 4, 6


class Batches(Dataset[Tensor]):
    """Of one rank: whole batches, in float64, as many rows in each as asked for."""

    def __init__(self, rank: int, rows: list[int]) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.batches = [torch.randn(count, WIDTH, generator=generator).double() for count in rows]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


class Net(lightning.LightningModule):
    """Two layers, and one that is used by nobody if ``spare``."""

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.spare = nn.Linear(WIDTH, 1).double() if spare else None
        self.wrapper: str | None = None

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.wrapper = type(self.trainer.strategy.model).__module__
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]


class ByHand(Net):
    """Runs two backward passes over one forward by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, _: int) -> None:
        self.wrapper = type(self.trainer.strategy.model).__module__
        optimizer = self.optimizers()
        outputs = self.layers(batch)
        optimizer.zero_grad()
        self.manual_backward(outputs.square().mean(), retain_graph=True)
        self.manual_backward(outputs.sum())
        optimizer.step()


class Adversaries(Net):
    """Two nets that train against each other by hand, each with the other's parameters switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).double()

    def training_step(self, batch: Tensor, _: int) -> None:
        self.wrapper = type(self.trainer.strategy.model).__module__
        for_generator, for_judge = self.optimizers()
        made = self.generator(batch.flip(0))
        self._step(for_generator, -self.layers(made).mean())
        self._step(for_judge, self.layers(made.detach()).mean() - self.layers(batch).mean())

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=0.1) for net in (self.generator, self.layers)]


class Normed(Net):
    """With batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(8).double())


CALLBACKS = {
    "SWA": lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
    "EMA": lambda: callbacks.EMAWeightAveraging(decay=0.5),
}


def trainer(strategy: Any, **options: Any) -> lightning.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return lightning.Trainer(**settings | options)


def fit(rank: int, strategy: Any, net: Net, rows: list[int] | None = None, **options: Any) -> Net:
    batches = DataLoader(Batches(rank, rows or [3] * BATCHES), batch_size=None)
    resumed: Path | None = options.pop("resume", None)
    if "callback" in options:
        options["callbacks"] = [CALLBACKS[options.pop("callback")]()]
    trainer(strategy, **options).fit(net, batches, ckpt_path=resumed, weights_only=False)
    return net
