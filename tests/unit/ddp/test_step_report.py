import pytest
import torch

from paceline.ddp.reducer.step_report import RankReport, ReportLayout, StepOutcome, StepSummary

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
    assert not found.raised
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
    assert found.raised == {0: StepOutcome.RAISED_IN_BACKWARD, 2: StepOutcome.RAISED_IN_FORWARD}


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
