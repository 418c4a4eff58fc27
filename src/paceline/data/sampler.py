"""A sampler that gives each sample to exactly one rank, and can resume in the middle of an epoch."""

from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

from torch.utils.data import Sampler

from paceline.comm.group import choose
from paceline.data.epoch_progress import EpochProgress, RankSplit
from paceline.data.order import samples
from paceline.data.recent_samples import RecentSamples
from paceline.errors import OptionError


class ShardedSampler(Sampler[int]):
    """Splits a dataset's samples over the ranks: each sample exactly once, none repeated, none left out.

    It replaces ``torch.utils.data.DistributedSampler``, with the same names and, for the same seed and epoch,
    the same order. torch's sampler repeats samples until all ranks have the same number. Here some ranks may
    have one sample more than others, so train in ``with ddp.join():`` and weigh each batch by its samples.

    Ranks take samples from the epoch's order in turn. So after the same number of equal batches on every
    rank, the consumed samples are the first ones of the order, and any number of ranks can resume after them:

    - torchdata's ``StatefulDataLoader`` stores this sampler's state with its own, at the batch that training
      has reached, with or without workers. Leave its ``snapshot_every_n_steps`` at 1: after a rarer snapshot
      it skips batches of the new world size. Leave the batching to its ``batch_size``.
    - torch's ``DataLoader`` with workers reads samples ahead of training, and only the training loop knows
      how far training has come: ``sampler.state_dict(consumed=batches * batch_size)``.

    Save the state of rank 0, and load it on every rank. While ranks are in step, all have the same state. At
    the end of an epoch a rank with fewer samples cannot know that the others have finished; rank 0, which has
    at least as many as any other, does.

    Args:
        dataset: the dataset, or how many samples it has.
        num_replicas: the number of ranks; the size of the process group by default.
        rank: the index of this rank; its rank in the process group by default.
        shuffle: whether each epoch has an order of its own, or all have the dataset's.
        seed: the seed of the orders; the same on every rank.
        process_group: the ranks that take samples; the default group if None.
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
            raise OptionError(f"rank must be below num_replicas (rank: {rank}, num_replicas: {num_replicas})")
        if isinstance(dataset, int) and dataset < 0:
            raise OptionError(f"the length of a dataset must not be negative (length: {dataset})")
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = 0
        self._loaded: EpochProgress | None = None
        self._iterator: SamplerIterator | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epoch if self._loaded is None else self._loaded.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Without it, the next iteration repeats the order of the last.

        A loaded state of this epoch is resumed; a loaded state of another epoch is dropped.
        """
        if self._loaded is not None and self._loaded.epoch != epoch:
            self._loaded = None
        if self._iterator is not None and self._iterator.start.epoch != epoch:
            self._iterator = None
        self._epoch = epoch

    def __len__(self) -> int:
        """How many samples this rank has in the epoch; in a resumed epoch, of those that were left."""
        if self._loaded is None and self._iterator is not None:
            return len(self._iterator.positions)
        return len(self._split(self._next_progress()).positions(self.rank))

    def __iter__(self) -> "SamplerIterator":
        return SamplerIterator(self, self._next_progress())

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """The state from which another sampler, at any world size, can resume.

        Args:
            consumed: how many samples this rank has trained on since the loop over the loader began, for
                example batches times batch size. If None, all samples that this sampler has returned: right
                only if nothing reads ahead.
        """
        if self._loaded is None and self._iterator is not None:
            return self._iterator.progress(consumed).state_dict()
        if consumed:
            raise OptionError(f"the sampler has not returned any samples yet (consumed: {consumed})")
        return self._next_progress().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the next iteration resume after what the ranks had consumed when the state was saved."""
        self._loaded = self._checked(state_dict)
        self.seed = self._loaded.seed

    def _next_progress(self) -> EpochProgress:
        return self._loaded or EpochProgress(self._epoch, self.seed, self.shuffle, self._length)

    @property
    def _length(self) -> int:
        return self.dataset if isinstance(self.dataset, int) else len(self.dataset)

    def _checked(self, state_dict: Mapping[str, Any]) -> EpochProgress:
        progress = EpochProgress.from_state_dict(state_dict)
        progress.check_order(length=self._length, shuffle=self.shuffle)
        return progress

    def _split(self, progress: EpochProgress) -> RankSplit:
        return RankSplit(progress.consumed, progress.length, self.num_replicas)

    def _started(self, iterator: "SamplerIterator") -> None:
        # Not when the iterator is made: loaders make some that they never use, and then another.
        self._loaded = None
        self._iterator = iterator


class SamplerIterator(Iterator[int]):
    """One iteration over a rank's samples. A loader that saves states looks for one here.

    Args:
        sampler: the sampler.
        start: from where in the epoch's order.
    """

    def __init__(self, sampler: ShardedSampler, start: EpochProgress) -> None:
        self._sampler = sampler
        self._begin(start)

    def _begin(self, start: EpochProgress) -> None:
        self.start = start
        self._split = self._sampler._split(start)
        self.positions = self._split.positions(self._sampler.rank)
        self._indices: Iterator[int] | None = None
        self._taken = 0
        self._recent = RecentSamples()
        self._ended = False

    def __next__(self) -> int:
        if self._indices is None:
            self._indices = samples(self.start, self.positions)
            self._sampler._started(self)
        try:
            index = next(self._indices)
        except StopIteration:
            self._ended = True
            raise
        self._taken += 1
        self._recent.add(index)
        return index

    def progress(self, consumed: int | None = None) -> EpochProgress:
        """How far the epoch has come when this rank, in step with the others, has consumed that many samples.

        Args:
            consumed: the number of samples; all that were taken from the iterator if None.
        """
        if consumed is None:
            # A rank that asked for more than it has is at its last batch, or after it, as the others are.
            consumed = len(self.positions) + 1 if self._ended else self._taken
        elif consumed < 0 or consumed > self._taken < len(self.positions):
            raise OptionError(
                "consumed must be between 0 and the number of samples that the sampler has returned on this "
                f"rank (consumed: {consumed}, returned: {self._taken})"
            )
        return replace(self.start, consumed=self._split.consumed(consumed))

    def state_dict(self) -> dict[str, Any]:
        """The state from which the same iteration can resume."""
        return self.progress().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume after what the ranks had consumed when the state was saved."""
        self._begin(self._sampler._checked(state_dict))
        # The sampler itself may have loaded the same state: it must not be resumed twice.
        self._sampler._started(self)
