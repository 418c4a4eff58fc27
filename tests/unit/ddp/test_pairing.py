import pytest

from paceline.ddp.reducer.pairing import Pairing, StepCounts

ONE = StepCounts(through_forward=True, forwards=1, optimizer_steps=1, batches=2)


def step(pairing: Pairing, *counts: StepCounts) -> list[str]:
    if pairing.are_equal(counts):
        return []
    return pairing.differences(dict(enumerate(counts)))


def test_equal_counts_need_no_words_and_make_their_number_of_forwards_usual() -> None:
    pairing = Pairing()
    assert [step(pairing, ONE, ONE) for _ in range(2)] == [[], []]
    assert pairing.usual_forwards == 1


def test_different_counts_make_no_number_of_forwards_usual() -> None:
    pairing = Pairing()
    for _ in range(3):
        step(pairing, ONE, ONE)
    step(pairing, ONE, ONE._replace(forwards=2))
    assert pairing.usual_forwards is None


def test_the_largest_number_of_forwards_is_the_usual_one() -> None:
    pairing = Pairing()
    for forwards in (1, 3, 1, 1):
        step(pairing, *[ONE._replace(forwards=forwards)] * 2)
    assert pairing.usual_forwards == 3


@pytest.mark.parametrize(
    ("field", "words"),
    [("forwards", "called forward"), ("optimizer_steps", "stepped optimizers")],
)
def test_a_rank_that_does_something_more_often_is_named_once(field: str, words: str) -> None:
    pairing = Pairing()
    odd = ONE._replace(**{field: 2})
    (text,) = step(pairing, ONE, ONE, odd)
    assert words in text
    assert "ranks 0, 1 1 time, rank 2 2 times" in text
    assert step(pairing, ONE, ONE, odd) == []
    assert len(step(pairing, ONE, odd, ONE)) == 1


def test_twice_the_batches_are_some_that_were_left_out() -> None:
    pairing = Pairing()
    step(pairing, ONE, ONE)
    (text,) = step(pairing, ONE, ONE._replace(batches=4))
    assert "rank 1 took 4 batches" in text
    assert "the others 2" in text


@pytest.mark.parametrize("batches", [(0, 2), (2, 0), (1, 2), (0, 4)])
def test_fewer_batches_at_the_end_of_an_epoch_are_no_reason_to_warn(batches: tuple[int, int]) -> None:
    pairing = Pairing()
    step(pairing, ONE, ONE)
    assert step(pairing, *(ONE._replace(batches=each) for each in batches)) == []


def test_ranks_whose_batches_differ_all_the_time_have_left_out_none() -> None:
    pairing = Pairing()
    assert [step(pairing, ONE, ONE._replace(batches=4)) for _ in range(3)] == [[], [], []]


def test_a_rank_that_had_no_inputs_in_the_last_step_has_stepped_no_optimizer() -> None:
    pairing = Pairing()
    step(pairing, ONE, ONE, ONE)
    pairing.without_inputs = frozenset({1})
    behind = ONE._replace(optimizer_steps=0, batches=0)
    assert step(pairing, ONE, behind, ONE) == []
    pairing.without_inputs = frozenset()
    assert len(step(pairing, ONE, behind, ONE)) == 1


OUTSIDE = StepCounts()


@pytest.mark.parametrize(
    ("counts", "refused"),
    [([ONE, ONE], None), ([OUTSIDE, OUTSIDE], None), ([ONE, OUTSIDE, ONE], "rank 1"), ([OUTSIDE], None)],
)
def test_backwards_of_some_ranks_outside_forward_are_refused(
    counts: list[StepCounts], refused: str | None
) -> None:
    found = Pairing().refusal(dict(enumerate(counts)))
    assert (found is None) == (refused is None)
    assert (refused or "") in (found or "")
