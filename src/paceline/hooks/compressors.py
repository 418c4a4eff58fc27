"""Compressors: gradients as fewer bytes. Every rank reads the same bytes.

All work on rows: one message per row, whose length depends only on the row's length and type.
"""

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import OptionError

# Values that share a scale. Few, so that small values keep their precision; scales add 1.6% to int8.
CHUNK = 256


@runtime_checkable
class Compressor(Protocol):
    """Encodes numbers as fewer bytes, and decodes them.

    Attributes:
        name: its name in errors and logs.
        keeps_places: whether an average takes as many bytes as one rank's values; then ranks share the work
            of averaging, otherwise each rank gets every message.
    """

    name: str
    keeps_places: bool

    def encode(self, rows: Tensor) -> Tensor:
        """Each row of float32 or float64 as a row of bytes."""

    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The rows of ``numel`` numbers that rows of bytes stand for."""


class Cast:
    """Another floating-point type.

    Args:
        dtype: the type.
    """

    keeps_places = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.name = str(dtype).removeprefix("torch.")

    def encode(self, rows: Tensor) -> Tensor:
        """Round to the nearest value of the type."""
        return rows.to(self._dtype).view(torch.uint8)

    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Back to the longer type."""
        return messages.view(self._dtype).to(dtype)


class Integers:
    """Small integers times a scale for each chunk of values; one that is not finite becomes NaN altogether.

    Args:
        bits: 8 or 4.
    """

    keeps_places = True

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._top = 2 ** (bits - 1) - 1
        self.name = f"int{bits}"

    def encode(self, rows: Tensor) -> Tensor:
        """Scales, then the integers; two of four bits in a byte."""
        count, numel = rows.shape
        chunks = _in_chunks(rows)
        # A norm would take ten times as long.
        largest = torch.maximum(chunks.amax(-1, keepdim=True), -chunks.amin(-1, keepdim=True))
        bad = ~torch.isfinite(largest)
        scales = (largest / self._top).masked_fill_(bad, math.nan)
        codes = (chunks / torch.where(scales > 0, scales, 1)).round_().clamp_(-self._top, self._top)
        if bad.any():
            codes.nan_to_num_(0.0)
        flat = codes.to(torch.int8).view(count, -1)[:, :numel]
        return torch.cat((scales.view(count, -1).view(torch.uint8), self._pack(flat)), dim=1)

    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Integers times scales."""
        count = len(messages)
        head = -(-numel // CHUNK) * dtype.itemsize
        # A copy, because a scale must be aligned and a message need not be.
        scales = messages[:, :head].clone(memory_format=torch.contiguous_format).view(dtype)
        values = _in_chunks(self._unpack(messages[:, head:])[:, :numel].to(dtype))
        return values.mul_(scales.unsqueeze(-1)).view(count, -1)[:, :numel]

    def _pack(self, codes: Tensor) -> Tensor:
        if self._bits == 8:
            return codes.view(torch.uint8)
        pairs = functional.pad(codes + 8, (0, codes.shape[1] % 2)).contiguous().view(torch.int16)
        return (pairs | pairs >> 4).to(torch.uint8)

    def _unpack(self, packed: Tensor) -> Tensor:
        if self._bits == 8:
            return packed.view(torch.int8)
        pairs = packed.to(torch.int16, memory_format=torch.contiguous_format)
        return ((pairs | pairs << 4) & 0x0F0F).view(torch.int8) - 8


class TopK:
    """The largest values and their indices; all NaN if one of them is not finite.

    Args:
        fraction: the part of the values that is kept.
    """

    keeps_places = False

    def __init__(self, fraction: float) -> None:
        if not 0 < fraction <= 1:
            raise OptionError(f"fraction must be more than 0 and at most 1 (fraction: {fraction})")
        self._fraction = fraction
        self.name = f"top_k({fraction})"

    def encode(self, rows: Tensor) -> Tensor:
        """The values, then their indices."""
        places = rows.abs().topk(self._count(rows.shape[1]), sorted=False).indices
        values = rows.gather(1, places)
        return torch.cat((values.view(torch.uint8), places.to(torch.int32).view(torch.uint8)), dim=1)

    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, but for the values sent."""
        head = self._count(numel) * dtype.itemsize
        values = messages[:, :head].clone(memory_format=torch.contiguous_format).view(dtype)
        places = messages[:, head:].clone(memory_format=torch.contiguous_format).view(torch.int32)
        rows = torch.zeros((len(messages), numel), dtype=dtype, device=messages.device)
        rows.scatter_(1, places.long(), values)
        good = torch.isfinite(values).all(dim=1, keepdim=True)
        return rows if good.all() else torch.where(good, rows, math.nan)

    def _count(self, numel: int) -> int:
        return math.ceil(numel * self._fraction)


def _in_chunks(rows: Tensor) -> Tensor:
    """Rows cut into chunks, the last one filled up with zeros."""
    count, numel = rows.shape
    padded = functional.pad(rows, (0, -numel % CHUNK)) if numel % CHUNK else rows
    return padded.reshape(count, -1, CHUNK)
