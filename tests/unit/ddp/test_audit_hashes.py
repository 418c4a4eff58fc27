"""Hashes see every flipped bit, of any tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.ddp.audit.catalogue import describe_tensor
from paceline.ddp.audit.hashes import (
    as_bytes,
    as_words,
    bounds_of,
    factors_of,
    hash_each,
    hash_piece,
    is_view,
)

TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int16, torch.int64),
]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


def hash_small(*tensors: torch.Tensor) -> list[int]:
    words = [as_words(each) for each in tensors]
    found: list[int] = hash_each(torch.cat(words), bounds_of(words), factors_of(words)).tolist()
    return found


def hash_long(tensor: torch.Tensor) -> int:
    return hash_piece(tensor, 0, tensor.nbytes)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (33_333,)], ids=str)
def test_any_flipped_bit_changes_both_hashes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some(dtype, *shape)
    memory = as_bytes(tensor).numpy()
    small, long = hash_small(tensor), hash_long(tensor)
    for at in {0, 1 % memory.size, memory.size // 2, memory.size - 1}:
        for bit in range(8):
            memory[at] ^= 1 << bit
            assert hash_small(tensor) != small
            assert hash_long(tensor) != long
            memory[at] ^= 1 << bit
    assert (hash_small(tensor), hash_long(tensor)) == (small, long)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60_000), st.data())
def test_a_flipped_bit_anywhere_changes_the_hash_of_a_long_tensor(length: int, data: st.DataObject) -> None:
    tensor = torch.arange(length, dtype=torch.int16)
    before = hash_long(tensor)
    at, bit = data.draw(st.integers(0, 2 * length - 1)), data.draw(st.integers(0, 7))
    as_bytes(tensor).numpy()[at] ^= 1 << bit
    assert hash_long(tensor) != before


@pytest.mark.parametrize("change", [torch.tensor([-0.0]), torch.tensor([torch.nan])])
def test_what_compares_equal_or_never_equal_is_told_by_its_bits(change: torch.Tensor) -> None:
    zero = torch.tensor([0.0])
    assert hash_small(zero) != hash_small(change)
    assert hash_small(change) == hash_small(change.clone())


def test_the_payload_of_a_nan_counts() -> None:
    one, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert hash_small(one) != hash_small(other)


def test_rows_that_change_places_are_seen() -> None:
    matrix = torch.randn(512, 64)
    moved = matrix.clone()
    moved[[3, 400]] = moved[[400, 3]]
    assert hash_long(matrix) != hash_long(moved)


def test_neighbours_in_one_look_do_not_change_each_others_hashes() -> None:
    one, two, nothing = torch.randn(5), torch.randn(3, 3), torch.empty(0)
    together = hash_small(one, nothing, two, nothing)
    assert together == [*hash_small(one), 0, *hash_small(two), 0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3, 5, 6).contiguous(memory_format=torch.channels_last),
        torch.randn(50, 70).t(),
        torch.randn(40, 40)[::2, 1:],
        torch.randn(9).expand(4, 9),
        torch.randn(6, dtype=torch.complex64).conj(),
        torch.randn(101)[1:],
    ],
)
def test_tensors_that_are_not_contiguous_are_hashed_by_their_elements(tensor: torch.Tensor) -> None:
    changed = tensor.clone()  # with the same strides, if it has no gaps
    assert hash_small(tensor) == hash_small(changed)
    assert hash_long(tensor) == hash_long(changed)
    changed[..., -1] += 1
    assert hash_small(tensor) != hash_small(changed)
    assert hash_long(tensor) != hash_long(changed)


def test_transposed_and_channels_last_tensors_are_not_copied() -> None:
    assert is_view(torch.randn(5, 7).t())
    assert is_view(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    assert not is_view(torch.randn(5, 7)[:, ::2])
    assert describe_tensor(torch.randn(5, 7).t()) != describe_tensor(torch.randn(7, 5))


def test_hashes_of_pieces_are_of_those_bytes_only() -> None:
    tensor = torch.randn(100_000)
    before = hash_piece(tensor, 128_000, 400_000)
    tensor[0] += 1
    assert hash_piece(tensor, 128_000, 400_000) == before
    tensor[-1] += 1
    assert hash_piece(tensor, 128_000, 400_000) != before


def test_hashing_works_in_inference_mode_and_after_it() -> None:
    with torch.inference_mode():
        inside = hash_small(torch.ones(5000))
    assert hash_small(torch.ones(5000, requires_grad=True)) == inside


@pytest.mark.parametrize("nbytes", [8, 100, 8168, 8200, 200_003, 1_000_000])
def test_a_hash_has_64_bits(nbytes: int) -> None:
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
        assert -(2**63) <= hash_piece(words, 0, nbytes) < 2**63
