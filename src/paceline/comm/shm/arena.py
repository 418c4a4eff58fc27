"""A rank's own part of the shared memory, and the blocks in it."""

import ctypes
import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.shm.segment import LOT_BYTES, LOTS, Segment, round_up


@dataclass(frozen=True)
class Place:
    """Where bytes are in the shared file."""

    offset: int
    nbytes: int


class Arena:
    """Allocates tensors that the other ranks of the host can read and write.

    Args:
        segment: the shared file.
        rank: this rank's number among those that share it.
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment = segment
        self._next = LOTS + rank * LOT_BYTES
        self._end = self._next + LOT_BYTES
        self._free: dict[int, list[int]] = {}
        self._places: dict[int, Place] = {}
        self._lock = threading.RLock()  # a tensor may be found to be gone at any time, in here too

    def ensure(self, nbytes: int) -> Place:
        """Have memory for what is allocated next; raises OSError if there is not enough of it."""
        place = Place(self._next, round_up(nbytes))
        self._segment.reserve(place.offset, place.nbytes)
        return place

    def give_back(self, ensured: Place) -> None:
        """Have no memory there, but for what was allocated since."""
        with self._lock:
            start = max(ensured.offset, self._next)
            self._segment.release(start, max(0, ensured.offset + ensured.nbytes - start))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor in shared memory, which is given back when the tensor is gone; None if there is none."""
        if not numel:
            return None
        nbytes = round_up(numel * dtype.itemsize)
        try:
            place = self.space(nbytes)
            self._segment.reserve(place.offset, nbytes)
            window = self._segment.at(place.offset, nbytes)
        except OSError:
            return None
        memory = (ctypes.c_ubyte * nbytes).from_address(window.data_ptr())
        weakref.finalize(memory, self._drop, place, window).atexit = False
        self._places[window.data_ptr()] = place
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    def space(self, nbytes: int) -> Place:
        """Addresses of this rank's, without memory behind them."""
        nbytes = round_up(nbytes)
        with self._lock:
            if free := self._free.get(nbytes):
                return Place(free.pop(), nbytes)
            if self._next + nbytes > self._end:
                raise OSError("the rank's part of the shared file is used up")
            place = Place(self._next, nbytes)
            self._next += nbytes
            return place

    def place_of(self, tensor: Tensor) -> Place | None:
        """Where a tensor's elements are, if it is contiguous and was allocated here."""
        place = self._places.get(tensor.untyped_storage().data_ptr())
        if place is None or not tensor.is_contiguous():
            return None
        return Place(place.offset + int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes)

    def _drop(self, place: Place, window: Tensor) -> None:
        self._places.pop(window.data_ptr(), None)
        self.free(place)

    def free(self, place: Place) -> None:
        """Have no memory there, and let the addresses be used again."""
        self._segment.release(place.offset, place.nbytes)
        with self._lock:
            self._free.setdefault(place.nbytes, []).append(place.offset)
