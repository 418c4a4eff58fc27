"""Which optimizer ``paceline bench`` says to take."""

import pytest

from paceline.tools.bench.optimizer_choice import choose_optimizer
from paceline.tools.bench.sides import HOST, PLAIN, SHARDED, Side

MEMORY = {PLAIN: 100.0, SHARDED: 60.0, HOST: 40.0}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (
            {PLAIN: 1.0, SHARDED: 1.2, HOST: 0.71},
            "take HostOptimizer: 0.71 of the plain wrapper's step, 0.40 of its memory",
        ),
        (
            {PLAIN: 1.0, SHARDED: 1.049, HOST: 1.06},
            "take ShardedOptimizer: 1.05 of the plain wrapper's step, 0.60 of its memory",
        ),
        (
            {PLAIN: 1.0, SHARDED: 1.2, HOST: 1.06},
            "take the plain optimizer: ShardedOptimizer takes 1.20 of its step, 0.60 of its memory; "
            "HostOptimizer takes 1.06 of its step, 0.40 of its memory",
        ),
        (
            {PLAIN: 1.0, SHARDED: 1.2},
            "take the plain optimizer: ShardedOptimizer takes 1.20 of its step, 0.60 of its memory",
        ),
        ({PLAIN: 1.0}, "take the plain optimizer: no other takes the model"),
    ],
    ids=["fastest", "within 5 %", "plain", "one refused", "all refused"],
)
def test_the_fastest_is_taken_and_among_equals_the_one_with_the_least_memory(
    seconds: dict[Side, float], words: str
) -> None:
    assert str(choose_optimizer(seconds, MEMORY)) == words
