"""Every case of the torture suite is right with a plain wrapper: no flag, no rewrite by the user."""

from collections.abc import Iterator

import pytest
from figures import FIGURES, load
from torture.case import Case
from torture.judge import Verdict, judge
from torture.run import Refused, Wrapper, oracle, train
from torture.suite import ALL, CASES

from paceline.testing import RankPool

# Torch says so of each checkpoint inside another, where it is of no consequence.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

# Cases in which ranks play different parts, so that a third one may matter.
WIDE = [
    "parameter unused on one rank",
    "another branch on each rank",
    "another output in the loss on each rank",
    "re-entrant checkpoint, parameter unused on one rank",
    "two losses, two backwards, `retain_graph`",
    "sparse embedding, empty input on one rank",
    "`no_sync`, parameter used in the first micro-batch of one rank only",
    "exception in forward on one rank, then clean",
    "exception in backward on one rank, then clean",
]
# Cases that a HostOptimizer refuses, and a word of its error.
REFUSED_ONCE_PER_HOST = {
    "sparse embedding, empty input on one rank": "sparse gradients",
    "sparse embedding bag, empty input on one rank": "sparse gradients",
    "sparse embedding skipped by one rank": "sparse gradients",
}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """Kept ranks, by the size of their world."""
    pools = {world: RankPool(world, timeout=30.0) for world in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


def check(case: Case, wrapper: Wrapper, pools: dict[int, RankPool], *, world: int) -> None:
    seen = pools[world].run(train, case.name, wrapper)
    found = judge(case, oracle(case, world), seen)
    if found.verdict is not Verdict.RIGHT:
        # The ranks may be out of step with each other: the next case is not to suffer from it.
        pools[world].close()
        pools[world] = RankPool(world, timeout=30.0)
    assert found.verdict is Verdict.RIGHT, f"{found.verdict}: {found.reason}"


def is_quick(name: str) -> bool:
    # Where only the number is awkward, nothing depends on whose memory it is; and it takes long.
    return name != "5,000 tiny parameters"


@pytest.mark.parametrize(
    ("name", "view"),
    [
        pytest.param(name, view, id=f"{name}-{'views' if view else 'copies'}")
        for name in CASES
        for view in ([False, True] if is_quick(name) else [False])
    ],
)
def test_case(name: str, view: bool, pools: dict[int, RankPool]) -> None:
    check(CASES[name], Wrapper("paceline", {"gradient_as_bucket_view": view}), pools, world=2)


@pytest.mark.parametrize("name", list(filter(is_quick, CASES)))
def test_case_with_lazy_buckets_and_manual_finalization(name: str, pools: dict[int, RankPool]) -> None:
    # In buckets of one parameter each: several are in flight, and each is allocated by itself.
    options = {"lazy_bucket_allocation": True, "bucket_cap_mb": 1e-5}
    check(CASES[name], Wrapper("paceline", options, manual=True), pools, world=2)


@pytest.mark.parametrize("name", WIDE)
def test_case_on_three_ranks(name: str, pools: dict[int, RankPool]) -> None:
    check(CASES[name], Wrapper("paceline"), pools, world=3)


@pytest.mark.parametrize("name", list(filter(is_quick, CASES)))
def test_case_with_parameters_once_per_host(name: str, pools: dict[int, RankPool]) -> None:
    case, wrapper = CASES[name], Wrapper("paceline", one_copy=True)
    if name not in REFUSED_ONCE_PER_HOST:
        check(case, wrapper, pools, world=2)
        return
    for seen in pools[2].run(train, name, wrapper):
        assert isinstance(seen, Refused)
        assert REFUSED_ONCE_PER_HOST[name] in seen.error


def test_no_two_cases_have_the_same_name() -> None:
    assert len(CASES) == len(ALL)


def test_the_docs_have_every_case_and_no_other() -> None:
    assert list(load(FIGURES)["torture"]["cases"]) == list(CASES)


def test_the_docs_say_right_of_every_case() -> None:
    assert {ends[-1] for ends in load(FIGURES)["torture"]["cases"].values()} == {Verdict.RIGHT}
