"""The order of an epoch's samples."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from paceline.data.epoch_progress import EpochProgress

# How many indices become Python numbers at a time: all at once would take five times the order's memory.
_INDICES_AT_ONCE = 1 << 16


def shuffled_order(progress: EpochProgress) -> Tensor:
    """The samples in the epoch's order."""
    # A generator of its own: torch's global one belongs to the user.
    generator = torch.Generator(device="cpu").manual_seed(progress.seed + progress.epoch)
    return torch.randperm(progress.length, generator=generator, device="cpu")


def samples(progress: EpochProgress, positions: range) -> Iterator[int]:
    """The samples at these positions of the epoch's order, one by one."""
    if not progress.shuffle:
        yield from positions
        return
    # Cloned, so that the others' samples take no memory for the rest of the epoch.
    own = shuffled_order(progress)[positions.start :: positions.step].clone()
    for chunk in own.split(_INDICES_AT_ONCE):
        yield from chunk.tolist()


def samples_at(progress: EpochProgress, positions: Iterable[range]) -> Iterator[list[int]]:
    """The samples at these positions of the epoch's order, many at a time."""
    if not progress.shuffle:
        yield from map(list, positions)
        return
    order = shuffled_order(progress)
    for each in positions:
        yield order[each.start : each.stop].tolist()
