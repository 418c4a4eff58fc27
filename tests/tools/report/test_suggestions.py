"""A suggestion is made if the figures support it, and not otherwise."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from paceline.tools.report.step_parts import StepPart
from paceline.tools.report.stragglers import Straggler
from paceline.tools.report.suggestions import RunFacts, suggestions
from paceline.tools.report.wall_time import PauseSummary

MIB = 1 << 20
PARTS = dict.fromkeys(StepPart, 0.0)
PARTS |= {StepPart.FORWARD: 30.0, StepPart.BACKWARD: 60.0, StepPart.OPTIMIZER: 8.0, StepPart.DATA: 2.0}
STRAGGLER = Straggler(3, "the end of backward", 12.0, 0.98, 300, None, 0, "backward", 11.5, 112.0, 100.0)
PAUSES = PauseSummary("evaluation", [0], 2, True, 20, 3400.0, 3000.0, 80, 0.56, 45.0)

FINE = RunFacts(
    step=100.0,
    pauses=[],
    parts=PARTS,
    least=PARTS,
    in_flight=40.0,
    first_ready=0.1,
    buckets=[4 * MIB] * 8,
    cap=25 * MIB,
    ranks=4,
    hosts=1,
    transport="shared memory",
    device="cpu",
    exchange="average",
    stragglers=[],
    lost=0.0,
    without_inputs=0.0,
    without_optimizer=0.01,
)


def parts(**spent: float) -> dict[StepPart, float]:
    return PARTS | {StepPart[name.upper()]: value for name, value in spent.items()}


def fine(*, parts: Mapping[StepPart, float] = PARTS, **changes: Any) -> RunFacts:
    """A run in which nothing stands out but this; by default every rank spends as much in each part."""
    return replace(FINE, **{"parts": parts, "least": parts, **changes})


EXPOSED = parts(exposed_communication=20.0)


def kinds(facts: RunFacts) -> list[str]:
    return [each.kind for each in suggestions(facts)]


def test_if_nothing_stands_out_nothing_is_suggested() -> None:
    assert kinds(FINE) == []


@pytest.mark.parametrize(
    ("facts", "kind", "change", "evidence"),
    [
        (
            fine(stragglers=[STRAGGLER]),
            "straggler",
            "Rank 3 is a straggler",
            "12.0 ms behind the other ranks since step 300, with 11.5 ms more in backward",
        ),
        (
            fine(transport="c10d"),
            "transport",
            'transport="auto"',
            "40.0 ms of 100 ms (40% of a step)",
        ),
        (
            fine(parts=EXPOSED, buckets=[16 * MIB, 16 * MIB]),
            "smaller cap",
            "bucket_cap_mb=4",
            "the largest bucket has 16.0 MiB of 32.0 MiB",
        ),
        (
            fine(parts=EXPOSED, buckets=[64 * 1024] * 100, cap=64 * 1024),
            "larger cap",
            "bucket_cap_mb=1",
            "100 buckets of 64.0 KiB on average take 0.40 ms each",
        ),
        (fine(parts=EXPOSED, hosts=2), "hook", "paceline.hooks.int8()", "6.71 Gbit/s"),
        (
            fine(parts=EXPOSED, in_flight=70.0),
            "more work",
            "no_sync",
            "in flight for 70.0 ms, longer than backward takes (60.0 ms)",
        ),
        (fine(parts=EXPOSED, first_ready=0.8), "first bucket", "bucket_cap_mb_list", "after 80% of"),
        (
            fine(parts=parts(buffers=9.0)),
            "buffers",
            "forward_sync_buffers",
            "9.00 ms of 100 ms (9",
        ),
        (
            fine(parts=parts(data=30.0)),
            "between steps",
            "See what your code does between steps: loading data",
            "30.0 ms of 100 ms (30% of a step) is spent between the optimizer and the next forward",
        ),
        (
            fine(parts=parts(data=30.0), without_optimizer=1.0),
            "between steps",
            "See what your code does between steps: your optimizer",
            "between backward and the next forward; no optimizer of torch stepped the wrapper's parameters",
        ),
        (
            fine(parts=parts(after_optimizer=20.0, data=10.0, loader=1.0)),
            "between steps",
            "See what your code does between steps: loading data, logging",
            "30% of a step) is spent between the optimizer and the next forward, besides the DataLoader",
        ),
        (
            fine(parts=parts(before_optimizer=30.0)),
            "before optimizer",
            "clipping",
            "30.0 ms of 100 ms (30% of a step) is spent between averaged gradients and the optimizer's step",
        ),
        (
            fine(parts=parts(loss=30.0)),
            "loss",
            "between forward and backward",
            "30.0 ms of 100 ms (30% of a step) is spent between the module's forward and the first gradient",
        ),
        (fine(parts=parts(loader=30.0)), "data", "workers for the DataLoader", "30.0 ms of 100 ms"),
        (fine(parts=parts(join=9.0)), "join", "Leave join out", "9.00 ms of 100 ms (9"),
        (
            fine(parts=parts(join=9.0), without_inputs=0.1),
            "join",
            "Give all ranks the same number of batches, and leave join out",
            "9.00 ms of 100 ms (9",
        ),
        (
            fine(pauses=[PAUSES]),
            "pauses: evaluation",
            "Evaluate less often",
            "20 pauses for evaluation on rank 0, 3.4 s together, the longest 3.0 s after step 80, while "
            "other ranks wait: 56% of the wall time",
        ),
        (
            fine(pauses=[replace(PAUSES, ranks=[0, 1], others_wait=False, count=1)]),
            "pauses: evaluation",
            "Evaluate less often",
            "1 pause for evaluation, 3.0 s after step 80: 56% of the wall time",
        ),
        (
            fine(without_optimizer=0.5),
            "unused averages",
            "ddp.no_sync()",
            "after 50% of the averaged backward passes, and buckets are in flight for 40.0 ms of 100 ms (40%",
        ),
        (fine(without_inputs=0.1), "uneven", "same number of batches", "10% of the steps"),
        (fine(lost=0.01), "lost", "a rank raised an error, ended or stopped", "1.0% of the steps"),
        (
            fine(lost=0.01, pauses=[replace(PAUSES, cause="lost steps")]),
            "pauses: lost steps",
            "waited in vain: a rank raised an error, ended or stopped",
            "20 pauses for lost steps",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_suggestion_comes_with_its_evidence(facts: RunFacts, kind: str, change: str, evidence: str) -> None:
    [found] = suggestions(facts)
    assert found.kind == kind
    assert change in found.change
    assert evidence in found.evidence


@pytest.mark.parametrize(
    "facts",
    [
        fine(stragglers=[replace(STRAGGLER, last_step=400)]),
        fine(transport="c10d", hosts=2),
        fine(without_optimizer=1.0),
        fine(without_optimizer=0.5, ranks=1),
        fine(without_optimizer=0.5, in_flight=5.0),
        fine(transport="c10d", in_flight=5.0),
        fine(transport="c10d", device="cuda:0"),
        fine(buckets=[16 * MIB, 16 * MIB]),
        fine(parts=EXPOSED),
        fine(buckets=[64 * 1024] * 100, cap=64 * 1024),
        fine(parts=EXPOSED, buckets=[64 * 1024] * 100),
        fine(parts=EXPOSED, buckets=[16 * MIB, 16 * MIB], cap=2 * MIB),
        fine(hosts=2),
        fine(parts=EXPOSED, hosts=2, exchange="int8"),
        fine(first_ready=0.8),
        fine(parts=parts(buffers=5.0)),
        fine(parts=parts(data=20.0)),
        fine(parts=parts(data=10.0, after_optimizer=10.0, before_optimizer=20.0, loss=20.0)),
        fine(pauses=[replace(PAUSES, share=0.05)]),
        fine(parts=parts(join=9.0), ranks=1),
        fine(parts=EXPOSED, first_ready=0.8, ranks=1),
        fine(parts=parts(join=9.0, buffers=9.0, data=30.0, loss=30.0, loader=30.0), least=PARTS),
        fine(parts=parts(other_wrappers=60.0)),
        fine(step=0.0),
    ],
    ids=[
        "no longer a straggler", "several hosts", "no optimizer seen", "unused on one rank",
        "unused but quick", "little time", "another device", "all overlapped",
        "good caps already", "small but overlapped", "small though they may be large",
        "large in spite of the cap", "hosts but overlapped", "compressed already",
        "first late but overlapped",
        "cheap buffers", "quick data", "nothing long", "short pauses", "join of one rank",
        "first bucket of one rank", "long on some ranks only", "another wrapper", "no time at all",
    ],
)  # fmt: skip
def test_without_support_nothing_is_suggested(facts: RunFacts) -> None:
    assert kinds(facts) == []


def test_if_pauses_of_several_causes_are_large_together_each_of_the_larger_ones_has_advice() -> None:
    causes = {"evaluation": 0.09, "checkpoint": 0.051, "data": 0.01}
    small = [replace(PAUSES, cause=cause, share=share) for cause, share in causes.items()]
    assert kinds(fine(pauses=small)) == ["pauses: evaluation", "pauses: checkpoint"]
    smaller = [replace(each, share=0.04) for each in small]
    assert kinds(fine(pauses=smaller)) == ["pauses: evaluation"]


def test_what_can_save_most_comes_first() -> None:
    facts = fine(parts=parts(exposed_communication=20.0, buffers=9.0), stragglers=[STRAGGLER], hosts=2)
    assert kinds(facts) == ["straggler", "hook", "buffers"]


@pytest.mark.parametrize(
    ("spent", "kind"),
    [
        ("join", "join"),
        ("buffers", "buffers"),
        ("loader", "data"),
        ("data", "between steps"),
        ("after_optimizer", "between steps"),
        ("before_optimizer", "before optimizer"),
        ("loss", "loss"),
    ],
)
def test_a_part_has_the_tables_share_and_saves_what_it_takes_the_rank_that_spends_least(
    spent: str, kind: str
) -> None:
    none, part = parts(data=0.0), StepPart[spent.upper()]
    [found] = suggestions(fine(parts=none | {part: 50.0}, least=none | {part: 30.0}))
    assert found.kind == kind
    assert "50.0 ms of 100 ms (50% of a step)" in found.evidence
    assert found.saves_at_most_ms == 30.0
