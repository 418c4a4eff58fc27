from collections.abc import Iterable

import pytest
from torch.utils.data import DataLoader

from paceline import ShardedSampler
from paceline.data.recent_samples import MOST_SAMPLES, RecentSamples, end_step, samples_of_step


def taken(*steps: Iterable[int]) -> RecentSamples:
    """Samples of some steps, the last of which still runs."""
    recent = RecentSamples()
    for number, samples in enumerate(steps):
        if number:
            recent.end_step()
        for sample in samples:
            recent.add(sample)
    return recent


def test_if_each_step_takes_as_many_samples_they_are_the_steps() -> None:
    assert taken([5, 3], [4, 9], [7, 1]).describe() == "samples [7, 1]"


def test_in_the_first_step_a_loader_may_have_read_ahead() -> None:
    assert taken([5, 3]).describe() == "among samples [5, 3]"


def test_of_a_loader_that_reads_ahead_the_last_batches_are_told() -> None:
    """It is two batches ahead, and takes none at the end."""
    assert taken(range(6), (6, 7), (8, 9)).describe() == "among samples [4, 5, 6, 7, 8, 9]"
    assert taken(range(6), (6, 7), (), ()).describe() == "among samples [2, 3, 4, 5, 6, 7]"


def test_a_step_without_samples_of_its_own_may_have_those_of_the_last() -> None:
    assert taken([5, 3], [4, 9], []).describe() == "among samples [4, 9]"


@pytest.mark.parametrize("steps", [[], [[], []], [range(MOST_SAMPLES + 1), (1,)]])
def test_nothing_is_told_where_nothing_is_known(steps: list[Iterable[int]]) -> None:
    assert taken(*steps).describe() == ""


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_loaders_batch_are_told(workers: int) -> None:
    """Another sampler in between, as that of an evaluation, changes nothing."""
    loader = DataLoader(range(40), 2, sampler=ShardedSampler(40, 2, 1), num_workers=workers)  # type: ignore[arg-type]
    told = []
    for step, batch in enumerate(loader):
        if step == 4:
            break
        told.append((batch.tolist(), samples_of_step()))
        end_step()
        list(ShardedSampler(6, 2, 0))
    for samples, words in told:
        start, _, listed = words.partition("samples ")
        known = [int(each) for each in listed.strip("[]").split(", ")]
        assert {*samples} <= {*known}
        if not workers and samples != told[0][0]:
            assert (start, known) == ("", samples)
