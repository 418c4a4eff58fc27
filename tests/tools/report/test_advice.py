"""Suggestions appear when the figures support them, and not otherwise."""

from dataclasses import replace

import pytest

from paceline.tools.report.advice import Facts, suggestions
from paceline.tools.report.lateness import Late
from paceline.tools.report.parts import Part

MIB = 1 << 20
PARTS = dict.fromkeys(Part, 0.0)
PARTS |= {Part.FORWARD: 30.0, Part.BACKWARD: 60.0, Part.OPTIMIZER: 8.0, Part.BETWEEN: 2.0}
LATE = Late(3, "the end of backward", 12.0, 0.98, 300, None, 0, "backward", 11.5, 112.0, 100.0)

FINE = Facts(
    step=100.0,
    parts=PARTS,
    under_way=40.0,
    first_ready=0.1,
    buckets=[4 * MIB] * 8,
    cap=25 * MIB,
    ranks=4,
    hosts=1,
    transport="shared memory",
    device="cpu",
    exchange="average",
    late=[],
    lost=0.0,
    shadowed=0.0,
)


def parts(**spent: float) -> dict[Part, float]:
    return PARTS | {Part[name.upper()]: value for name, value in spent.items()}


EXPOSED = parts(communication=20.0)


def kinds(facts: Facts) -> list[str]:
    return [each.kind for each in suggestions(facts)]


def test_where_nothing_stands_out_nothing_is_suggested() -> None:
    assert kinds(FINE) == []


@pytest.mark.parametrize(
    ("facts", "kind", "change", "figure"),
    [
        (replace(FINE, late=[LATE]), "late", "Rank 3 is late", "12.0 ms after the others, since step 300"),
        (
            replace(FINE, transport="c10d"),
            "transport",
            'transport="auto"',
            "40.0 ms of 100 ms (40% of a step)",
        ),
        (
            replace(FINE, parts=EXPOSED, buckets=[16 * MIB, 16 * MIB]),
            "smaller cap",
            "bucket_cap_mb=4",
            "the largest bucket has 16.0 MiB of 32.0 MiB",
        ),
        (
            replace(FINE, parts=EXPOSED, buckets=[64 * 1024] * 100, cap=64 * 1024),
            "larger cap",
            "bucket_cap_mb=1",
            "100 buckets of 64.0 KiB on average take 0.40 ms each",
        ),
        (replace(FINE, parts=EXPOSED, hosts=2), "hook", "paceline.hooks.int8()", "6.7 Gbit/s"),
        (
            replace(FINE, parts=EXPOSED, under_way=70.0),
            "more work",
            "no_sync",
            "under way for 70.0 ms, longer than backward takes (60.0 ms)",
        ),
        (replace(FINE, parts=EXPOSED, first_ready=0.8), "first bucket", "bucket_cap_mb_list", "after 80% of"),
        (replace(FINE, parts=parts(buffers=9.0)), "buffers", "forward_sync_buffers", "9.00 ms of 100 ms (9%"),
        (replace(FINE, parts=parts(between=30.0)), "data", "Load data ahead", "30.0 ms of 100 ms (30%"),
        (replace(FINE, shadowed=0.1), "uneven", "same number of batches", "10% of the steps"),
        (replace(FINE, lost=0.01), "lost", "raised", "1.0% of the steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_suggestion_comes_with_its_figure(facts: Facts, kind: str, change: str, figure: str) -> None:
    [found] = suggestions(facts)
    assert found.kind == kind
    assert change in found.change
    assert figure in found.figure


@pytest.mark.parametrize(
    "facts",
    [
        replace(FINE, late=[replace(LATE, until=400)]),
        replace(FINE, transport="c10d", hosts=2),
        replace(FINE, transport="c10d", under_way=5.0),
        replace(FINE, transport="c10d", device="cuda:0"),
        replace(FINE, buckets=[16 * MIB, 16 * MIB]),
        replace(FINE, parts=EXPOSED),
        replace(FINE, buckets=[64 * 1024] * 100, cap=64 * 1024),
        replace(FINE, parts=EXPOSED, buckets=[64 * 1024] * 100),
        replace(FINE, parts=EXPOSED, buckets=[16 * MIB, 16 * MIB], cap=2 * MIB),
        replace(FINE, hosts=2),
        replace(FINE, parts=EXPOSED, hosts=2, exchange="int8"),
        replace(FINE, first_ready=0.8),
        replace(FINE, parts=parts(buffers=5.0)),
        replace(FINE, parts=parts(between=20.0)),
        replace(FINE, step=0.0),
    ],
    ids=[
        "late no more", "several hosts", "little time", "another device", "all hidden", "good caps already",
        "small but hidden", "small though they may be large", "large in spite of the cap",
        "hosts but hidden", "compressed already", "first late but hidden",
        "cheap buffers", "quick data", "no time at all",
    ],
)  # fmt: skip
def test_without_support_there_is_none(facts: Facts) -> None:
    assert kinds(facts) == []


def test_the_most_promising_comes_first() -> None:
    facts = replace(FINE, parts=parts(communication=20.0, buffers=9.0), late=[LATE], hosts=2)
    assert kinds(facts) == ["late", "hook", "buffers"]
