"""Train a small network with Ray Train, with a checkpoint after each epoch.

python examples/ray_train.py [--workers N] [--min-workers N] [--epochs N] [--storage DIR]

When a worker fails, Ray starts all workers again, once, and they continue from the last checkpoint. With
--min-workers, Ray starts fewer workers if there is no room for all, and starts again with more when there is.
With --workers 0, Ray starts none, and another launcher does:

paceline run -n 2 examples/ray_train.py --workers 0
"""

import argparse
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

from paceline.integrations.ray import prepare_model

ROWS, BATCH = 1024, 64  # for all workers together

State = dict[str, Any]


def train(
    wrap: Callable[[nn.Module], nn.Module],
    epochs: int,
    *,
    saved: State | None = None,
    after_epoch: Callable[[State], None] = lambda _: None,
) -> str:
    """Train on this rank of the process group; nothing in here is specific to Ray.

    Args:
        wrap: makes the wrapper of a network.
        epochs: how often each row is seen, also by the training that is continued.
        saved: the state to continue from.
        after_epoch: gets the state after each epoch.

    Returns:
        The SHA-256 of all parameters.
    """
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    model = wrap(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    if saved is not None:
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
    inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    targets = inputs.sin().sum(1, keepdim=True)
    for epoch in range(saved["epochs"] if saved else 0, epochs):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            rows = batch[dist.get_rank() :: dist.get_world_size()]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        after_epoch(
            {"epochs": epoch + 1, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
        )
    values = (parameter.detach().numpy().tobytes() for parameter in network.parameters())
    return hashlib.sha256(b"".join(values)).hexdigest()


def load() -> State | None:
    """The last checkpoint of this run, if there is one."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        state: State = torch.load(Path(folder) / "state.pt")
    return state


def report(state: State) -> None:
    """Hand a checkpoint to Ray. All workers call this, and rank 0 has the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"epochs": state["epochs"]}, checkpoint=checkpoint)


def worker(config: dict[str, Any]) -> str:
    saved = load()
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}, after {saved['epochs'] if saved else 0} epochs"
    )
    return train(prepare_model, config["epochs"], saved=saved, after_epoch=report)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with Ray Train.")
    parser.add_argument("--workers", type=int, default=2, help="the number of ranks that Ray starts")
    parser.add_argument("--min-workers", type=int, help="train with that many if there cannot be more")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="where checkpoints go (Ray: ~/ray_results)"
    )
    arguments = parser.parse_args()
    most, least = arguments.workers, arguments.min_workers
    if most > 0:
        ray.init(include_dashboard=False)
    trainer = TorchTrainer(
        worker,
        train_loop_config={"epochs": arguments.epochs},
        torch_config=TorchConfig(timeout_s=60),
        scaling_config=ray.train.ScalingConfig(num_workers=most if least is None else (least, most)),
        run_config=ray.train.RunConfig(
            storage_path=arguments.storage and str(arguments.storage.absolute()),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    )
    print(f"sha256 {trainer.fit().return_value}")


if __name__ == "__main__":
    main()
