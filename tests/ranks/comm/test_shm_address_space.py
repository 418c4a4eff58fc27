"""A rank whose address space is limited: all ranks share memory, or none does, and no step fails."""

import resource
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from paceline import DistributedDataParallel
from paceline.comm.group import Group
from paceline.comm.shm.arena import Span
from paceline.comm.shm.collectives import BroadcastBytes
from paceline.comm.shm.local_ranks import find_local_ranks
from paceline.comm.shm.segment import REGION_BYTES, REGIONS
from paceline.errors import CollectiveError
from paceline.testing import run_ranks

MIB, GIB = 1 << 20, 1 << 30


def limit_address_space(more: int) -> None:
    """Let this process map that many more bytes than it has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))


class Scaled(nn.Module):
    """Parameters whose gradients are the rank's number and one, in several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(MIB // 4)) for _ in range(6))

    def forward(self) -> torch.Tensor:
        return sum(weight.sum() for weight in self.weights) * (distributed.get_rank() + 1)


def steps_with_limit(rank: int, limited: int, more: int) -> tuple[list[float], bool, list[str]]:
    """Gradients of each step, whether ranks shared memory, and what was warned of."""
    if rank == limited:
        limit_address_space(more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(Scaled(), bucket_cap_mb=2)
        found = []
        for _ in range(3):
            ddp.zero_grad()
            ddp().backward()
            found += [weight.grad.mean().item() for weight in ddp.module.weights if weight.grad is not None]
    return found, ddp._group.shared is not None, [str(each.message) for each in caught]


# Two ranks need 20 MiB for the channels, and a window of 1 GiB and 4 MiB for each rank.
@pytest.mark.parametrize(
    ("more", "shares"),
    [
        (200 * MIB, False),
        (GIB - 100 * MIB, False),
        (GIB + 100 * MIB, False),
        (2 * GIB - 100 * MIB, False),
        (2 * GIB + 8 * MIB, False),
        (2 * GIB + 400 * MIB, True),
        (4 * GIB, True),
    ],
)
@pytest.mark.parametrize("limited", [0, 1])
def test_all_ranks_share_memory_or_none_does(limited: int, more: int, *, shares: bool) -> None:
    (first, alike, warned), (second, other_alike, silent) = run_ranks(
        steps_with_limit, 2, args=(limited, more), timeout=120
    )
    assert first == second == [1.5] * 18
    assert (alike, other_alike) == (shares, shares)
    assert silent == []
    assert len(warned) == (0 if shares else 1)
    if not shares:
        assert f"rank {limited}: " in warned[0]
        assert "mmap: ENOMEM" in warned[0]


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:paceline")


def windows_after_a_refusal(rank: int) -> tuple[bool, int, int]:
    group = Group(distributed.group.WORLD)
    local_ranks = find_local_ranks(group)
    assert local_ranks is not None
    before = mappings()
    if rank:
        limit_address_space(GIB + 100 * MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        channel = local_ranks.open_channel(group, nbytes=MIB, timeout=10.0)
    return channel is None, before, mappings()


def test_after_a_refusal_address_space_is_free_again() -> None:
    for refused, before, after in run_ranks(windows_after_a_refusal, 2):
        assert (refused, before) == (True, after)


def map_too_late(rank: int) -> str:
    group = Group(distributed.group.WORLD)
    local_ranks = find_local_ranks(group)
    assert local_ranks is not None
    channel = local_ranks.open_channel(group, nbytes=MIB, timeout=30.0)
    assert channel is not None
    if rank:
        limit_address_space(100 * MIB)
    else:  # where the other rank has not mapped anything
        channel._stages._staging = Span(REGIONS + REGION_BYTES // 2, channel._stages._staging.nbytes)
    try:
        channel.run(BroadcastBytes(channel, torch.ones(MIB, dtype=torch.uint8), root=0))
        channel.run(BroadcastBytes(channel, torch.ones(MIB, dtype=torch.uint8), root=1))
    except CollectiveError as error:
        return str(error)
    return ""


def test_what_cannot_be_mapped_later_is_an_error_that_says_what_to_do() -> None:
    told, limited = run_ranks(map_too_late, 2, timeout=120)
    assert "cannot be mapped here" in limited
    assert "mmap: ENOMEM" in limited
    assert 'transport="c10d"' in limited
    assert "rank 1" in told or "missing ranks: [1]" in told  # it may have ended by then
