from hypothesis import given
from hypothesis import strategies as st

from paceline.optim.sharded_optimizer import assign_owners


def test_the_largest_go_first_and_each_to_the_least_loaded() -> None:
    assert assign_owners([1, 5, 4, 3], [0, 0]) == [0, 0, 1, 1]


def test_what_ranks_have_already_counts() -> None:
    assert assign_owners([2, 2], [3, 0]) == [1, 1]


def test_more_ranks_than_parameters_and_none_at_all() -> None:
    assert assign_owners([7], [0, 0, 0]) == [0]
    assert assign_owners([], [0, 0]) == []


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5))
def test_no_rank_has_more_than_another_by_more_than_the_largest(sizes: list[int], world: int) -> None:
    owners = assign_owners(sizes, [0] * world)
    loads = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(world)
    ]
    assert max(loads) - min(loads) <= max(sizes, default=0)
