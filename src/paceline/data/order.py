"""Which of an epoch's samples are whose, and which have been consumed. Pure: no tensors here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.errors import SamplesError


@dataclass(frozen=True)
class Place:
    """Where training stands in its data: an epoch's order, and how much of it all ranks have consumed.

    The world is not in it, so that a place can be resumed from by any number of ranks.

    Attributes:
        epoch: which epoch.
        seed: what the order is drawn from, together with the epoch.
        shuffle: whether it is drawn at all.
        length: how many samples the dataset has.
        consumed: how many samples, from the first of the order on, all ranks together have consumed.
    """

    epoch: int
    seed: int
    shuffle: bool
    length: int
    consumed: int = 0

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Place":
        """The place that a state dict tells of."""
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in state]:
            raise SamplesError(f"not a state of a sharded sampler (missing: {missing}, found: {[*state]})")
        place = cls(**{name: state[name] for name in names})
        if not 0 <= place.consumed <= place.length:
            raise SamplesError(
                "a state cannot have consumed more than there is, nor less than nothing "
                f"(consumed: {place.consumed}, length: {place.length})"
            )
        return place

    def state_dict(self) -> dict[str, Any]:
        """The place in plain values."""
        return asdict(self)

    def check_order(self, *, length: int, shuffle: bool) -> None:
        """Refuse to go on in an order that is not this one."""
        if (self.length, self.shuffle) != (length, shuffle):
            raise SamplesError(
                "the state is of another order of samples "
                f"(state: length {self.length}, shuffle {self.shuffle}; "
                f"sampler: length {length}, shuffle {shuffle})"
            )


@dataclass(frozen=True)
class Stretch:
    """What was left of an epoch's order when so many ranks began to take from it, one sample each in turn.

    Attributes:
        start: the first position that was left.
        stop: the end of the order.
        world: how many ranks take.
    """

    start: int
    stop: int
    world: int

    def share(self, rank: int) -> range:
        """The positions that a rank takes, in its order."""
        return range(min(self.start + rank, self.stop), self.stop, self.world)

    def consumed(self, taken: int) -> int:
        """How far the order is consumed when every rank has taken so many, or all that it has."""
        # Ranks take in turn, so what they have taken in step is the front of the stretch, without a gap.
        return min(self.start + taken * self.world, self.stop)
