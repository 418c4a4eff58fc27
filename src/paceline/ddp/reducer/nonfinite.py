"""Which rank had gradients that are not finite, before they were averaged into everybody's.

Note [Looking for NaN]. A bucket is reduced in place, so when the result has a NaN, nobody can tell any more
whose it was. Each rank therefore looks at its own gradients before they are launched. To read all of them
would take several percent of a step. What is read of a large bucket is single elements at equal distances,
others in each step. A NaN spreads: from the loss to all gradients, from a layer's output to whole gradients
of all layers below it. So it is found in nearly all cases. Only a bucket in which it is found is searched
parameter by parameter.

On an accelerator the host would have to wait for the device, so nothing is looked at there.
"""

import cmath
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.data.recent_samples import samples_of_step
from paceline.ddp.buckets.bucket_set import Bucket
from paceline.ddp.buckets.dense import DenseBucket

# Of a bucket with more elements than this, only about as many as the second number are read.
_READ_WHOLE = 32768
_READ_SINGLE = 2048
# After so many steps it is told again, then after twice as many, and so on.
_STEPS_UNTIL_NEXT = 100
_RANKS_NAMED = 4


class NonFiniteGradients:
    """Looks for gradients of this rank that are not finite, and warns on every rank.

    Whether a step is told follows from its number and from earlier reports, so all ranks do the same.

    Attributes:
        is_found: whether this rank has found some in the running step.
    """

    def __init__(self) -> None:
        self.is_found = False
        self._step = 0
        self._found: list[int] = []
        self._own_words = ""
        self._next_told = 0
        self._interval = _STEPS_UNTIL_NEXT
        self._steps = 0
        self._first = ""

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step = step
        self.is_found = False
        self._found = []

    def look(self, bucket: Bucket) -> None:
        """Look at a part of this rank's gradients in a bucket that is about to be launched."""
        if not isinstance(bucket, DenseBucket) or not bucket.slots:
            return
        flat = bucket.gradients
        if flat.is_cpu and has_non_finite(flat, self._step):
            self.is_found = True
            if self._step >= self._next_told:
                self._found += non_finite_slots(bucket)

    def note(self, group: Group, names: Sequence[str], order: Sequence[int]) -> None:
        """Before this rank reports what it has found: leave the other ranks a note with the details.

        Args:
            group: the ranks.
            names: of all slots.
            order: slots in the order in which they became ready.
        """
        if self._step < self._next_told:
            return
        # Nearest to the loss first.
        position = {slot: at for at, slot in enumerate(order)}
        found = sorted(self._found, key=lambda slot: position.get(slot, len(order)))
        self._own_words = describe([names[slot] for slot in found], samples_of_step())
        group.peer_notes.note_non_finite(self._step, self._own_words)

    def tell(self, group: Group, ranks: Sequence[int]) -> None:
        """Warn that these ranks had gradients that are not finite; not in each such step."""
        self._steps += 1
        step = self._step
        if step < self._next_told:
            return
        told = [self._sentence(group, rank) for rank in ranks[:_RANKS_NAMED]]
        if len(ranks) > _RANKS_NAMED:
            told.append(f"so are those of {len(ranks) - _RANKS_NAMED} more ranks")
        if self._first:
            told.append(f"the first of {self._steps} such steps was {self._first}")
        self._first = self._first or f"step {step} (ranks: {group.name_ranks(ranks)})"
        self._next_told = step + self._interval
        self._interval *= 2
        warnings.warn("\n".join(told), stacklevel=2)

    def _sentence(self, group: Group, rank: int) -> str:
        notes = group.peer_notes
        own = rank == group.rank
        words = self._own_words if own else notes.wait_for_non_finite(self._step, rank)
        what = f"gradients of rank {group.global_ranks[rank]} are not finite in step {self._step}"
        return f"{what}, before averaging{f': {words}' if words else ''}"


def has_non_finite(flat: Tensor, step: int) -> bool:
    """Whether a part of these numbers, which is another one in each step, has some that are not finite."""
    part = flat
    if flat.numel() > _READ_WHOLE:
        # An odd distance: rows of a matrix mostly have an even length, and each is hit in another column.
        distance = flat.numel() // _READ_SINGLE | 1
        part = flat[step % distance :: distance]
    # A sum is the cheapest way to read. It may also overflow.
    return not cmath.isfinite(_sum(part)) and not part.isfinite().all()


def _sum(part: Tensor) -> complex:
    low_precision = part.element_size() < torch.float32.itemsize
    return part.sum(dtype=torch.float32 if low_precision else None).item()


def non_finite_slots(bucket: DenseBucket) -> list[int]:
    """The slots of a bucket whose gradients are not finite."""
    return [
        slot.index for slot, view in zip(bucket.slots, bucket.views, strict=True) if not view.isfinite().all()
    ]


def describe(names: Sequence[str], samples: str) -> str:
    """What a rank tells the others: the first parameter, how many there are, and the step's samples."""
    first, *more = names
    which = f"first of {len(names)} parameters {first}" if more else f"parameter {first}"
    return f"{which}; {samples}" if samples else which
