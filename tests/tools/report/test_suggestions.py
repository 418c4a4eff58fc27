"""A suggestion is made if the figures support it, and not otherwise."""

from dataclasses import replace

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


EXPOSED = parts(exposed_communication=20.0)


def kinds(facts: RunFacts) -> list[str]:
    return [each.kind for each in suggestions(facts)]


def test_if_nothing_stands_out_nothing_is_suggested() -> None:
    assert kinds(FINE) == []


@pytest.mark.parametrize(
    ("facts", "kind", "change", "evidence"),
    [
        (
            replace(FINE, stragglers=[STRAGGLER]),
            "straggler",
            "Rank 3 is a straggler",
            "12.0 ms behind the other ranks since step 300, with 11.5 ms more in backward",
        ),
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
        (replace(FINE, parts=EXPOSED, hosts=2), "hook", "paceline.hooks.int8()", "6.71 Gbit/s"),
        (
            replace(FINE, parts=EXPOSED, in_flight=70.0),
            "more work",
            "no_sync",
            "in flight for 70.0 ms, longer than backward takes (60.0 ms)",
        ),
        (replace(FINE, parts=EXPOSED, first_ready=0.8), "first bucket", "bucket_cap_mb_list", "after 80% of"),
        (
            replace(FINE, parts=parts(buffers=9.0)),
            "buffers",
            "forward_sync_buffers",
            "9.00 ms of 100 ms (9",
        ),
        (
            replace(FINE, parts=parts(data=30.0)),
            "between steps",
            "See what your code does between steps: loading data",
            "30.0 ms of 100 ms (30% of a step) is spent between the optimizer and the next forward",
        ),
        (
            replace(FINE, parts=parts(data=30.0), without_optimizer=1.0),
            "between steps",
            "See what your code does between steps: your optimizer",
            "between backward and the next forward; no optimizer of torch stepped the wrapper's parameters",
        ),
        (
            replace(FINE, parts=parts(after_optimizer=20.0, data=10.0, loader=1.0)),
            "between steps",
            "See what your code does between steps: loading data, logging",
            "30% of a step) is spent between the optimizer and the next forward, besides the DataLoader",
        ),
        (
            replace(FINE, parts=parts(before_optimizer=30.0)),
            "before optimizer",
            "clipping",
            "30.0 ms of 100 ms (30% of a step) is spent between averaged gradients and the optimizer's step",
        ),
        (
            replace(FINE, parts=parts(loss=30.0)),
            "loss",
            "between forward and backward",
            "30.0 ms of 100 ms (30% of a step) is spent between the module's forward and the first gradient",
        ),
        (replace(FINE, parts=parts(loader=30.0)), "data", "workers for the DataLoader", "30.0 ms of 100 ms"),
        (replace(FINE, parts=parts(join=9.0)), "join", "leave join out", "9.00 ms of 100 ms (9"),
        (
            replace(FINE, pauses=[PAUSES]),
            "pauses: evaluation",
            "Evaluate less often",
            "20 pauses for evaluation on rank 0, 3.4 s together, the longest 3.0 s after step 80, while "
            "other ranks wait: 56% of the wall time",
        ),
        (
            replace(FINE, pauses=[replace(PAUSES, ranks=[0, 1], others_wait=False, count=1)]),
            "pauses: evaluation",
            "Evaluate less often",
            "1 pause for evaluation, 3.0 s after step 80: 56% of the wall time",
        ),
        (
            replace(FINE, without_optimizer=0.5),
            "unused averages",
            "ddp.no_sync()",
            "after 50% of the averaged backward passes, and buckets are in flight for 40.0 ms of 100 ms (40%",
        ),
        (replace(FINE, without_inputs=0.1), "uneven", "same number of batches", "10% of the steps"),
        (replace(FINE, lost=0.01), "lost", "errors", "1.0% of the steps"),
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
        replace(FINE, stragglers=[replace(STRAGGLER, last_step=400)]),
        replace(FINE, transport="c10d", hosts=2),
        replace(FINE, without_optimizer=1.0),
        replace(FINE, without_optimizer=0.5, ranks=1),
        replace(FINE, without_optimizer=0.5, in_flight=5.0),
        replace(FINE, transport="c10d", in_flight=5.0),
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
        replace(FINE, parts=parts(data=20.0)),
        replace(FINE, parts=parts(data=10.0, after_optimizer=10.0, before_optimizer=20.0, loss=20.0)),
        replace(FINE, pauses=[replace(PAUSES, share=0.05)]),
        replace(FINE, parts=parts(other_wrappers=60.0)),
        replace(FINE, step=0.0),
    ],
    ids=[
        "no longer a straggler", "several hosts", "no optimizer seen", "unused on one rank",
        "unused but quick", "little time", "another device", "all overlapped",
        "good caps already", "small but overlapped", "small though they may be large",
        "large in spite of the cap", "hosts but overlapped", "compressed already",
        "first late but overlapped",
        "cheap buffers", "quick data", "nothing long", "short pauses", "another wrapper", "no time at all",
    ],
)  # fmt: skip
def test_without_support_nothing_is_suggested(facts: RunFacts) -> None:
    assert kinds(facts) == []


def test_if_pauses_of_several_causes_are_large_together_each_of_the_larger_ones_has_advice() -> None:
    causes = {"evaluation": 0.09, "checkpoint": 0.051, "data": 0.01}
    small = [replace(PAUSES, cause=cause, share=share) for cause, share in causes.items()]
    assert kinds(replace(FINE, pauses=small)) == ["pauses: evaluation", "pauses: checkpoint"]
    smaller = [replace(each, share=0.04) for each in small]
    assert kinds(replace(FINE, pauses=smaller)) == ["pauses: evaluation"]


def test_what_can_save_most_comes_first() -> None:
    facts = replace(
        FINE, parts=parts(exposed_communication=20.0, buffers=9.0), stragglers=[STRAGGLER], hosts=2
    )
    assert kinds(facts) == ["straggler", "hook", "buffers"]
