"""Which ranks share memory, by proof; and what happens where a rank cannot."""

import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import distributed, nn

from paceline import DistributedDataParallel
from paceline.comm.group import Group
from paceline.comm.shm import libc
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collectives import Barrier, BroadcastBytes
from paceline.comm.shm.local_ranks import HOST_VARIABLE, LocalRanks, find_local_ranks
from paceline.comm.shm.segment import Segment
from paceline.testing import RankPool

MIB = 1 << 20


def find(pool: RankPool, arrange: Callable[..., None], *args: Any) -> list[tuple[Any, list[str]]]:
    """On each rank: the hosts and how their file is reached, and what was warned of."""
    return pool.run(find_on_rank, arrange, *args)


def find_on_rank(rank: int, arrange: Callable[..., None], *args: Any) -> tuple[Any, list[str]]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arrange(rank, patch, *args)
        found = find_local_ranks(Group(distributed.group.WORLD))
    what = None if found is None else (found.hosts, found._segment.is_limited, found._segment.path)
    del found
    gc.collect()
    left = list(Path("/dev/shm").glob("paceline-*"))
    return what, [str(each.message) for each in caught] + [f"left: {path}" for path in left if is_ours(path)]


def is_ours(path: Path) -> bool:
    return any(os.path.realpath(each) == str(path) for each in Path("/proc/self/fd").iterdir())


def nothing(rank: int, patch: pytest.MonkeyPatch) -> None:
    pass


def refuse(*_: object) -> NoReturn:
    raise PermissionError("not allowed here")


def cannot_see_each_other(_: int, patch: pytest.MonkeyPatch) -> None:
    """As in another PID namespace, where the path is that of another file, or of none."""
    original = Segment.nameless

    def elsewhere() -> Segment:
        made = original()
        made.path = "/proc/self/exe"
        return made

    patch.setattr(Segment, "nameless", elsewhere)


def no_memfd(_: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segment, "nameless", refuse)


def no_way(rank: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segment, "nameless", refuse)
    if rank:
        patch.setattr(Segment, "at_path", refuse)


def another_file(rank: int, patch: pytest.MonkeyPatch) -> None:
    """The right name, but not the file that the others have."""
    if rank:
        made = [Segment.nameless(), Segment.nameless()]
        patch.setattr(Segment, "at_path", lambda *_: made.pop())


def lacks_a_function(rank: int, patch: pytest.MonkeyPatch, poor: int) -> None:
    if rank == poor:
        patch.setattr(libc, "_clock_wait", None)


def hosts(rank: int, patch: pytest.MonkeyPatch, names: list[str]) -> None:
    patch.setenv(HOST_VARIABLE, names[rank])


def test_ranks_of_one_machine_share_a_file_without_a_name(pair: RankPool) -> None:
    for (found, limited, path), said in find(pair, nothing):
        assert (found, limited, said) == ([[0, 1]], False, [])
        assert path.startswith("/proc/")


@pytest.mark.parametrize("arrange", [cannot_see_each_other, no_memfd])
def test_where_that_cannot_be_opened_it_is_a_file_in_shm_without_a_warning(
    pair: RankPool, arrange: Callable[..., None]
) -> None:
    for (found, limited, path), said in find(pair, arrange):
        assert (found, limited, said) == ([[0, 1]], True, [])
        assert not Path(path).exists()


def test_where_no_file_can_be_shared_one_rank_warns_once(pair: RankPool) -> None:
    (first, warned), (second, silent) = find(pair, no_way)
    assert (first, second, silent) == (None, None, [])
    [text] = warned
    assert "ranks of one host cannot share memory" in text
    assert "rank 1: not allowed here" in text


def test_a_file_without_the_others_secret_proves_nothing(pair: RankPool) -> None:
    (first, warned), (second, silent) = find(pair, another_file)
    assert (first, second, silent) == (None, None, [])
    assert "rank 0: the ranks' secrets are not all there; rank 1: " in warned[0]
    assert "is another file here" in warned[0]


def test_a_rank_whose_c_library_lacks_something_is_by_itself(four: RankPool) -> None:
    for (found, _, _), said in find(four, lacks_a_function, 2):
        assert (sorted(found), said) == ([[0, 1, 3], [2]], [])


