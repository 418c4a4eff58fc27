"""TensorBoard draws the graph of a wrapped model, on one rank alone."""

from pathlib import Path

import torch
from wrappers import WIDTH, Net, equal_on_all, grads, train

from paceline import DistributedDataParallel
from paceline.testing import RankPool


def drawn(rank: int, folder: Path) -> list[str]:
    ddp = DistributedDataParallel(Net())
    names = _draw(ddp, folder) if rank == 0 else []
    train(ddp, rank)
    assert equal_on_all(grads(ddp))
    return names


def _draw(ddp: DistributedDataParallel, folder: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        writer.add_graph(ddp, torch.ones(2, WIDTH))
    return [node.name for node in EventAccumulator(str(folder)).Reload().Graph().node]


def test_a_model_with_buffers_is_drawn_and_trained(pool: RankPool, tmp_path: Path) -> None:
    names, _ = pool.run(drawn, tmp_path)
    assert any("Linear[last]" in name for name in names)
