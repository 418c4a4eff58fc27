import pytest
import torch

from paceline import hooks
from paceline.ddp.reducer.pairing import StepCounts
from paceline.ddp.reducer.report_checks import number_of_hook
from paceline.ddp.reducer.step_report import HOOK_NUMBERS, RankReport, ReportLayout, StepOutcome, StepSummary

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def exchanged(reports: list[RankReport], dtype: torch.dtype, *, with_order: bool = False) -> StepSummary:
    """What a reduction in that data type makes of every rank's report."""
    layout = ReportLayout(slots=len(reports[0].used), buckets=3, world=len(reports), with_order=with_order)
    rows = torch.full((len(reports), layout.numel), torch.nan, dtype=dtype)
    for rank, report in enumerate(reports):
        layout.write(rows[rank], rank, report)
    total = torch.zeros(layout.numel, dtype=dtype)
    for row in rows:
        total += row
    return layout.read(total)


@pytest.mark.parametrize("dtype", TYPES)
def test_counts_and_flags_add_up(dtype: torch.dtype) -> None:
    found = exchanged(
        [
            RankReport(used=b"\1\0\1", late=[1], unfrozen=True),
            RankReport(used=b"\1\0\0", late=[1, 2], buffers_changed=True),
        ],
        dtype,
    )
    assert found.used == [2, 0, 1]
    assert found.late == [1, 2]
    assert found.unfrozen
    assert found.buffers_changed
    assert not found.lost
    assert found.weights == [None, None]


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_arrive_to_the_bit(dtype: torch.dtype) -> None:
    weights = [1001.0, 0.1, 0.0, 2.0**60 + 1, 1e-300]
    found = exchanged([RankReport(used=b"\1", weight=weight) for weight in weights], dtype)
    assert found.weights == weights


def test_a_rank_without_a_weight_is_told_from_one_that_counts_nothing() -> None:
    found = exchanged([RankReport(used=b"\1", weight=0.0), RankReport(used=b"\1")], torch.float32)
    assert found.weights == [0.0, None]


@pytest.mark.parametrize("dtype", TYPES)
def test_who_raised_and_where(dtype: torch.dtype) -> None:
    reports = [
        RankReport(used=b"\0", outcome=StepOutcome.RAISED_IN_BACKWARD, weight=3.0),
        RankReport(used=b"\1"),
        RankReport(used=b"\0", outcome=StepOutcome.RAISED_IN_FORWARD),
    ]
    found = exchanged(reports, dtype)
    assert found.lost == {0: StepOutcome.RAISED_IN_BACKWARD, 2: StepOutcome.RAISED_IN_FORWARD}


@pytest.mark.parametrize("dtype", TYPES)
def test_who_has_gradients_that_are_not_finite(dtype: torch.dtype) -> None:
    reports = [
        RankReport(used=b"\1", non_finite=True, weight=3.0),
        RankReport(used=b"\1", weight=2.0),
        RankReport(used=b"\1", non_finite=True, outcome=StepOutcome.NO_INPUTS),
    ]
    found = exchanged(reports, dtype)
    assert (found.non_finite, found.weights, found.without_inputs) == ([0, 2], [3.0, 2.0, None], [2])


@pytest.mark.parametrize("dtype", TYPES)
def test_the_order_is_rank_0s_and_only_while_learning(dtype: torch.dtype) -> None:
    slots = 1000
    order = [*range(999, 1, -1)]
    reports = [
        RankReport(used=bytes(slots), order=order),
        RankReport(used=bytes(slots), order=[*reversed(order)]),
    ]
    assert exchanged(reports, dtype, with_order=True).order == order
    assert exchanged(reports, dtype).order == []


def test_many_ranks_count_as_used_even_where_the_count_is_rounded() -> None:
    found = exchanged([RankReport(used=b"\1\0")] * 300, torch.bfloat16)
    assert found.used[0] > 0
    assert found.used[1] == 0


def digests_of(reports: list[RankReport], dtype: torch.dtype) -> list[int]:
    layout = ReportLayout(slots=2, buckets=1, world=len(reports), with_order=True, with_digests=True)
    total = torch.zeros(layout.numel, dtype=dtype)
    for rank, report in enumerate(reports):
        row = torch.empty(layout.numel, dtype=dtype)
        layout.write(row, rank, report)
        total += row
    return layout.read_digests(total)


@pytest.mark.parametrize("dtype", TYPES)
def test_digests_that_differ_arrive_to_the_bit(dtype: torch.dtype) -> None:
    told = [2**64 - 1, 1, 0xFEDCBA9876543210]
    assert digests_of([RankReport(used=b"\1\1", digest=digest) for digest in told], dtype) == told


def test_equal_digests_are_not_decoded_and_a_rank_without_one_cannot_differ() -> None:
    assert digests_of([RankReport(digest=7)] * 3, torch.float32) == [7]
    assert digests_of([RankReport()] * 3, torch.float32) == []
    assert digests_of([RankReport(digest=7), RankReport()], torch.float32) == []


def test_a_report_that_differs_in_its_digests_alone_is_not_decoded_again() -> None:
    layout = ReportLayout(slots=2, buckets=1, world=1, with_order=False, with_digests=True)
    row = torch.empty(layout.numel)
    found = []
    for digest in (5, 6):
        layout.write(row, 0, RankReport(used=b"\1\1", digest=digest))
        found.append(layout.read(row))
    assert found[0] is found[1]
    layout.write(row, 0, RankReport(used=b"\1\0", digest=6))
    assert layout.read(row) is not found[0]


@pytest.mark.parametrize("dtype", TYPES)
def test_every_ranks_hook_arrives_beside_its_counts(dtype: torch.dtype) -> None:
    numbers = [0, 1, HOOK_NUMBERS - 1]
    counts = [StepCounts(through_forward, 255, 255, 65535) for through_forward in (True, False, True)]
    layout = ReportLayout(slots=1, buckets=1, world=3, with_order=False, with_digests=True)
    total = torch.zeros(layout.numel, dtype=dtype)
    for rank, (number, own) in enumerate(zip(numbers, counts, strict=True)):
        row = torch.empty_like(total)
        layout.write(row, rank, RankReport(hook=number, counts=own))
        total += row
    assert layout.read_hooks(total) == numbers
    assert layout.read_counts(total) == counts


def test_built_in_hooks_have_numbers_of_their_own() -> None:
    made = [hooks.average(), hooks.fp16(), hooks.bf16(), hooks.int8(), hooks.int4(), hooks.top_k()]
    made += [hooks.with_error_feedback(each) for each in (hooks.fp16(), hooks.bf16())]
    made += [hooks.power_sgd(), hooks.post_local_sgd(start_step=0, period=2)]
    numbers = {number_of_hook(each.signature) for each in made}
    assert len(numbers) == len(made)
    assert max(numbers) < HOOK_NUMBERS
    assert 0 not in numbers
