"""The habits of timm's train.py, without timm: the wrapper under another name and with ``broadcast_buffers``,
``no_sync`` only if the model has it, a moving average of the unwrapped model, a loss scaler that steps, batch
norm's statistics averaged after each epoch, evaluation of both models, and checkpoints by rank 0.

    timm_train.py FOLDER [--no-ddp-bb]
"""

import argparse
import contextlib
import copy
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--no-ddp-bb", action="store_true")
args = parser.parse_args()
EPOCHS, UPDATES, ACCUMULATED, BATCH = 2, 3, 2, 6


class Residual(nn.Module):
    """Left out at random, as by stochastic depth; so some steps do not use its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(len(x), 1, 1, 1) < 0.8 if self.training else torch.ones(len(x), 1, 1, 1)
        return nn.functional.relu(x + self.inner(x) * kept)


class MovingAverage(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if mine.is_floating_point():
                mine.lerp_(theirs, 0.1)
            else:
                mine.copy_(theirs)


class Scaler:
    """Backward, and if an update is due: unscale, clip, step."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(
        self, loss: Tensor, optimizer: torch.optim.Optimizer, model: nn.Module, *, update: bool
    ) -> None:
        self._scaler.scale(loss).backward()
        if update:
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self._scaler.step(optimizer)
            self._scaler.update()


def unwrap(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "module", getattr(model, "_orig_mod", None)), nn.Module):
        model = inner
    return model


def distribute_bn(model: nn.Module) -> None:
    for name, buffer in unwrap(model).named_buffers(recurse=True):
        if "running_mean" in name or "running_var" in name:
            distributed.all_reduce(buffer, op=distributed.ReduceOp.SUM)
            buffer /= float(distributed.get_world_size())


def validate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        lost = nn.functional.cross_entropy(model(images[:8]), labels[:8])
    lost = lost.float()
    distributed.all_reduce(lost)
    return lost.item() / distributed.get_world_size()


def train_one_epoch(model: nn.Module) -> None:
    model.train()
    has_no_sync = hasattr(model, "no_sync")
    optimizer.zero_grad()
    for number in range(UPDATES * ACCUMULATED):
        update = (number + 1) % ACCUMULATED == 0
        chosen = torch.randint(len(images), (BATCH,))
        with model.no_sync() if has_no_sync and not update else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen]) / ACCUMULATED
            scaler(loss, optimizer, model, update=update)
        if update:
            optimizer.zero_grad()
            average.update(unwrap(model))


distributed.init_process_group(backend="gloo", init_method="env://")
rank = distributed.get_rank()
torch.manual_seed(42)
images, labels = torch.randn(64, 3, 8, 8), torch.randint(5, (64,))
model: nn.Module = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), nn.Flatten(), nn.Linear(8 * 6 * 6, 5)
).to(memory_format=torch.channels_last)
torch.manual_seed(42 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scaler = Scaler()
average = MovingAverage(model)
model = NativeDDP(model, broadcast_buffers=not args.no_ddp_bb)
for _ in range(EPOCHS):
    train_one_epoch(model)
    distribute_bn(model)
    losses = {"model": validate(model)}
    distribute_bn(average)
    losses["average"] = validate(average)
    if rank == 0:
        states = {"model": unwrap(model).state_dict(), "average": average.module.state_dict()}
        torch.save(
            states | {"losses": losses, "optimizer": optimizer.state_dict()}, args.folder / "last.pth.tar"
        )
distributed.destroy_process_group()
