"""A small network trained on scikit-learn's digits by several ranks, under each communication hook."""

from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

from paceline import DistributedDataParallel, hooks

BATCH = 32  # per rank
PERIOD = 4

HOOKS: Mapping[str, Callable[[], hooks.Hook | None]] = {
    "no hook": lambda: None,
    "average": hooks.average,
    "fp16": hooks.fp16,
    "bf16": hooks.bf16,
    "int8": hooks.int8,
    "int4": hooks.int4,
    "top_k(0.01)": lambda: hooks.top_k(0.01),
    "top_k(0.1)": lambda: hooks.top_k(0.1),
    "power_sgd(2)": lambda: hooks.power_sgd(2),
    "post_local_sgd": lambda: hooks.post_local_sgd(start_step=40, period=PERIOD),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy_on_rank(rank: int, hook_name: str, seed: int, epochs: int) -> float:
    """Train on this rank's part of each batch, and return the test accuracy."""
    images, labels, test_images, test_labels = _data()
    torch.manual_seed(seed)
    # Like ranks on several hosts: in shared memory nothing is compressed.
    ddp = DistributedDataParallel(network(), transport="c10d")
    hook = HOOKS[hook_name]()
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    whole = BATCH * dist.get_world_size()
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(whole)[: len(labels) // whole]:
            mine = rows[rank * BATCH : (rank + 1) * BATCH]
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images[mine]), labels[mine]).backward()
            optimizer.step()
            if isinstance(hook, hooks.PostLocalSGD):
                hook.average_parameters(ddp.parameters())
    if isinstance(hook, hooks.PostLocalSGD):
        hook.average_now(ddp.parameters())
    with torch.no_grad():
        return float((ddp.module(test_images).argmax(1) == test_labels).double().mean())


@cache
def _data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.split([360, len(order) - 360])
    return images[train], labels[train], images[test], labels[test]
