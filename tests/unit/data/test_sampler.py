"""The sharded sampler by itself: epochs, states, what it refuses, and torchdata's loader around it."""

from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from paceline import OptionError, SamplesError, ShardedSampler

# torchdata 0.11, whenever a loader is made.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
LENGTH = 23


def loader(
    world: int, rank: int, *, epoch: int = 1, batch: int | None = 2, workers: int = 0
) -> StatefulDataLoader[Any]:
    sampler = ShardedSampler(LENGTH, world, rank)
    sampler.set_epoch(epoch)
    return StatefulDataLoader(range(LENGTH), batch, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]


def flat(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in torch.as_tensor(batch).reshape(-1)]


def order(epoch: int) -> list[int]:
    sampler = ShardedSampler(LENGTH, 1, 0)
    sampler.set_epoch(epoch)
    return [*sampler]


def test_each_epoch_has_its_own_order() -> None:
    assert order(0) != order(1)
    sampler = ShardedSampler(LENGTH, 2, 1)
    assert [*sampler] == [*sampler]


def test_torchs_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    [*ShardedSampler(LENGTH, 1, 0)]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        assert [*ShardedSampler(LENGTH, 1, 0)] == order(0)


def test_a_loaded_state_is_resumed_once() -> None:
    old = ShardedSampler(LENGTH, 2, 0)
    old.set_epoch(4)
    [*islice(old, 3)]
    new = ShardedSampler(LENGTH, 1, 0, seed=9)
    new.load_state_dict(old.state_dict())
    assert new.epoch == 4
    assert new.state_dict() == old.state_dict()
    assert len(new) == LENGTH - 6
    new.set_epoch(4)  # as a loop over epochs does
    assert [*new] == order(4)[6:]
    assert new.state_dict()["consumed"] == LENGTH
    new.set_epoch(5)
    assert [*new] == order(5)


def test_a_loaded_state_of_another_epoch_is_dropped() -> None:
    sampler = ShardedSampler(LENGTH, 1, 0)
    sampler.load_state_dict({"epoch": 4, "seed": 0, "shuffle": True, "length": LENGTH, "consumed": 5})
    sampler.set_epoch(5)
    assert [*sampler] == order(5)


def test_a_finished_epoch_is_consumed_and_a_new_one_is_not() -> None:
    sampler = ShardedSampler(LENGTH, 2, 1)
    assert len([*sampler]) == 11
    assert sampler.state_dict()["consumed"] == LENGTH
    sampler.set_epoch(1)
    assert sampler.state_dict()["consumed"] == 0


def test_unused_iterators_do_not_use_up_a_state() -> None:
    sampler = ShardedSampler(LENGTH, 1, 0)
    sampler.load_state_dict({"epoch": 0, "seed": 0, "shuffle": True, "length": LENGTH, "consumed": 5})
    iter(sampler)
    assert [*sampler] == order(0)[5:]


@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_torchdatas_loader_resumes_at_another_world_size(batch: int | None, world: int) -> None:
    olds = [loader(3, rank, batch=batch) for rank in range(3)]
    seen = flat(each for old in olds for each in islice(old, 2))
    states = [old.state_dict() for old in olds]
    news = [loader(world, rank, batch=batch) for rank in range(world)]
    for new in news:
        new.load_state_dict(states[0])
    assert sorted(seen) == sorted(order(1)[: len(seen)])
    left = [flat(new) for new in news]
    assert left == [order(1)[len(seen) :][rank::world] for rank in range(world)]


def test_torchdatas_loader_with_workers_saves_what_it_returned_not_what_it_read_ahead() -> None:
    old = loader(2, 0, workers=2)
    batches = iter(old)
    seen = flat(islice(batches, 2))
    state = old.state_dict()
    assert old.sampler.state_dict()["consumed"] > 8, "nothing was read ahead, so that this shows nothing"
    assert seen == order(1)[:8:2]
    new = loader(1, 0, workers=2)
    new.load_state_dict(state)
    assert flat(new) == order(1)[8:]


@pytest.mark.parametrize(("rank", "workers"), [(0, 0), (1, 0), (1, 2)])
def test_torchdatas_loader_begins_the_next_epoch_after_a_finished_one(rank: int, workers: int) -> None:
    # 12 samples and 11 on two ranks, in batches of 11: rank 1 is through a batch before rank 0.
    old = loader(2, rank, batch=11, workers=workers)
    flat(old)
    new = loader(2, rank, epoch=2, batch=11, workers=workers)
    new.load_state_dict(old.state_dict())
    assert flat(new) == order(2)[rank::2]


def test_torchs_loader_with_workers_resumes_from_the_consumed_count() -> None:
    sampler = ShardedSampler(LENGTH, 2, 0)
    batches = iter(DataLoader(range(LENGTH), 2, sampler=sampler, num_workers=2))  # type: ignore[arg-type]
    seen = flat(islice(batches, 2))
    assert sampler.state_dict()["consumed"] > 8, "nothing was read ahead, so that this shows nothing"
    new = ShardedSampler(LENGTH, 1, 0)
    new.load_state_dict(sampler.state_dict(consumed=4))
    assert seen == order(0)[:8:2]
    assert [*new] == order(0)[8:]


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"epoch": 1}, "missing: ['seed', 'shuffle', 'length', 'consumed']"),
        ({"length": LENGTH + 1}, "state: length 24, shuffle True; sampler: length 23, shuffle True"),
        ({"shuffle": False}, "state: length 23, shuffle False"),
        ({"consumed": LENGTH + 1}, "consumed: 24, length: 23"),
        ({"consumed": -1}, "consumed: -1"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_states_of_other_samplers_are_refused(state: dict[str, Any], complaint: str) -> None:
    sampler = ShardedSampler(LENGTH, 1, 0)
    given = state if "epoch" in state else {**sampler.state_dict(), **state}
    with pytest.raises(SamplesError) as caught:
        sampler.load_state_dict(given)
    assert isinstance(caught.value, ValueError)
    assert complaint in str(caught.value)


def test_consumed_must_not_exceed_the_returned_samples() -> None:
    sampler = ShardedSampler(LENGTH, 2, 1)
    with pytest.raises(OptionError, match=r"has not returned any samples yet \(consumed: 2\)"):
        sampler.state_dict(consumed=2)
    [*islice(sampler, 4)]
    for consumed in (5, -1):
        with pytest.raises(OptionError, match=rf"\(consumed: {consumed}, returned: 4\)"):
            sampler.state_dict(consumed=consumed)
    assert len([*sampler]) == 11
    # A last batch that is not full, counted as if it were.
    assert sampler.state_dict(consumed=12)["consumed"] == LENGTH


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((5, 2, 2), r"\(rank: 2, num_replicas: 2\)"),
        ((5, 2, -1), r"\(rank: -1"),
        ((-1, 1, 0), r"\(length: -1\)"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[int, int, int], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        ShardedSampler(*arguments)


def test_without_a_process_group_num_replicas_and_rank_are_needed() -> None:
    with pytest.raises(ValueError, match="process group has not been initialized"):
        ShardedSampler(LENGTH)
