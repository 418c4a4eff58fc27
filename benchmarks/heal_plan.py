"""Which ranks are killed, and when. Pure: the same seed gives the same plan."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# After a loss was healed, all ranks train for so long before the next one.
QUIET_SECONDS = 2.5
# Then the kill comes at any moment of this time, which is longer than several steps.
CHANCE_SECONDS = 1.0
# A kill while the loss before is healed comes so long after it.
HEALING_SECONDS = (0.05, 0.4)
# With fewer kills, each of them is of one rank.
LEAST_WITH_PAIRS = 6

ONE, AT_ONCE, WHILE_HEALING = "one rank", "two ranks at once", "one, and one while it is replaced"
KINDS = (ONE, AT_ONCE, WHILE_HEALING)


@dataclass(frozen=True)
class Strike:
    """One or two kills, and when they come.

    Attributes:
        kind: one of KINDS.
        wait: how many seconds all ranks train before it.
        ranks: who is killed.
        delay: how many seconds lie between two kills.
    """

    kind: str
    wait: float
    ranks: tuple[int, ...]
    delay: float = 0.0


def share_kills(kills: int, worlds: Sequence[int]) -> dict[int, int]:
    """How many kills each number of ranks gets."""
    return {world: kills // len(worlds) + (place < kills % len(worlds)) for place, world in enumerate(worlds)}


def plan(world: int, kills: int, seed: int, *, pairs: bool = True) -> list[Strike]:
    """The strikes of all runs with a number of ranks.

    Args:
        world: the number of ranks.
        kills: how many ranks are killed in all.
        seed: decides about ranks and moments.
        pairs: whether some strikes kill two ranks.
    """
    chance = random.Random(f"{seed} {world}")  # noqa: S311  # no secret
    kinds: list[str] = []
    if pairs and kills >= LEAST_WITH_PAIRS:
        kinds = [WHILE_HEALING, AT_ONCE] if world > 2 else [WHILE_HEALING]
    kinds += [ONE] * (kills - 2 * len(kinds))
    chance.shuffle(kinds)
    return [_strike(kind, world, chance) for kind in kinds]


def _strike(kind: str, world: int, chance: random.Random) -> Strike:
    wait = QUIET_SECONDS + chance.uniform(0, CHANCE_SECONDS)
    if kind == AT_ONCE:
        return Strike(kind, wait, tuple(chance.sample(range(world), 2)))
    first = chance.randrange(world)
    if kind == ONE:
        return Strike(kind, wait, (first,))
    # One rank must be left that has the state: of two ranks, the new one is killed again.
    second = first if world == 2 else chance.randrange(world)
    return Strike(kind, wait, (first, second), chance.uniform(*HEALING_SECONDS))


def first_run(strikes: Sequence[Strike], kills: int) -> list[Strike]:
    """The strikes of the next run: the first ones, up to a number of kills, and at least one."""

    def begin() -> Iterator[Strike]:
        left = kills
        for number, strike in enumerate(strikes):
            left -= len(strike.ranks)
            if left < 0 and number:
                return
            yield strike

    return list(begin())
