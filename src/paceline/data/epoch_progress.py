"""How far an epoch has come, and which positions of its order each rank takes. Pure: no tensors here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.errors import SamplesError


@dataclass(frozen=True)
class EpochProgress:
    """An epoch's order of samples, and how much of it all ranks have consumed.

    The world size is not part of it, so any number of ranks can resume from it.

    Attributes:
        epoch: the epoch.
        seed: the seed of the order, together with the epoch.
        shuffle: whether the order is shuffled.
        length: how many samples the dataset has.
        consumed: how many samples, from the start of the order, all ranks together have consumed.
    """

    epoch: int
    seed: int
    shuffle: bool
    length: int
    consumed: int = 0

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "EpochProgress":
        """Read it from a sampler's state dict."""
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in state]:
            raise SamplesError(f"not a state of a sharded sampler (missing: {missing}, found: {[*state]})")
        progress = cls(**{name: state[name] for name in names})
        if not 0 <= progress.consumed <= progress.length:
            raise SamplesError(
                "a state must have consumed between 0 and all samples "
                f"(consumed: {progress.consumed}, length: {progress.length})"
            )
        return progress

    def state_dict(self) -> dict[str, Any]:
        """Its fields as plain values."""
        return asdict(self)

    def check_order(self, *, length: int, shuffle: bool) -> None:
        """Refuse to resume in another order of samples."""
        if (self.length, self.shuffle) != (length, shuffle):
            raise SamplesError(
                "the state belongs to another order of samples "
                f"(state: length {self.length}, shuffle {self.shuffle}; "
                f"sampler: length {length}, shuffle {shuffle})"
            )


@dataclass(frozen=True)
class RankSplit:
    """Positions of an order from ``start`` to ``stop``, dealt out to ``world`` ranks in turn, one at a time.

    Attributes:
        start: the first position that is not consumed yet.
        stop: the length of the order.
        world: the number of ranks.
    """

    start: int
    stop: int
    world: int

    def positions(self, rank: int) -> range:
        """The positions of one rank, in its order."""
        return range(min(self.start + rank, self.stop), self.stop, self.world)

    def consumed(self, taken: int) -> int:
        """How many samples of the order are consumed when each rank has taken that many, or all it has."""
        # Ranks take in turn, so what they have taken in step starts at ``start`` and has no gap.
        return min(self.start + taken * self.world, self.stop)


@dataclass(frozen=True)
class StepSplit:
    """Positions of an order from ``start`` to ``stop``, cut into steps, whatever the number of ranks.

    The last step has what is left. If that is less than a sample per shard, the step before takes it too.

    Attributes:
        start: the first position that is not consumed yet.
        stop: the length of the order.
        batch_size: how many samples a step has, on all ranks together.
        shards: how many shards a step has.
    """

    start: int
    stop: int
    batch_size: int
    shards: int

    @property
    def steps(self) -> int:
        """The number of steps."""
        whole, rest = divmod(self.stop - self.start, self.batch_size)
        return whole + (rest >= self.shards or (rest > 0 and whole == 0))

    def positions(self, step: int) -> range:
        """The positions of one step."""
        end = self.stop if step == self.steps - 1 else self.start + (step + 1) * self.batch_size
        return range(self.start + step * self.batch_size, end)

    def consumed(self, steps: int) -> int:
        """How many samples of the order are consumed after that many steps."""
        return self.stop if steps >= self.steps else self.start + steps * self.batch_size
