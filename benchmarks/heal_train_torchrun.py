"""The training of the benchmark of healing with torch's wrapper and snapshots; see heal.py, which starts it.

As in PyTorch's tutorial on fault tolerance, rank 0 saves a snapshot every few steps, and all ranks load it
when they start.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from heal_notes import Phase
from heal_training import (
    BUCKET_CAP_MB,
    batches,
    digests,
    network,
    optimizer_of,
    own_rank,
    parse,
    prolong,
    train_on,
)
from torch.nn.parallel import DistributedDataParallel


def load_snapshot(path: Path, parts: dict[str, Any]) -> int:
    """Load the last snapshot, if there is one; returns the number of the next step."""
    if not path.exists():
        return 0
    snapshot = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(snapshot[name])
    return int(snapshot["steps"])


def save_snapshot(path: Path, parts: dict[str, Any], steps: int) -> None:
    unfinished = path.with_suffix(".part")
    torch.save({"steps": steps, **{name: part.state_dict() for name, part in parts.items()}}, unfinished)
    unfinished.replace(path)


def main() -> None:
    arguments, notes = parse(own_rank())
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = network()
    optimizer, scheduler = optimizer_of(net)
    parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    path = arguments.notes / "snapshot.pt"
    start = load_snapshot(path, parts)
    ddp = DistributedDataParallel(net, bucket_cap_mb=BUCKET_CAP_MB)
    prolong(net, optimizer, notes)
    for step, batch in batches(start, arguments.epochs, rank, world, notes):
        optimizer.zero_grad()
        train_on(ddp, batch, notes)
        notes.enter(Phase.BEFORE_OPTIMIZER)
        optimizer.step()
        scheduler.step()
        notes.ended(step, world)
        if rank == 0 and (step + 1) % arguments.snapshot_every == 0:
            save_snapshot(path, parts, step + 1)
        notes.enter(Phase.OUTSIDE)
    notes.result(digests(net, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
