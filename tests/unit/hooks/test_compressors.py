"""What compressors make of numbers, and what hooks remember of that."""

import gc
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import HookTypeError, OptionError
from paceline.hooks import average, fp16, post_local_sgd, power_sgd, top_k, with_error_feedback
from paceline.hooks.compressors import CHUNK, Cast, Compressor, Integers, TopK
from paceline.hooks.error_feedback import AverageResiduals, Residuals

TYPES = st.sampled_from([torch.float32, torch.float64])
# Far from where floats end: there, rounding is not relative any more.
NUMBERS = st.floats(-1e30, 1e30).map(lambda x: x if abs(x) > 1e-30 else 0.0)
ALL: list[Compressor] = [Cast(torch.float16), Cast(torch.bfloat16), Integers(8), Integers(4), TopK(0.1)]
BITS = st.sampled_from([8, 4])


def matrix(count: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn((count, numel), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def there_and_back(compressor: Compressor, rows: Tensor) -> Tensor:
    messages = compressor.encode(rows)
    assert messages.dtype is torch.uint8
    # Row by row, wherever in memory: as it comes from other ranks.
    apart = torch.cat((torch.zeros(1, 1, dtype=torch.uint8), messages.view(1, -1)), 1)[:, 1:]
    apart = apart.reshape(len(rows), -1) if not isinstance(compressor, Cast) else messages
    return compressor.decode(apart, rows.shape[1], rows.dtype)


@given(st.lists(NUMBERS, min_size=1, max_size=3 * CHUNK), TYPES, BITS)
def test_integers_are_off_by_half_a_step_at_most(values: list[float], dtype: torch.dtype, bits: int) -> None:
    rows = torch.tensor([values], dtype=dtype)
    found = there_and_back(Integers(bits), rows)
    for ours, theirs in zip(found.split(CHUNK, 1), rows.split(CHUNK, 1), strict=True):
        bound = float(theirs.abs().max()) / (2 * (2 ** (bits - 1) - 1))
        assert float((ours - theirs).abs().max()) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 2, 255, 256, 257, 1000])
def test_messages_are_as_short_as_stated(numel: int, dtype: torch.dtype) -> None:
    rows = matrix(3, numel, dtype)
    scales = math.ceil(numel / CHUNK) * dtype.itemsize
    assert Integers(8).encode(rows).shape == (3, numel + scales)
    assert Integers(4).encode(rows).shape == (3, math.ceil(numel / 2) + scales)
    assert Cast(torch.float16).encode(rows).shape == (3, 2 * numel)
    assert TopK(0.1).encode(rows).shape == (3, math.ceil(numel / 10) * (4 + dtype.itemsize))


@pytest.mark.parametrize("compressor", ALL, ids=lambda each: each.name)
@pytest.mark.parametrize("numel", [1, 2, 255, 257, 1000])
def test_rows_do_not_touch_each_other(compressor: Compressor, numel: int) -> None:
    rows = matrix(4, numel, torch.float32)
    whole = there_and_back(compressor, rows)
    for row, found in zip(rows, whole, strict=True):
        assert torch.equal(there_and_back(compressor, row[None])[0], found)


