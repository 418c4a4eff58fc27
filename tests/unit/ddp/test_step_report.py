import pytest
import torch

from paceline.ddp.reducer.step_report import Outcome, Report, Summary, Waybill

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def exchanged(reports: list[Report], dtype: torch.dtype, *, teaching: bool = False) -> Summary:
    """What a reduction in that data type makes of every rank's report."""
    waybill = Waybill(slots=len(reports[0].used), buckets=3, world=len(reports), teaching=teaching)
    tails = torch.full((len(reports), waybill.size), torch.nan, dtype=dtype)
    for rank, report in enumerate(reports):
        waybill.write(tails[rank], rank, report)
    total = torch.zeros(waybill.size, dtype=dtype)
    for tail in tails:
        total += tail
    return waybill.read(total)


@pytest.mark.parametrize("dtype", TYPES)
def test_counts_and_flags_add_up(dtype: torch.dtype) -> None:
    found = exchanged(
        [
            Report(used=b"\1\0\1", late=[1], thawed=True),
            Report(used=b"\1\0\0", late=[1, 2], buffers_changed=True),
        ],
        dtype,
    )
    assert found.used == [2, 0, 1]
    assert found.late == [1, 2]
    assert found.thawed
    assert found.buffers_changed
    assert not found.raised
    assert found.weights == [None, None]


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_arrive_to_the_bit(dtype: torch.dtype) -> None:
    weights = [1001.0, 0.1, 0.0, 2.0**60 + 1, 1e-300]
    found = exchanged([Report(used=b"\1", weight=weight) for weight in weights], dtype)
    assert found.weights == weights


def test_a_rank_without_a_weight_is_told_from_one_that_counts_nothing() -> None:
    found = exchanged([Report(used=b"\1", weight=0.0), Report(used=b"\1")], torch.float32)
    assert found.weights == [0.0, None]


@pytest.mark.parametrize("dtype", TYPES)
def test_who_raised_and_where(dtype: torch.dtype) -> None:
    reports = [
        Report(used=b"\0", outcome=Outcome.RAISED_IN_BACKWARD, weight=3.0),
        Report(used=b"\1"),
        Report(used=b"\0", outcome=Outcome.RAISED_IN_FORWARD),
    ]
    found = exchanged(reports, dtype)
    assert found.raised == {0: Outcome.RAISED_IN_BACKWARD, 2: Outcome.RAISED_IN_FORWARD}


@pytest.mark.parametrize("dtype", TYPES)
def test_the_order_is_rank_0s_and_only_while_teaching(dtype: torch.dtype) -> None:
    slots = 1000
    order = [*range(999, 1, -1)]
    reports = [
        Report(used=bytes(slots), order=order),
        Report(used=bytes(slots), order=[*reversed(order)]),
    ]
    assert exchanged(reports, dtype, teaching=True).order == order
    assert exchanged(reports, dtype).order == []


def test_many_ranks_count_as_used_even_where_the_count_is_rounded() -> None:
    found = exchanged([Report(used=b"\1\0")] * 300, torch.bfloat16)
    assert found.used[0] > 0
    assert found.used[1] == 0
