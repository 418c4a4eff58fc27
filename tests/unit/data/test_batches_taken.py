import torch
from torch.utils.data import DataLoader

from paceline.data.batches_taken import BatchCounter


def loader(rows: int = 8) -> DataLoader[torch.Tensor]:
    return DataLoader(torch.arange(rows), batch_size=2)  # type: ignore[arg-type]


def test_batches_are_counted_from_the_beginning_of_a_step() -> None:
    batches, counter = iter(loader()), BatchCounter()
    next(batches)
    assert counter.now() == 1
    counter.begin()
    assert counter.now() == 0
    next(batches)
    next(batches)
    assert counter.now() == 2


def test_an_evaluation_between_two_batches_does_not_count() -> None:
    batches, counter = iter(loader()), BatchCounter()
    next(batches)
    counter.begin()
    for _ in loader(100):
        pass
    next(batches)
    assert counter.now() == 1


def test_an_evaluation_after_the_batch_does_not_count_either() -> None:
    batches, counter = iter(loader()), BatchCounter()
    next(batches)
    counter.begin()
    next(batches)
    for _ in loader(100):
        pass
    assert counter.now() == 1
    counter.begin()
    next(batches)
    assert counter.now() == 1


def test_the_end_of_an_epoch_is_no_batch() -> None:
    counter = BatchCounter()
    batches = iter(loader(2))
    assert len([*batches]) == 1
    assert counter.now() == 1
    del batches
    counter.begin()
    assert counter.now() == 0


def test_each_counter_has_its_own_beginning_and_a_new_epoch_begins_at_zero() -> None:
    first = BatchCounter()
    epoch = iter(loader())
    next(epoch)
    first.begin()
    second, batches = BatchCounter(), iter(loader())
    next(batches)
    assert (first.now(), second.now()) == (1, 1)
    next(batches)
    second.begin()
    next(batches)
    assert (first.now(), second.now()) == (3, 1)
