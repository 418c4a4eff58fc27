"""Which rank owns which parameter of a ShardedOptimizer."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.ddp.buckets.cut import assign_owners


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
