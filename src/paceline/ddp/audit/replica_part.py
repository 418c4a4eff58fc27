"""Looks at a part of a replica, at little cost per tensor."""

from collections.abc import Sequence
from operator import is_, methodcaller
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ddp.audit.catalogue import TensorEntry, describe_tensor
from paceline.ddp.audit.hashes import (
    as_words,
    bounds_of,
    factors_of,
    hash_each,
    hash_piece,
    is_view,
)
from paceline.ddp.audit.rotation import SMALL_BYTES, Piece

_ADDRESS = methodcaller("data_ptr")


class MissingTensorError(Exception):
    """A tensor is gone, or has another shape or type than when it was listed."""


class SmallTensors:
    """Small tensors with elements of one size; views of them are kept from look to look.

    Args:
        entries: the tensors.
    """

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self.names = [entry.name for entry in entries]
        self._entries = entries
        self._gets = [entry.get for entry in entries]
        # By what a view is recognised as that of the same tensor with the same memory.
        self._sources: list[Tensor | None] = [None] * len(entries)
        self._addresses = [0] * len(entries)
        self._words: list[Tensor] = [torch.empty(0)] * len(entries)
        self._hashing: tuple[Tensor, Tensor] | None = None

    def copy(self) -> Tensor:
        """A copy of all their elements, as integers."""
        tensors = [get() for get in self._gets]
        if not all(map(is_, tensors, self._sources)) or self._addresses != [*map(_ADDRESS, tensors)]:
            for at, tensor in enumerate(tensors):
                self._view_anew(at, tensor)
        return torch.cat(self._words)

    def hashes(self, copied: Tensor) -> list[int]:
        """The hash of each, from a copy."""
        if self._hashing is None:
            self._hashing = bounds_of(self._words), factors_of(self._words)
        found: list[int] = hash_each(copied, *self._hashing).tolist()
        return found

    def differing(self, copied: Tensor, before: Tensor) -> list[str]:
        """The names of those that differ in two copies."""
        pairs = zip(self.names, self.hashes(copied), self.hashes(before), strict=True)
        return [name for name, now, then in pairs if now != then]

    def _view_anew(self, at: int, tensor: Tensor | None) -> None:
        if tensor is self._sources[at] and tensor is not None and tensor.data_ptr() == self._addresses[at]:
            return
        if tensor is None or describe_tensor(tensor) != self._entries[at].description:
            raise MissingTensorError(self.names[at])
        self._words[at] = as_words(tensor).cpu()
        keeps = tensor.device.type == "cpu" and is_view(tensor)
        self._sources[at] = tensor if keeps else None
        self._addresses[at] = tensor.data_ptr()


class Look(NamedTuple):
    """What was seen in one step: copies of small tensors, and the hashes of large pieces."""

    small: list[Tensor]
    large: list[int]

    def digest(self) -> list[int]:
        """Numbers that change if anything does."""
        return [*(hash_piece(copied, 0, copied.nbytes) for copied in self.small), *self.large]


class ReplicaPart:
    """The part of a replica that is looked at in one step.

    Args:
        entries: every tensor.
        pieces: those of this part.

    Attributes:
        names: of the tensors, in the order of ``hashes``.
        labels: the names, with the bytes of tensors that are cut.
    """

    def __init__(self, entries: Sequence[TensorEntry], pieces: Sequence[Piece]) -> None:
        by_size: dict[int, list[TensorEntry]] = {}
        self._large: list[tuple[TensorEntry, Piece]] = []
        for piece in pieces:
            entry = entries[piece.tensor]
            if entry.nbytes <= SMALL_BYTES:
                by_size.setdefault(min(entry.itemsize, 8), []).append(entry)
            else:
                self._large.append((entry, piece))
        self._small = [SmallTensors(each) for each in by_size.values()]
        small = [name for each in self._small for name in each.names]
        self.names = [*small, *(entry.name for entry, _ in self._large)]
        self.labels = [*small, *(_label(*each) for each in self._large)]

    def look(self) -> Look:
        """Look at every tensor of the part."""
        return Look([each.copy() for each in self._small], [_hash(*each) for each in self._large])

    def hashes(self, look: Look) -> list[int]:
        """The hash of each tensor, or of the piece of it that is in this part."""
        pairs = zip(self._small, look.small, strict=True)
        return [*(found for small, copied in pairs for found in small.hashes(copied)), *look.large]


def _label(entry: TensorEntry, piece: Piece) -> str:
    if piece.stop - piece.start == entry.nbytes:
        return entry.name
    return f"{entry.name} (bytes {piece.start} to {piece.stop})"


def _hash(entry: TensorEntry, piece: Piece) -> int:
    tensor = entry.get()
    if tensor is None or tensor.nbytes != entry.nbytes:
        raise MissingTensorError(entry.name)
    return hash_piece(tensor, piece.start, piece.stop)
