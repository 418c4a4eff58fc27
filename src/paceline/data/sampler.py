"""A sampler that gives each sample to one rank, once, and can go on in the midst of an epoch."""

from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Sampler

from paceline.comm.group import choose
from paceline.data.order import Place, Stretch
from paceline.errors import OptionError

# So many indices become Python numbers at a time: all of them would take five times the order's memory.
_AT_ONCE = 1 << 16


class ShardedSampler(Sampler[int]):
    """Shares a dataset's samples out over the ranks: each sample once, none twice, none left out.

    In the place of ``torch.utils.data.DistributedSampler``, with its names and, for the same seed and epoch,
    its order. That one repeats samples until all ranks have the same number; here some ranks may have one
    sample more than others, so train in ``with ddp.join():``, weighing each batch by its samples.

    Ranks take from the epoch's order in turn. So after as many batches of the same size on every rank, the
    samples consumed are the front of the order, and any number of ranks can go on behind it:

    - torchdata's ``StatefulDataLoader`` keeps this sampler's state with its own, at the batch that training
      has come to, workers or not. Leave its ``snapshot_every_n_steps`` at 1: what it skips to make up for
      a rarer snapshot, it skips in batches of the new world. Leave the batches to its ``batch_size``.
    - torch's ``DataLoader`` with workers reads samples ahead of training, and nobody but the training
      loop knows how far that has come: ``sampler.state_dict(consumed=batches * batch_size)``.

    Save the state of rank 0, and load it on every rank. While ranks are in step, all have the same state. At
    the end of an epoch those that had fewer samples cannot know that the others are through; rank 0, which
    has no fewer than any, does.

    Args:
        dataset: the dataset, or how many samples it has.
        num_replicas: how many ranks share; those of the process group by default.
        rank: which of them this is; by default its rank in the process group.
        shuffle: whether each epoch has an order of its own, or all have the dataset's.
        seed: what orders are drawn from; the same on every rank.
        process_group: the ranks that share; the default group if None.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        *,
        process_group: Any = None,
    ) -> None:
        if num_replicas is None or rank is None:
            group = choose(process_group, None)
            num_replicas = group.size() if num_replicas is None else num_replicas
            rank = group.rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise OptionError(f"there is no such rank among the replicas (rank: {rank}, of: {num_replicas})")
        if isinstance(dataset, int) and dataset < 0:
            raise OptionError(f"a dataset cannot have a negative length (length: {dataset})")
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = 0
        self._resumed: Place | None = None
        self._walk: Walk | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is of."""
        return self._epoch if self._resumed is None else self._resumed.epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next. Without it, the next iteration has the order of the last.

        A loaded state is gone on with if it is of this epoch, and forgotten if it is of another.
        """
        if self._resumed is not None and self._resumed.epoch != epoch:
            self._resumed = None
        if self._walk is not None and self._walk.place.epoch != epoch:
            self._walk = None
        self._epoch = epoch

    def __len__(self) -> int:
        """How many samples this rank has in the epoch; in a resumed one, of what was left."""
        if self._resumed is None and self._walk is not None:
            return len(self._walk.share)
        return len(self._stretch(self._next_place()).share(self.rank))

    def __iter__(self) -> "Walk":
        return Walk(self, self._next_place())

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """What another sampler, at any world size, needs to go on.

        Args:
            consumed: how many samples this rank has trained on since the loop over the loader began; batches
                times the batch size will do. If None, all that were handed out: right only if
                nothing reads ahead.
        """
        if self._resumed is None and self._walk is not None:
            return self._walk.reached(consumed).state_dict()
        if consumed:
            raise OptionError(f"no samples have been handed out yet (consumed: {consumed})")
        return self._next_place().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on, in the next iteration, behind what the state's ranks had consumed of its epoch."""
        self._resumed = self._checked(state_dict)
        self.seed = self._resumed.seed

    def _next_place(self) -> Place:
        return self._resumed or Place(self._epoch, self.seed, self.shuffle, self._length)

    @property
    def _length(self) -> int:
        return self.dataset if isinstance(self.dataset, int) else len(self.dataset)

    def _checked(self, state_dict: Mapping[str, Any]) -> Place:
        place = Place.of(state_dict)
        place.check_order(length=self._length, shuffle=self.shuffle)
        return place

    def _stretch(self, place: Place) -> Stretch:
        return Stretch(place.consumed, place.length, self.num_replicas)

    def _taken_up(self, walk: "Walk") -> None:
        # Not when the walk is made: loaders make some that they never take a step of, and then another.
        self._resumed = None
        self._walk = walk


class Walk(Iterator[int]):
    """One iteration over a rank's share. A loader that keeps states finds its own here.

    Args:
        sampler: whose samples they are.
        place: where to begin.
    """

    def __init__(self, sampler: ShardedSampler, place: Place) -> None:
        self._sampler = sampler
        self._begin(place)

    def _begin(self, place: Place) -> None:
        self.place = place
        self._stretch = self._sampler._stretch(place)
        self.share = self._stretch.share(self._sampler.rank)
        self._indices: Iterator[int] | None = None
        self._taken = 0
        self._ended = False

    def __next__(self) -> int:
        if self._indices is None:
            self._indices = _indices(self.place, self.share)
            self._sampler._taken_up(self)
        try:
            index = next(self._indices)
        except StopIteration:
            self._ended = True
            raise
        self._taken += 1
        return index

    def reached(self, consumed: int | None = None) -> Place:
        """The place to go on from when this rank, in step with the others, has consumed so many samples.

        Args:
            consumed: all that it has taken if None.
        """
        if consumed is None:
            # Who has asked for more than there is makes its last batch, as the others do, or has made it.
            consumed = len(self.share) + 1 if self._ended else self._taken
        elif consumed < 0 or consumed > self._taken < len(self.share):
            raise OptionError(
                "as many samples as were handed out to this rank can have been consumed "
                f"(consumed: {consumed}, handed out: {self._taken})"
            )
        return replace(self.place, consumed=self._stretch.consumed(consumed))

    def state_dict(self) -> dict[str, Any]:
        """What the same iteration needs to go on elsewhere."""
        return self.reached().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on behind what the state's ranks had consumed."""
        self._begin(self._sampler._checked(state_dict))
        # What the sampler itself may have loaded is this same state: not to be gone on with twice.
        self._sampler._taken_up(self)


def _indices(place: Place, share: range) -> Iterator[int]:
    """The samples at the positions of a share, in the order of the epoch."""
    if not place.shuffle:
        yield from share
        return
    # A generator of its own: torch's global one is the user's.
    generator = torch.Generator(device="cpu").manual_seed(place.seed + place.epoch)
    order = torch.randperm(place.length, generator=generator, device="cpu")
    # Cloned, so that the others' samples take no memory for the rest of the epoch.
    for part in order[share.start :: share.step].clone().split(_AT_ONCE):
        yield from part.tolist()