def test_one_machine_can_count_as_several_hosts(four: RankPool) -> None:
    assert {str(what[0]) for what, _ in find(four, hosts, ["a", "b", "a", "b"])} == {"[[0, 2], [1, 3]]"}
    assert find(four, hosts, ["a", "b", "c", "d"]) == [(None, [])] * 4


class Counting(nn.Module):
    """A parameter whose gradient is the rank's number."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self) -> torch.Tensor:
        return self.weight.sum() * (distributed.get_rank() + 1)


def steps_without_memory(rank: int) -> tuple[float, bool, list[str]]:
    def full(self: Segment, offset: int, nbytes: int) -> None:
        if nbytes >= MIB and rank == 1:
            raise OSError(28, "No space left on device")
        reserve(self, offset, nbytes)

    reserve = Segment.reserve
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(Segment, "reserve", full)
        ddp = DistributedDataParallel(Counting(MIB))
        for _ in range(2):
            ddp.zero_grad()
            ddp().backward()
        assert ddp.module.weight.grad is not None
        mean = ddp.module.weight.grad.mean().item()
    return mean, ddp._group.shared is None, [str(each.message) for each in caught]


def test_a_wrapper_without_memory_on_one_rank_uses_the_process_group_on_all(pair: RankPool) -> None:
    (mean, alone, warned), (other_mean, other_alone, silent) = pair.run(steps_without_memory)
    assert (mean, other_mean, alone, other_alone, silent) == (1.5, 1.5, True, True, [])
    [text] = warned
    assert "not enough shared memory" in text
    assert "rank 1: [Errno 28]" in text


def opened(local_ranks: LocalRanks, group: Group, nbytes: int = MIB) -> Channel:
    channel = local_ranks.open_channel(group, nbytes=nbytes, timeout=10.0)
    assert channel is not None
    return channel


def memory_after_channels(_: int, channels: int) -> list[int]:
    group = Group(distributed.group.WORLD)
    local_ranks = find_local_ranks(group)
    assert local_ranks is not None
    used = []
    for _turn in range(channels):
        channel = opened(local_ranks, group)
        block = channel.arena.empty(MIB, torch.uint8)
        channel.run(BroadcastBytes(channel, torch.zeros(3 * MIB, dtype=torch.uint8), root=0))
        channel.run(BroadcastBytes(channel, torch.zeros(3 * MIB, dtype=torch.uint8), root=1))
        del channel, block
        distributed.barrier()
        used.append(os.fstat(local_ranks._segment.file).st_blocks * 512)
    return used


def test_channels_that_are_gone_on_every_rank_give_their_memory_back(pair: RankPool) -> None:
    for used in pair.run(memory_after_channels, 12):
        assert used[-1] <= used[3]


def outlives(rank: int) -> list[int]:
    group = Group(distributed.group.WORLD)
    local_ranks = find_local_ranks(group)
    assert local_ranks is not None
    first = opened(local_ranks, group)
    kept = first if rank else None
    del first
    second = opened(local_ranks, group)
    third = opened(local_ranks, group)
    for channel in (second, third):
        channel.run(Barrier(channel))
    result = [local_ranks._segment.at(0, 1).numel(), len(local_ranks._unused), len(local_ranks._dropped)]
    del kept
    return result


def test_a_channel_that_one_rank_still_has_is_not_used_again(pair: RankPool) -> None:
    assert pair.run(outlives) == [[1, 0, 1], [1, 0, 0]]


def wrappers_in_turn(_: int, count: int) -> tuple[int, int]:
    found = []
    for _turn in range(count):
        ddp = DistributedDataParallel(Counting(1000))
        ddp().backward()
        del ddp
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:paceline")
        found.append((len(list(Path("/proc/self/fd").iterdir())), maps))
    return found[3] == found[-1], found[-1][1]


def test_wrappers_in_turn_leave_neither_descriptors_nor_mappings(pair: RankPool) -> None:
    assert all(same for same, _ in pair.run(wrappers_in_turn, 20))


def wraps_nothing(_: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(Counting(0))
    return [str(each.message) for each in caught]


def test_a_wrapper_that_needs_no_memory_is_no_reason_for_a_warning(pair: RankPool) -> None:
    assert pair.run(wraps_nothing) == [[], []]
