"""Lazy buckets on real ranks: shared memory is allocated and released with the gradients."""

from pathlib import Path

import pytest
from batches import rows
from torch import distributed, nn
from wrappers import Net

from paceline import DistributedDataParallel
from paceline.testing import RankPool, run_ranks

TIMEOUT = 30.0


def differently(rank: int) -> str:
    try:
        DistributedDataParallel(Net(), lazy_bucket_allocation=rank == 0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_all_ranks_must_allocate_in_the_same_way(pair: RankPool) -> None:
    for said in pair.run(differently):
        assert "lazy_bucket_allocation" in said


def shared_pages() -> int:
    """The memory behind this rank's shared-memory files, in bytes."""
    files = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    ours = [entry.stat() for entry in files if "memfd:paceline" in str(entry.readlink())]
    return sum({status.st_ino: status.st_blocks * 512 for status in ours}.values())


def released(rank: int, lazy: bool) -> list[tuple[int, int]]:
    """How much shared memory there is after each backward, and when its gradients are gone."""
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    ddp = DistributedDataParallel(net, lazy_bucket_allocation=lazy, bucket_cap_mb=0.25)
    held = []
    for number in range(3):
        ddp(rows(rank, number, width=256)).sum().backward()
        distributed.barrier()
        with_grads = shared_pages()
        distributed.barrier()
        ddp.zero_grad()
        distributed.barrier()
        held.append((with_grads, shared_pages()))
        distributed.barrier()
    return held


@pytest.mark.parametrize("lazy", [False, True], ids=["kept", "lazy"])
def test_shared_memory_is_given_back_when_gradients_are_gone(lazy: bool) -> None:
    gradients = 2 * 8 * (256 * 256 + 256) * 4  # of both ranks
    for held in run_ranks(released, args=(lazy,), timeout=TIMEOUT):
        for with_grads, without in held:
            assert with_grads >= gradients
            assert with_grads - without >= 0.9 * gradients if lazy else without >= gradients
