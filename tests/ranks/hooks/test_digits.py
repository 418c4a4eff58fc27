"""A network learns the digits under each hook as well as without one; benchmarks/hooks.py has the table."""

import pytest
from digits_training import HOOKS, accuracy_on_rank

from paceline.testing import RankPool

EPOCHS = 6


# The smallest messages take longer to tell all than this is trained for.
@pytest.mark.parametrize("name", [name for name in HOOKS if name != "top_k(0.01)"])
def test_a_hook_learns_as_well_as_the_average(pair: RankPool, name: str) -> None:
    first, *others = pair.run(accuracy_on_rank, name, 0, EPOCHS)
    assert others == [first], "ranks ended with different parameters"
    # Without a hook it is 0.95; a hook whose gradients are wrong, or lost, stays far behind.
    assert first > 0.92
