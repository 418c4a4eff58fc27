"""A batch sampler whose steps have the same samples for every number of ranks."""

from collections import deque
from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

from torch.utils.data import Sampler

from paceline.comm.group import choose
from paceline.data.batches_taken import KnowsGiven
from paceline.data.epoch_progress import EpochProgress, StepSplit
from paceline.data.order import samples_at
from paceline.data.recent_samples import RecentSamples
from paceline.errors import OptionError, SamplesError
from paceline.shard_tree import ShardTree, split_rows


class ShardedBatchSampler(Sampler[list[int]]):
    """Gives each rank the samples of its shards, step by step; for ``DataLoader(batch_sampler=...)``.

    A step has ``batch_size`` samples, in ``shards`` shards of about the same size, whatever the number of
    ranks. Each sample comes once per epoch. The last step of an epoch has what is left; if that is less than
    a sample per shard, the step before it takes it too.

    Its state does not depend on the number of ranks. It says which steps were trained: those whose batch the
    data loader has given to the training loop, whether or not its workers have read ahead.

    Args:
        dataset: the dataset, or how many samples it has.
        shards: the number of shards of a step, as for the wrapper.
        batch_size: the number of samples of a step, on all ranks together.
        shuffle: whether each epoch has an order of its own, or all have the dataset's.
        seed: the seed of the orders; the same on every rank.
        num_replicas: the number of ranks; the size of the process group by default.
        rank: the index of this rank; its rank in the process group by default.
        process_group: the ranks; the default group if None.
    """

    def __init__(
        self,
        dataset: Sized | int,
        shards: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
    ) -> None:
        if num_replicas is None or rank is None:
            group = choose(process_group, None)
            num_replicas = group.size() if num_replicas is None else num_replicas
            rank = group.rank() if rank is None else rank
        self._all_shards = shards
        self.share_among(num_replicas, rank)
        if batch_size < shards:
            raise OptionError(
                f"each shard needs a sample in every step (batch_size: {batch_size}, shards: {shards})"
            )
        self.dataset = dataset
        if self._length < shards:
            raise OptionError(f"each shard needs a sample (samples: {self._length}, shards: {shards})")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = 0
        self._loaded: EpochProgress | None = None
        self._iterator: StepIterator | None = None

    @property
    def all_shards(self) -> int:
        """The number of shards of a step."""
        return self._all_shards

    @property
    def epoch_samples(self) -> int:
        """How many samples an epoch has."""
        return self._length

    def share_among(self, ranks: int, rank: int) -> None:
        """From the next iteration on, give the samples of another share of the shards."""
        self.shards = ShardTree(self._all_shards).share(rank, ranks)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, or of the one that was loaded."""
        return self._epoch if self._loaded is None else self._loaded.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; a loaded state of this epoch is resumed."""
        if self._loaded is not None and self._loaded.epoch != epoch:
            self._loaded = None
        if self._iterator is not None and self._iterator.start.epoch != epoch:
            self._iterator = None
        self._epoch = epoch

    def __len__(self) -> int:
        """How many steps the epoch has; in a resumed epoch, of those that were left."""
        if self._loaded is None and self._iterator is not None:
            return self._iterator.split.steps
        return self._split(self._next_progress()).steps

    def __iter__(self) -> "StepIterator":
        return StepIterator(self, self._next_progress())

    def state_dict(self, *, steps: int | None = None) -> dict[str, Any]:
        """The state from which any number of ranks can resume.

        Args:
            steps: how many steps were trained since the loop over the batches began. By default as many as
                the data loader has given batches.
        """
        iterator = self._iterator if self._loaded is None else None
        progress = self._next_progress() if iterator is None else iterator.progress(steps)
        return {**progress.state_dict(), "batch_size": self.batch_size, "shards": self._all_shards}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the next iteration resume after the steps that were trained when the state was saved."""
        progress = EpochProgress.from_state_dict(state_dict)
        progress.check_order(length=self._length, shuffle=self.shuffle)
        for name, own in (("batch_size", self.batch_size), ("shards", self._all_shards)):
            if state_dict.get(name) != own:
                raise SamplesError(
                    f"the state belongs to other steps ({name}: {own}, in the state: {state_dict.get(name)})"
                )
        self._loaded, self._iterator = progress, None
        self.seed, self._epoch = progress.seed, progress.epoch

    def given_samples(self) -> dict[int, list[int]]:
        """The samples of the batch that a data loader has given last, by this rank's shards."""
        given = [] if self._iterator is None else self._iterator.last_given()
        rows = split_rows(len(given), len(self.shards))
        return {shard: given[own.start : own.stop] for shard, own in zip(self.shards, rows, strict=True)}

    def _started(self, iterator: "StepIterator") -> None:
        # Not when the iterator is made: loaders make some that they never use, and then another.
        self._loaded = None
        self._iterator = iterator

    def _next_progress(self) -> EpochProgress:
        return self._loaded or EpochProgress(self._epoch, self.seed, self.shuffle, self._length)

    @property
    def _length(self) -> int:
        return self.dataset if isinstance(self.dataset, int) else len(self.dataset)

    def _split(self, progress: EpochProgress) -> StepSplit:
        return StepSplit(progress.consumed, progress.length, self.batch_size, self._all_shards)

    def _own(self, positions: range) -> range:
        """Which of a step's positions are those of this rank's shards."""
        rows = split_rows(len(positions), self._all_shards)
        return positions[rows[self.shards[0]].start : rows[self.shards[-1]].stop]


class StepIterator(KnowsGiven, Iterator[list[int]]):
    """One iteration over a rank's samples, step by step.

    Args:
        sampler: the sampler.
        start: from where in the epoch's order.
    """

    def __init__(self, sampler: ShardedBatchSampler, start: EpochProgress) -> None:
        self._sampler = sampler
        self.start = start
        self.split = sampler._split(start)
        self._taken = 0
        self._recent = RecentSamples()
        # Those that the loader has taken and not given yet, and the last one that it has given.
        self._ahead: deque[list[int]] = deque()
        steps = map(self.split.positions, range(self.split.steps))
        self._batches = samples_at(start, map(sampler._own, steps))

    def __next__(self) -> list[int]:
        if not self._taken:
            self._sampler._started(self)
        batch = next(self._batches)
        self._taken += 1
        self._ahead.append(batch)
        self._forget_given()
        for index in batch:
            self._recent.add(index)
        return batch

    def last_given(self) -> list[int]:
        """The samples of the batch that the loader has given last."""
        self._forget_given()
        return self._ahead[0] if self.given else []

    def _forget_given(self) -> None:
        while len(self._ahead) > self._taken - self.given + 1:
            self._ahead.popleft()

    def progress(self, steps: int | None) -> EpochProgress:
        """How far the epoch has come after that many steps; by default those that a loader has given."""
        if steps is None:
            steps = self.given
            if self._taken and not steps:
                raise OptionError(
                    "no data loader has given a batch of this sampler, so say how many were trained: "
                    "state_dict(steps=...)"
                )
        if not 0 <= steps <= self._taken:
            raise OptionError(
                f"steps must be between 0 and the number of batches (steps: {steps}, batches: {self._taken})"
            )
        return replace(self.start, consumed=self.split.consumed(steps))
