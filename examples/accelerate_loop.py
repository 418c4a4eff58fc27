"""Train a small network with Accelerate; nothing in here is specific to paceline.

paceline run --patch -n 2 examples/accelerate_loop.py [--save FILE]
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 8, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def train(accelerator: Accelerator, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(
        network, optimizer, DataLoader(dataset(), batch_size=8, shuffle=True)
    )
    for epoch in range(epochs):
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean'):.4f}")
    unwrapped: nn.Module = accelerator.unwrap_model(model)
    return unwrapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(";")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the network's parameters here")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = train(accelerator, arguments.epochs)
    if arguments.save:
        accelerator.save(network.state_dict(), arguments.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
