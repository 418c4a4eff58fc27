"""However many samples and ranks: each sample goes to one rank, once, also when the world changes midway."""

from collections.abc import Iterator
from itertools import islice

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from paceline import ShardedSampler

lengths = st.integers(0, 60)
worlds = st.integers(1, 7)
batch_sizes = st.integers(1, 5)


def team(length: int, world: int, *, shuffle: bool, epoch: int) -> list[ShardedSampler]:
    samplers = [ShardedSampler(length, world, rank, shuffle, seed=3) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def in_step(walks: list[Iterator[int]], batch: int) -> list[list[int]]:
    """One batch of every rank; an empty one from those that are through."""
    return [[*islice(walk, batch)] for walk in walks]


def dealt(batches: list[list[int]]) -> list[int]:
    """The samples of one step in the order of the epoch."""
    longest = max(map(len, batches))
    return [batch[place] for place in range(longest) for batch in batches if place < len(batch)]


@given(length=lengths, world=worlds, shuffle=st.booleans(), epoch=st.integers(0, 3))
def test_each_sample_comes_once_and_ranks_differ_by_one_at_most(
    length: int, world: int, shuffle: bool, epoch: int
) -> None:
    samplers = team(length, world, shuffle=shuffle, epoch=epoch)
    shares = [[*sampler] for sampler in samplers]
    assert sorted(index for share in shares for index in share) == [*range(length)]
    assert [len(sampler) for sampler in samplers] == [len(share) for share in shares]
    assert len(shares[0]) - len(shares[-1]) in (0, 1)
    assert [len(share) for share in shares] == sorted(map(len, shares), reverse=True)


@given(each=st.integers(1, 12), world=worlds, shuffle=st.booleans(), epoch=st.integers(0, 3))
def test_where_torch_does_not_pad_ranks_get_torchs_samples(
    each: int, world: int, shuffle: bool, epoch: int
) -> None:
    for rank, ours in enumerate(team(each * world, world, shuffle=shuffle, epoch=epoch)):
        theirs = DistributedSampler(torch.empty(each * world), world, rank, shuffle, seed=3)  # type: ignore[arg-type]
        theirs.set_epoch(epoch)
        assert [*ours] == [*theirs]


@given(
    length=lengths,
    legs=st.lists(st.tuples(worlds, batch_sizes, st.integers(0, 4)), min_size=1, max_size=5),
    shuffle=st.booleans(),
)
def test_resuming_at_any_world_sizes_goes_through_the_order_once(
    length: int, legs: list[tuple[int, int, int]], shuffle: bool
) -> None:
    (alone,) = team(length, 1, shuffle=shuffle, epoch=2)
    order, seen, state = [*alone], [], None
    for world, batch, steps in [*legs, (2, 3, length)]:
        samplers = [ShardedSampler(length, world, rank, shuffle) for rank in range(world)]
        for sampler in samplers:
            if state is None:
                sampler.seed = 3
                sampler.set_epoch(2)
            else:
                sampler.load_state_dict(state)
        walks = [iter(sampler) for sampler in samplers]
        for _ in range(steps):
            seen += dealt(in_step(walks, batch))
            states = [walk.state_dict() for walk in walks]
            # At the end, who had fewer cannot know that the others are through.
            assert states[0]["consumed"] == len(seen)
            assert all(each == states[0] for each in states) or len(seen) == length
        state = walks[0].state_dict()
    assert seen == order


@given(length=lengths, world=worlds, batch=batch_sizes, ahead=st.integers(0, 3), done=st.integers(0, 20))
def test_samples_read_ahead_but_not_consumed_come_again(
    length: int, world: int, batch: int, ahead: int, done: int
) -> None:
    samplers = team(length, world, shuffle=True, epoch=0)
    order = [*team(length, 1, shuffle=True, epoch=0)[0]]
    for sampler in samplers:
        [*islice(sampler, (done + ahead) * batch)]
    states = [sampler.state_dict(consumed=done * batch) for sampler in samplers]
    assert all(state == states[0] for state in states)
    resumed = ShardedSampler(length, 1, 0, seed=3)
    resumed.load_state_dict(states[0])
    assert [*resumed] == order[done * batch * world :]
