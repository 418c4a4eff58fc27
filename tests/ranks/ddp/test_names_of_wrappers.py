"""Wrappers of one group know each other by a name, also after one rank alone has made or copied some."""

import copy

import pytest
from torch import distributed
from wrappers import everyones, raise_planned, train, two_layers

from paceline import DistributedDataParallel, PeerError
from paceline.testing import RankPool, run_ranks

TIMEOUT = 40.0


def names_after(rank: int, what: str) -> None:
    first = DistributedDataParallel(two_layers())
    if rank == 0 and what == "a copy":
        copies = [copy.deepcopy(first) for _ in range(2)]
        assert len({each._group.wrapper for each in (first, *copies)}) == 3
    elif rank == 0 and what == "a wrapper of its own group":
        DistributedDataParallel(
            two_layers(), process_group=distributed.new_group([0], use_local_synchronization=True)
        )
    second = DistributedDataParallel(two_layers())
    assert len(set(everyones((second._group.name, second._group.wrapper)))) == 1


@pytest.mark.parametrize("what", ["nothing", "a copy", "a wrapper of its own group"])
def test_ranks_agree_on_the_name_of_a_wrapper(what: str) -> None:
    run_ranks(names_after, args=(what,), timeout=TIMEOUT)


def copies_on_all_ranks(rank: int) -> None:
    first = DistributedDataParallel(two_layers())
    copied = copy.deepcopy(first)
    assert len(set(everyones(copied._group.wrapper))) == 1
    if rank == 1:
        copied.module[0].weight.register_hook(raise_planned)
    with pytest.raises(
        ZeroDivisionError if rank else PeerError, match="planned" if rank else "rank 1 raised"
    ):
        train(copied, rank)


def test_copies_that_every_rank_makes_have_one_name_too(pair: RankPool) -> None:
    pair.run(copies_on_all_ranks)


def raise_in_subgroup(rank: int, where: str) -> str:
    groups = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    ddp = DistributedDataParallel(two_layers(), process_group=groups[rank % 2])
    handle = None
    if rank == 3 and where == "backward":
        handle = ddp.module[0].weight.register_hook(raise_planned)
    elif rank == 3:
        handle = ddp.module.register_forward_pre_hook(raise_planned)
    try:
        train(ddp, rank)
    except (PeerError, ZeroDivisionError) as error:
        return str(error)
    finally:
        if handle is not None:
            handle.remove()
    return "fine"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_errors_of_a_subgroup_name_global_ranks(four: RankPool, where: str) -> None:
    said = four.run(raise_in_subgroup, where)
    assert said[0] == said[2] == "fine"
    assert said[3] == "planned"
    assert "rank 3 raised" in said[1]
    assert "here: rank 1" in said[1]
