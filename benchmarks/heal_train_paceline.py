"""The training of the benchmark of healing with paceline.Run; see heal.py, which starts it."""

import os
from functools import partial

import torch.distributed as dist
from heal_notes import Phase
from heal_training import (
    BATCH,
    BUCKET_CAP_MB,
    SHARDS,
    dataset,
    digests,
    load,
    network,
    optimizer_of,
    own_rank,
    parse,
    prolong,
    train_on,
)
from torch.utils.data import DataLoader

import paceline


def main() -> None:
    arguments, notes = parse(own_rank())
    paceline.init()
    net, samples = network(), dataset()
    ddp = paceline.DistributedDataParallel(net, shards=SHARDS, bucket_cap_mb=BUCKET_CAP_MB)
    optimizer, scheduler = optimizer_of(net)
    sampler = paceline.ShardedBatchSampler(samples, shards=SHARDS, batch_size=BATCH)
    loader = DataLoader(
        samples,
        batch_sampler=sampler,
        num_workers=arguments.workers,
        collate_fn=partial(load, notes=notes),
    )
    run = paceline.Run(ddp, optimizer, loader, epochs=arguments.epochs, scheduler=scheduler)
    share = int(os.environ["WORLD_SIZE"]) / SHARDS  # the shards of a rank share the pauses of a step
    prolong(net, optimizer, notes, share=share)
    for step in run:
        with step:
            for batch in step.shards():
                train_on(ddp, batch, notes, share=share)
            notes.enter(Phase.BEFORE_OPTIMIZER)
            optimizer.step()
            scheduler.step()
            notes.ended(step.number, dist.get_world_size())
        notes.enter(Phase.OUTSIDE)
    notes.result(digests(net, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
