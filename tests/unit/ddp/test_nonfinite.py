"""Gradients that are not finite: what a rank looks at, what it reports, and when it is told."""

import math
import re
import warnings
from collections.abc import Collection
from typing import Any

import pytest
import torch
from scripted_reducers import Rank, assert_works, rows
from scripted_steps import OtherRank, random_grads, random_parameters, run_step, scripted_context
from torch import nn

from paceline.ddp.buckets.bucket_set import BucketOptions
from paceline.ddp.buckets.dense import LARGE_NUMEL
from paceline.ddp.reducer import nonfinite
from paceline.ddp.reducer.nonfinite import describe, has_non_finite
from paceline.ddp.reducer.step_report import RankReport

BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
LENGTH = 100_000


@pytest.fixture(autouse=True)
def without_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler of another test may still live."""
    monkeypatch.setattr(nonfinite, "samples_of_step", str)


@pytest.mark.parametrize("dtype", TYPES)
@BAD
def test_one_bad_number_in_a_small_bucket_is_found(bad: float, dtype: torch.dtype) -> None:
    numbers = torch.ones(30_000, dtype=dtype)
    assert not has_non_finite(numbers, 3)
    numbers[12_345] = bad
    assert has_non_finite(numbers, 3)


@BAD
def test_infinities_that_cancel_out_are_found(bad: float) -> None:
    assert has_non_finite(torch.tensor([bad, 1.0, -bad]), 0)


def test_a_bad_row_is_found_anywhere() -> None:
    for row in range(0, 1000, 37):
        numbers = torch.ones(1000, 1000)
        numbers[row] = math.nan
        assert has_non_finite(numbers.flatten(), step=row)


def test_one_bad_number_anywhere_is_found_in_time() -> None:
    numbers = torch.ones(LENGTH)
    numbers[4321] = math.nan
    assert sum(has_non_finite(numbers, step) for step in range(49)) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_sum_that_overflows_is_no_bad_number(dtype: torch.dtype) -> None:
    assert not has_non_finite(torch.full((LENGTH,), torch.finfo(dtype).max, dtype=dtype), 0)


def test_words_name_the_first_parameter_and_the_samples() -> None:
    assert describe(["a.weight"], "") == "parameter a.weight"
    assert describe(["b", "a"], "samples [1]") == "first of 2 parameters b; samples [1]"


# One step. Gradients come in reverse order of the slots.


def run_with(
    parameters: list[nn.Parameter], bad: Collection[int], **more: Any
) -> tuple[list[int], str | None]:
    """The ranks that have reported something, and this rank's note."""
    others = [OtherRank(random_grads(parameters))]
    context, group, _ = scripted_context(parameters, (3,), (2, 1, 0), others=others, **more)
    grads = dict(reversed(random_grads(parameters).items()))
    for slot in bad:
        grads[slot].fill_(math.nan)
    summary = run_step(context, grads)
    return summary.non_finite, group.peer_notes.wait_for_non_finite(0, 0)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ((), None),
        ((0,), "parameter p0"),
        ((3,), "parameter p3"),
        ((0, 2), "first of 2 parameters p2"),
        ((0, 1, 2, 3), "first of 4 parameters p3"),
    ],
)
@pytest.mark.parametrize("options", [BucketOptions(), BucketOptions(as_views=True), BucketOptions(lazy=True)])
def test_a_rank_reports_what_it_finds_in_any_bucket(
    bad: tuple[int, ...], words: str | None, options: BucketOptions
) -> None:
    parameters = random_parameters(5, 3, 2, LARGE_NUMEL)
    assert run_with(parameters, bad, bucket_options=options) == ([0] if bad else [], words)


def test_what_becomes_infinite_where_gradients_travel_in_low_precision_is_found() -> None:
    parameters = random_parameters(5, 3, 2, 4, dtype=torch.float32)
    options = BucketOptions(dtype=torch.float16)
    assert run_with(parameters, (1,), bucket_options=options) == ([0], "parameter p1")


def test_sparse_gradients_are_left_out() -> None:
    parameters = random_parameters((4, 2), 3)
    own, other = random_grads(parameters), random_grads(parameters)
    own[0][1] = math.nan
    context, *_ = scripted_context(parameters, (0,), (1,), others=[OtherRank(other)], sparse=[0])
    summary = run_step(context, {0: own[0].to_sparse(1), 1: own[1]})
    assert summary.non_finite == []


# Several steps: what is told when


def warned(this: Rank, *steps: bool, other: bool = False) -> list[str]:
    """What is warned of in steps, in some of which one rank has bad gradients."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for is_bad in steps:
            report = RankReport(non_finite=is_bad and other)
            x = rows() * (math.nan if is_bad and not other else 1)
            this.step(x, OtherRank(random_grads(this.parameters), report=report))
    return [str(each.message) for each in caught]


def test_a_healthy_step_warns_of_nothing() -> None:
    assert warned(Rank(), *[False] * 5) == []


def test_a_rank_tells_of_its_own_gradients() -> None:
    (told,) = warned(Rank(), False, True, False)
    assert told == (
        "gradients of rank 0 are not finite in step 1, before averaging: first of 4 parameters last.bias"
    )


def test_a_rank_tells_of_anothers_by_its_note() -> None:
    this = Rank()
    this.group.notes_of(1).note_non_finite(2, "parameter a; samples [1]")
    told = warned(this, False, False, True, other=True)
    assert told == [
        "gradients of rank 1 are not finite in step 2, before averaging: parameter a; samples [1]"
    ]


def test_a_rank_that_left_no_note_is_told_too() -> None:
    (told,) = warned(Rank(), True, other=True)
    assert told == "gradients of rank 1 are not finite in step 0, before averaging"


def test_many_ranks_are_told_in_short() -> None:
    this = Rank(*[OtherRank()] * 6)
    others = [OtherRank(report=RankReport(non_finite=True))] * 6
    with pytest.warns(UserWarning, match="rank 1 are(.|\n)*rank 4 are(.|\n)*so are those of 2 more ranks"):
        this.step(rows(), *others)


def test_it_is_told_again_at_growing_intervals_with_the_first_step() -> None:
    told = warned(Rank(), *[False] * 3, *[True] * 400)
    steps = [int(re.findall(r"in step (\d+)", text)[0]) for text in told]
    assert steps == [3, 103, 303]
    assert "such steps" not in told[0]
    assert told[1].endswith("the first of 101 such steps was step 3 (ranks: [0])")


def test_gradients_are_what_they_were_if_a_warning_is_an_error() -> None:
    this = Rank()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not finite"):
            this.step(rows() * math.nan, OtherRank(random_grads(this.parameters)))
    assert_works(this)
