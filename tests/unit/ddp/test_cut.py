"""Which rank has which part of each parameter."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.ddp.buckets.cut import SMALLEST_CUT, Cut, Range, assign_owners
from paceline.ddp.buckets.plan import Slot


def test_the_largest_go_first_each_to_the_rank_with_least() -> None:
    assert assign_owners([1, 5, 4, 3], [0, 0]) == [0, 0, 1, 1]


def test_bytes_that_ranks_own_already_count() -> None:
    assert assign_owners([2, 2], [3, 0]) == [1, 1]


def test_there_may_be_more_ranks_than_parameters_and_no_parameters() -> None:
    assert assign_owners([7], [0, 0, 0]) == [0]
    assert assign_owners([], [0, 0]) == []


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5))
def test_ranks_differ_by_the_largest_parameter_at_most(sizes: list[int], world: int) -> None:
    owners = assign_owners(sizes, [0] * world)
    loads = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(world)
    ]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def slots_of(sizes: list[int]) -> list[Slot]:
    return [Slot(index, f"p{index}", numel, 4 * numel, "cpu") for index, numel in enumerate(sizes)]


@given(st.lists(st.integers(0, 3 * SMALLEST_CUT)), st.integers(1, 9))
def test_each_element_has_one_rank(sizes: list[int], ranks: int) -> None:
    cut = Cut(slots_of(sizes), ranks)
    for slot, numel in enumerate(sizes):
        ranges = cut[slot]
        assert [each.start for each in ranges] == [0, *(each.end for each in ranges[:-1])]
        assert ranges[-1].end == numel
        assert all(0 <= each.owner < ranks for each in ranges)
        assert len(ranges) == 1 or all(each.start % 64 == 0 for each in ranges)


def test_large_parameters_are_cut_and_small_ones_are_not() -> None:
    cut = Cut(slots_of([SMALLEST_CUT, SMALLEST_CUT - 1]), 2)
    half = SMALLEST_CUT // 2
    assert cut[0] == [Range(0, 0, half), Range(1, half, SMALLEST_CUT)]
    assert cut[1] == [Range(0, 0, SMALLEST_CUT - 1)]


@given(st.integers(1, 200), st.integers(2, 4))
def test_ranks_get_as_many_small_ones_that_follow_each_other(count: int, ranks: int) -> None:
    cut = Cut(slots_of([16] * count), ranks)
    owners = [cut[slot][0].owner for slot in range(count)]
    assert owners == sorted(owners)
    counts = [owners.count(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


def test_a_parameter_may_be_kept_whole() -> None:
    cut = Cut(slots_of([SMALLEST_CUT]), 3)
    cut.keep_whole(0, 2)
    assert cut[0] == [Range(2, 0, SMALLEST_CUT)]
