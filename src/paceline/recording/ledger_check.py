"""Whether every sample counted once: a judgement of the ledger. Pure: no files."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from paceline.recording.ledger import Ledger

# Of each kind of mistake at most this many are listed, because a damaged ledger may have any number of them.
_MOST_LISTED = 1000
_MOST_NAMED = 8

T = TypeVar("T")


@dataclass(frozen=True)
class LedgerCheck:
    """Whether every sample counted once per epoch; as text, in one sentence.

    Each list has at most 1,000 entries.

    Attributes:
        epochs: the number of complete epochs.
        samples: how many samples counted in them.
        steps: how many steps they had.
        incomplete: how many samples counted in each epoch that did not end, or that began before the ledger.
        twice: samples that counted more than once, each with its epoch.
        never: samples that did not count, each with its epoch; of complete epochs only.
        missing_shards: shards that no rank took into a step that counted, each with the step.
        missing_steps: steps between others that no rank completed, or into which no rank took a sample.
    """

    epochs: int
    samples: int
    steps: int
    incomplete: Mapping[int, int]
    twice: Sequence[tuple[int, int]]
    never: Sequence[tuple[int, int]]
    missing_shards: Sequence[tuple[int, int]]
    missing_steps: Sequence[int]

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong; an epoch that did not end is not wrong."""
        return not (self.twice or self.never or self.missing_shards or self.missing_steps)

    def __str__(self) -> str:
        unfinished = [
            f"epoch {epoch} is not complete ({samples:,} samples)"
            for epoch, samples in self.incomplete.items()
        ]
        return "; ".join([self._result(), *unfinished])

    def _result(self) -> str:
        if not self.is_right:
            first = list(islice(self._mistakes(), _MOST_NAMED + 1))
            more = ["and more"] if len(first) > _MOST_NAMED else []
            return "; ".join(["the samples did not count once each", *first[:_MOST_NAMED], *more])
        if not self.epochs:
            return "no sample counted twice" if self.incomplete else "no step counted"
        counts = {"epoch": self.epochs, "sample": self.samples, "step": self.steps}
        told = [f"{many:,} {noun}{'' if many == 1 else 's'}" for noun, many in counts.items()]
        return f"every sample counted once: {', '.join(told)}"

    def _mistakes(self) -> Iterator[str]:
        for epoch, samples in _by_first(self.twice).items():
            yield f"{_named('sample', samples)} counted more than once in epoch {epoch}"
        for epoch, samples in _by_first(self.never).items():
            yield f"{_named('sample', samples)} did not count in epoch {epoch}"
        for step, shards in _by_first(self.missing_shards).items():
            yield f"no rank took {_named('shard', shards)} of step {step}"
        if self.missing_steps:
            yield f"no rank took and completed {_named('step', self.missing_steps)}"


def check_ledger(ledger: Ledger) -> LedgerCheck:
    """Judge the steps that count.

    If it is not known how many samples an epoch has, each epoch is compared with all samples of the ledger.
    """
    epochs = _Epochs(ledger)
    counts = epochs.counts
    complete = [epoch for epoch in counts if epochs.is_complete(epoch)]
    return LedgerCheck(
        epochs=len(complete),
        samples=sum(counts[epoch].total() for epoch in complete),
        steps=sum(1 for epoch, _ in ledger.steps if epoch in complete),
        incomplete={epoch: own.total() for epoch, own in counts.items() if epoch not in complete},
        twice=_listed((epoch, each) for epoch, own in counts.items() for each in own if own[each] > 1),
        never=_listed((epoch, each) for epoch in complete for each in epochs.absent(epoch)),
        missing_shards=_listed(_missing_shards(ledger)),
        missing_steps=_listed(_missing_steps(ledger)),
    )


class _Epochs:
    """How often each sample counted in each epoch."""

    def __init__(self, ledger: Ledger) -> None:
        self.counts: dict[int, Counter[int]] = defaultdict(Counter)
        for (epoch, _), shards in ledger.steps.items():
            for samples in shards.values():
                self.counts[epoch].update(samples)
        self._all: Iterable[int] = (
            sorted(set().union(*self.counts.values()))
            if ledger.epoch_samples is None
            else range(ledger.epoch_samples)
        )
        self._is_size_known = ledger.epoch_samples is not None or len(self.counts) > 1
        first_step, first_epoch = min(((step, epoch) for epoch, step in ledger.steps), default=(0, 0))
        self._begun_before = first_epoch if first_step else None

    def is_complete(self, epoch: int) -> bool:
        """Whether the epoch has all samples, or was trained to its end."""
        if self._is_size_known and next(self.absent(epoch), None) is None:
            return True
        return epoch != max(self.counts) and epoch != self._begun_before

    def absent(self, epoch: int) -> Iterator[int]:
        """The samples that did not count in the epoch."""
        return (each for each in self._all if each not in self.counts[epoch])


def _missing_shards(ledger: Ledger) -> Iterator[tuple[int, int]]:
    last = max((shard for shards in ledger.steps.values() for shard in shards), default=-1)
    for (_, step), shards in ledger.steps.items():
        yield from ((step, shard) for shard in range(last + 1) if shard not in shards)


def _missing_steps(ledger: Ledger) -> Iterator[int]:
    there = {step for _, step in ledger.steps}
    steps = range(min(ledger.counted), max(ledger.counted) + 1) if ledger.counted else range(0)
    return (step for step in steps if step not in there)


def _listed(found: Iterator[T]) -> list[T]:
    return list(islice(found, _MOST_LISTED))


def _by_first(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for first, second in pairs:
        found[first].append(second)
    return found


def _named(noun: str, numbers: Sequence[int]) -> str:
    """Some numbers with their noun: "samples 3, 7"."""
    names = ", ".join(map(str, numbers[:_MOST_NAMED]))
    return (
        f"{noun}{'s' if len(numbers) > 1 else ''} {names}{' and more' if len(numbers) > _MOST_NAMED else ''}"
    )
