"""Allocates blocks in this rank's region of the shared file."""

import ctypes
import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.shm.segment import REGION_BYTES, REGIONS, Segment, round_up


@dataclass(frozen=True)
class Span:
    """Some bytes of the shared file."""

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
        self._next = REGIONS + rank * REGION_BYTES
        self._end = self._next + REGION_BYTES
        self._free: dict[int, list[int]] = {}
        self._spans: dict[int, Span] = {}
        # Reentrant: a tensor may be garbage collected at any time, also while this thread holds the lock.
        self._lock = threading.RLock()

    def reserve(self, nbytes: int) -> Span:
        """Reserve memory for what is allocated next; raises OSError if there is not enough."""
        span = Span(self._next, round_up(nbytes))
        self._segment.reserve(span.offset, span.nbytes)
        return span

    def release_unused(self, reserved: Span) -> None:
        """Release what ``reserve`` has reserved, except for what was allocated since."""
        with self._lock:
            start = max(reserved.offset, self._next)
            self._segment.release(start, max(0, reserved.offset + reserved.nbytes - start))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor in shared memory, which is released when the tensor is gone; None if none is left."""
        if not numel:
            return None
        nbytes = round_up(numel * dtype.itemsize)
        try:
            span = self.take_addresses(nbytes)
        except OSError:
            return None
        try:
            self._segment.reserve(span.offset, nbytes)
            window = self._segment.at(span.offset, nbytes)
        except OSError:
            self.free(span)
            return None
        memory = (ctypes.c_ubyte * nbytes).from_address(window.data_ptr())
        weakref.finalize(memory, self._drop, span, window).atexit = False
        self._spans[window.data_ptr()] = span
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    def take_addresses(self, nbytes: int) -> Span:
        """A part of the region, without memory behind it; raises OSError if the region is used up."""
        nbytes = round_up(nbytes)
        with self._lock:
            if free := self._free.get(nbytes):
                return Span(free.pop(), nbytes)
            if self._next + nbytes > self._end:
                raise OSError("the rank's region of the shared file is used up")
            span = Span(self._next, nbytes)
            self._next += nbytes
            return span

    def span_of(self, tensor: Tensor) -> Span | None:
        """Where a tensor's elements are, if it is contiguous and was allocated here."""
        span = self._spans.get(tensor.untyped_storage().data_ptr())
        if span is None or not tensor.is_contiguous():
            return None
        return Span(span.offset + int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes)

    def _drop(self, span: Span, window: Tensor) -> None:
        self._spans.pop(window.data_ptr(), None)
        self.free(span)

    def free(self, span: Span) -> None:
        """Release the memory, and let the addresses be used again."""
        self._segment.release(span.offset, span.nbytes)
        with self._lock:
            self._free.setdefault(span.nbytes, []).append(span.offset)
