"""Every byte is looked at once in 16 steps, and each step has about as much to do."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.ddp.audit.rotation import PARTS, SMALL_BYTES, Piece, plan_rotation

SIZES = st.lists(st.one_of(st.integers(0, 2000), st.integers(0, 10**6), st.integers(0, 10**9)), max_size=60)


def pieces_of(sizes: list[int]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {tensor: [] for tensor in range(len(sizes))}
    for part in plan_rotation(sizes):
        for piece in part:
            found[piece.tensor].append(piece)
    return found


@settings(deadline=None)
@given(SIZES)
def test_every_byte_is_in_one_part(sizes: list[int]) -> None:
    assert len(plan_rotation(sizes)) <= PARTS
    for tensor, pieces in pieces_of(sizes).items():
        ends = [0, *(piece.stop for piece in pieces)]
        assert [piece.start for piece in pieces] == ends[:-1]
        assert ends[-1] == sizes[tensor]
        assert pieces


@settings(deadline=None)
@given(SIZES)
def test_small_tensors_are_whole_and_pieces_begin_with_a_word(sizes: list[int]) -> None:
    for tensor, pieces in pieces_of(sizes).items():
        assert len(pieces) == 1 or sizes[tensor] > SMALL_BYTES
        assert all(piece.start % 8 == 0 for piece in pieces)


@settings(deadline=None)
@given(st.lists(st.integers(10**7, 10**9), min_size=10, max_size=40))
def test_large_models_have_16_parts_of_about_the_same_size(sizes: list[int]) -> None:
    parts = plan_rotation(sizes)
    nbytes = [sum(piece.stop - piece.start for piece in part) for part in parts]
    share = sum(sizes) / PARTS
    assert max(nbytes) < 1.5 * share + 4 * 10**6


def test_a_small_model_is_looked_at_in_few_steps() -> None:
    assert len(plan_rotation([256] * 100)) < PARTS // 2


def test_no_tensor_has_two_pieces_in_one_part() -> None:
    for part in plan_rotation([10**7, 5, 3 * 10**6, 10**8, 70_000, 70_000]):
        assert len({piece.tensor for piece in part}) == len(part)
