"""Hashes of tensors' bytes, at the speed of memory.

Note [Hashes are weighted sums]. A hash is a sum of 64-bit words, each times an odd number that depends on the
word's place, modulo 2**64. A flipped bit changes one word by a power of two, and that times an odd number is
never 0, so no single flipped bit is missed, be it the sign of a zero or a bit of a NaN. Nobody is expected to
make equal hashes on purpose.

For long tensors even one multiplication per word would cost more than reading it. Their words are added up in
columns first. The number of columns is prime, so that rows of a matrix that have changed places are in other
columns than before.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 8
_COLUMNS = 1021
# Rows that are added up at once: so few that they are in the cache when the second column is read.
_ROWS = 16
_ODD = 0x1E3779B97F4A7C15
_HALF = 1 << 63
_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes in the order of its memory; a view of it unless there are gaps between elements."""
    return _flat(tensor).view(torch.uint8)


def as_words(tensor: Tensor) -> Tensor:
    """A tensor's elements in the order of its memory, as integers; a view, as ``as_bytes``."""
    flat = _flat(tensor)
    return flat.view(_INT_OF_SIZE[min(flat.element_size(), _WORD)])


def is_view(tensor: Tensor) -> bool:
    """Whether ``as_bytes`` and ``as_words`` need no copy of the tensor."""
    return _dense(tensor).is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def hash_piece(tensor: Tensor, start: int, stop: int) -> int:
    """The hash of some bytes of a long tensor; the first of them begins a word."""
    piece = as_bytes(tensor)[start:stop].cpu()
    whole = piece.numel() // _WORD * _WORD
    found = _hash_words(_aligned(piece[:whole]).view(torch.int64))
    if whole < piece.numel():
        found += _weighted_sum(piece[whole:])
    return (found + _HALF) % (2 * _HALF) - _HALF  # as a sum of 64-bit integers would be


def hash_each(words: Tensor, bounds: Tensor, factors: Tensor) -> Tensor:
    """The hash of each of many small tensors, whose words are in one tensor, one after the other.

    Args:
        words: as ``as_words`` gives them.
        bounds: where each of the tensors begins, and where the last one ends.
        factors: what ``factors_of`` gives for them.
    """
    sums = torch.zeros(words.numel() + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(words * factors, 0, out=sums[1:])
    return sums[bounds].diff()


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not is_view(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return _dense(tensor).view(-1)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with its dimensions in the order of memory."""
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda at: -strides[at]))


def _weighted_sum(words: Tensor) -> int:
    return int((words * _factors(words.numel())).sum())


def _aligned(piece: Tensor) -> Tensor:
    return piece if piece.storage_offset() % _WORD == 0 and piece.data_ptr() % _WORD == 0 else piece.clone()


def _hash_words(words: Tensor) -> int:
    in_rows = words.numel() // _COLUMNS * _COLUMNS
    in_blocks = in_rows // (_ROWS * _COLUMNS) * (_ROWS * _COLUMNS)
    last = words[in_rows:]
    found = int(torch.dot(last, _factors(last.numel())))
    if in_rows:
        sums = words[in_blocks:in_rows].view(-1, _COLUMNS).sum(0)
        if in_blocks:
            sums += words[:in_blocks].view(-1, _ROWS, _COLUMNS).sum(1).sum(0)
        found += int(torch.dot(sums, _factors(_COLUMNS)))
    return found


def _factors(count: int) -> Tensor:
    return _made_factors(1 << max(10, (count - 1).bit_length()))[:count]


@functools.lru_cache(maxsize=4)
def _made_factors(count: int) -> Tensor:
    # The first call may be in inference mode, and later ones are not.
    with torch.inference_mode(mode=False):
        places = torch.arange(1, count + 1, dtype=torch.int64, device="cpu")
        return (places * _ODD) ^ (places << 40) | 1


def factors_of(words: Sequence[Tensor]) -> Tensor:
    """The factors of many tensors that are put one after the other; each tensor's hash is its own."""
    return torch.cat([_factors(each.numel()) for each in words])


def bounds_of(words: Sequence[Tensor]) -> Tensor:
    """Where each of many tensors begins if they are put one after the other, and where the last one ends."""
    bounds = [0]
    for each in words:
        bounds.append(bounds[-1] + each.numel())
    return torch.tensor(bounds, device="cpu")