@pytest.mark.parametrize("compressor", ALL, ids=lambda each: each.name)
def test_what_has_been_there_and_back_goes_there_and_back_again(compressor: Compressor) -> None:
    once = there_and_back(compressor, matrix(1, 1000, torch.float32))
    torch.testing.assert_close(there_and_back(compressor, once), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("compressor", ALL, ids=lambda each: each.name)
def test_zeros_stay_zeros(compressor: Compressor) -> None:
    assert not there_and_back(compressor, torch.zeros(2, 300)).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("compressor", ALL, ids=lambda each: each.name)
def test_what_is_not_finite_arrives_so(compressor: Compressor, bad: float) -> None:
    rows = matrix(2, 1000, torch.float32)
    for place in (0, 700, 999):
        rows[0, place] = bad
    found = there_and_back(compressor, rows)
    assert not found[0, [0, 700, 999]].isfinite().any()
    assert found[1].isfinite().all()


@given(st.lists(NUMBERS, min_size=1, max_size=200), st.floats(0.001, 1))
def test_the_largest_are_sent_as_they_are(values: list[float], fraction: float) -> None:
    rows = torch.tensor([values], dtype=torch.float64)
    found = there_and_back(TopK(fraction), rows)
    kept = math.ceil(len(values) * fraction)
    left_out = rows[found != rows].abs()
    assert len(left_out) <= len(values) - kept
    if len(left_out):
        assert left_out.max() <= rows.abs().sort(descending=True).values[0, kept - 1]


def test_mistakes_are_named() -> None:
    for fraction in (0.0, -1.0, 1.1, math.nan):
        with pytest.raises(OptionError, match=r"more than 0 and at most 1 \(fraction"):
            top_k(fraction)
    with pytest.raises(OptionError, match=r"rank: 0"):
        power_sgd(0)
    with pytest.raises(OptionError, match=r"period: 0"):
        post_local_sgd(start_step=0, period=0)
    for wrong in (average(), object()):
        with pytest.raises(HookTypeError, match="needs a compressor"):
            with_error_feedback(wrong)  # type: ignore[arg-type]
    assert with_error_feedback(fp16()).name == with_error_feedback(Cast(torch.float16)).name == "float16"


def kept_for(residuals: Residuals, parameter: nn.Parameter, weight: float | None = None) -> float:
    """What the residuals add to a gradient of zero."""
    residuals.begin(weight)
    values = torch.zeros(1)
    residuals.add_to([values], [parameter])
    return float(values)


def test_a_residual_is_kept_once_its_step_has_ended_well_and_the_parameter_was_used() -> None:
    residuals, parameter = Residuals(), nn.Parameter(torch.zeros(1))
    for residual, ends_well, used, expected in [
        (1.0, False, 1, 0.0),
        (2.0, True, 1, 2.0),
        (3.0, False, 1, 2.0),
        (4.0, True, 0, 2.0),
        (5.0, True, 2, 5.0),
    ]:
        residuals.begin(None)
        residuals.keep([torch.full((1,), residual)], [parameter])
        if ends_well:
            residuals.finish([parameter], [used], None)
        assert kept_for(residuals, parameter) == expected


def test_a_second_reduction_in_a_step_goes_on_from_the_first() -> None:
    residuals, parameter = Residuals(), nn.Parameter(torch.zeros(1))
    residuals.begin(None)
    residuals.keep([torch.full((1,), 3.0)], [parameter])
    values = torch.zeros(1)
    residuals.add_to([values], [parameter])
    assert float(values) == 3.0


def test_residuals_are_weighted_like_gradients() -> None:
    residuals, parameter = Residuals(), nn.Parameter(torch.zeros(1))
    residuals.begin(8.0)
    residuals.keep([torch.full((1,), 4.0)], [parameter])
    residuals.finish([parameter], [1], None)
    assert kept_for(residuals, parameter) == 0.5
    assert kept_for(residuals, parameter, 100.0) == 50.0
    assert kept_for(residuals, parameter, 0.0) == 0.0
    residuals.keep([torch.zeros(1)], [parameter])  # by a rank that counted nothing
    residuals.finish([parameter], [1], None)
    assert kept_for(residuals, parameter) == 0.5


def test_what_is_not_finite_is_not_remembered() -> None:
    residuals, parameter = Residuals(), nn.Parameter(torch.zeros(2))
    for residual in ([1.0, 2.0], [math.nan, 5.0], [-math.inf, math.nan]):
        residuals.begin(None)
        residuals.keep([torch.tensor(residual)], [parameter])
        residuals.finish([parameter], [1], None)
    values = torch.zeros(2)
    residuals.add_to([values], [parameter])
    assert values.tolist() == [1.0, 5.0]


def test_a_converted_parameter_starts_anew() -> None:
    residuals, parameter = Residuals(), nn.Parameter(torch.zeros(1))
    residuals.begin(None)
    residuals.keep([torch.ones(1, dtype=torch.float64)], [parameter])
    residuals.finish([parameter], [1], None)
    assert kept_for(residuals, parameter) == 0.0


@pytest.mark.usefixtures("no_gc")
def test_a_parameter_that_is_gone_is_forgotten() -> None:
    residuals, parameter = Residuals(), nn.Parameter(torch.zeros(1))
    residual = torch.ones(1)
    residuals.begin(None)
    residuals.keep([residual], [parameter])
    residuals.finish([parameter], [1], None)
    assert len(residuals.kept) == 1
    del parameter
    gc.collect()
    assert len(residuals.kept) == 0


def test_a_bucket_that_is_reduced_twice_in_a_step_gets_the_residuals_of_the_average_once() -> None:
    residuals, parameter = AverageResiduals(), nn.Parameter(torch.zeros(2))
    residuals.meet(4)
    residuals.begin(None)
    residuals.keep([torch.tensor([4.0, 8.0])], [parameter])
    residuals.finish([parameter], [1], None)  # of four ranks, so a quarter for a weight of one
    residuals.begin(None)
    first, second = torch.zeros(2), torch.zeros(2)
    residuals.add_to([first], [parameter])
    residuals.keep([torch.tensor([1.0, 0.0])], [parameter])
    residuals.add_to([second], [parameter])
    residuals.keep([torch.tensor([2.0, 0.0])], [parameter])
    assert (first.tolist(), second.tolist()) == ([4.0, 8.0], [0.0, 0.0])
    residuals.finish([parameter], [1], None)
    residuals.begin(None)
    third = torch.zeros(2)
    residuals.add_to([third], [parameter])
    assert third.tolist() == [3.0, 0.0]
