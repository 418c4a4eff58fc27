"""Steps that have the same samples for every number of ranks."""

from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from paceline import ShardedBatchSampler
from paceline.errors import OptionError, SamplesError


def samplers(length: int, shards: int, batch_size: int, world: int) -> list[ShardedBatchSampler]:
    return [
        ShardedBatchSampler(length, shards, batch_size, num_replicas=world, rank=rank)
        for rank in range(world)
    ]


def steps(ranks: list[ShardedBatchSampler]) -> list[list[int]]:
    """The samples of each step, of all ranks in their order."""
    return [[*chain(*batches)] for batches in zip(*ranks, strict=True)]


@st.composite
def settings(draw: st.DrawFn) -> tuple[int, int, int]:
    shards = draw(st.integers(1, 9))
    return draw(st.integers(shards, 80)), shards, draw(st.integers(shards, 30))


@given(settings(), st.data())
def test_each_sample_comes_once_and_in_the_same_step_whatever_the_number_of_ranks(
    given_settings: tuple[int, int, int], data: st.DataObject
) -> None:
    length, shards, batch_size = given_settings
    world = data.draw(st.integers(1, shards))
    found = steps(samplers(length, shards, batch_size, world))
    assert found == steps(samplers(length, shards, batch_size, 1))
    assert sorted(chain(*found)) == list(range(length))
    assert min(map(len, found)) >= shards


@given(settings(), st.data())
def test_another_number_of_ranks_resumes_where_the_first_has_stopped(
    given_settings: tuple[int, int, int], data: st.DataObject
) -> None:
    length, shards, batch_size = given_settings
    [one] = samplers(length, shards, batch_size, 1)
    one.set_epoch(3)
    whole = list(one)
    stop = data.draw(st.integers(0, len(whole)))
    state = one.state_dict(steps=stop)
    ranks = samplers(length, shards, batch_size, data.draw(st.integers(1, shards)))
    for rank in ranks:
        rank.load_state_dict(state)
        rank.set_epoch(rank.epoch)
    assert len(ranks[0]) == len(whole) - stop
    assert steps(ranks) == whole[stop:]


def test_epochs_have_orders_of_their_own() -> None:
    [sampler] = samplers(20, 2, 4, 1)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


def batches(loader: DataLoader[int]) -> Iterator[list[int]]:
    return (batch.tolist() for batch in loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_counts_batches_that_the_loader_has_given_and_not_those_it_has_read(workers: int) -> None:
    [sampler] = samplers(40, 4, 8, 1)
    loader: DataLoader[int] = DataLoader(range(40), batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    taken = []
    for batch in batches(loader):
        taken.append(batch)
        if len(taken) == 2:
            break
    state = sampler.state_dict()
    assert state["consumed"] == 16
    sampler.load_state_dict(state)
    assert sorted(chain(*taken, *batches(loader))) == list(range(40))
    assert sampler.state_dict()["consumed"] == 40


def test_without_a_loader_the_state_has_to_be_told_how_many_steps_were_trained() -> None:
    [sampler] = samplers(40, 4, 8, 1)
    next(iter(sampler))
    with pytest.raises(OptionError, match=r"say how many were trained"):
        sampler.state_dict()
    assert sampler.state_dict(steps=1)["consumed"] == 8
    with pytest.raises(OptionError, match=r"\(steps: 2, batches: 1\)"):
        sampler.state_dict(steps=2)


def test_a_state_of_other_steps_is_refused() -> None:
    [sampler] = samplers(40, 4, 8, 1)
    [other] = samplers(40, 4, 16, 1)
    with pytest.raises(SamplesError, match=r"batch_size: 16, in the state: 8"):
        other.load_state_dict(sampler.state_dict())
    [longer] = samplers(41, 4, 8, 1)
    with pytest.raises(SamplesError, match="another order of samples"):
        longer.load_state_dict(sampler.state_dict())


def test_settings_without_a_sample_per_shard_are_refused() -> None:
    with pytest.raises(OptionError, match=r"batch_size: 7, shards: 8"):
        samplers(100, 8, 7, 1)
    with pytest.raises(OptionError, match=r"samples: 7, shards: 8"):
        samplers(7, 8, 8, 1)
    with pytest.raises(OptionError, match=r"shards: 8, ranks: 9"):
        samplers(100, 8, 8, 9)
