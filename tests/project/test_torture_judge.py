"""The torture suite's judge tells right from wrong."""

import pytest
import torch
from torch import nn
from torture.case import Case, layers, plain
from torture.judge import Verdict, judge
from torture.run import Expected, ExpectedLoss, Grads, Lost, Refused, oracle, train_case
from torture.suite import ALL

# Torch says so of each checkpoint inside another, where it is of no consequence.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

WEIGHT = torch.ones(3, dtype=torch.double)


CASE = Case(name="plain", build=layers, step=plain)
REFUSED = Case(name="refused", build=layers, step=plain, refused="meta")


def unwrapped(module: nn.Module) -> nn.Module:
    return module


def verdict(want: torch.Tensor | None, *got: torch.Tensor | None) -> Verdict:
    expected = [Expected({"weight": want}, [{}] * len(got))]
    return judge(CASE, expected, [[Grads({"weight": grad}, {})] for grad in got]).verdict


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_no_case_is_right_without_a_wrapper(case: Case) -> None:
    seen = [train_case(rank, case, unwrapped) for rank in range(2)]
    assert judge(case, oracle(case, 2), seen).verdict is Verdict.WRONG


def test_one_rank_alone_is_right_without_a_wrapper() -> None:
    assert judge(CASE, oracle(CASE, 1), [train_case(0, CASE, unwrapped)]).verdict is Verdict.RIGHT


def test_what_is_within_tolerance_is_right() -> None:
    near = WEIGHT + 1e-13
    assert verdict(WEIGHT, near, near) is Verdict.RIGHT
    assert verdict(None, None, None) is Verdict.RIGHT


def test_ranks_must_agree_to_the_bit() -> None:
    assert verdict(WEIGHT, WEIGHT, WEIGHT + 1e-15) is Verdict.WRONG


@pytest.mark.parametrize(
    "got",
    [
        WEIGHT + 1e-11,
        WEIGHT * float("nan"),
        WEIGHT.float(),
        WEIGHT.to_sparse(),
        torch.ones(6, dtype=torch.double)[::2],
        torch.ones(1, dtype=torch.double),
        None,
    ],
    ids=["off", "nan", "dtype", "layout", "strides", "shape", "none"],
)
def test_other_gradients_are_wrong(got: torch.Tensor | None) -> None:
    assert verdict(WEIGHT, got, got) is Verdict.WRONG
    assert verdict(got, WEIGHT, WEIGHT) is Verdict.WRONG


def test_zeros_are_wrong_where_no_rank_has_a_gradient() -> None:
    zeros = torch.zeros(3, dtype=torch.double)
    assert verdict(None, zeros, zeros) is Verdict.WRONG


def test_each_rank_must_have_its_own_local_values() -> None:
    mine, theirs = {"x.grad": WEIGHT}, {"x.grad": 2 * WEIGHT}
    expected = [Expected({}, [mine, theirs])]
    assert judge(CASE, expected, [[Grads({}, mine)], [Grads({}, theirs)]]).verdict is Verdict.RIGHT
    assert judge(CASE, expected, [[Grads({}, mine)], [Grads({}, mine)]]).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("on_rank_1", "verdict"),
    [
        (Lost("rank 0 lost the step"), Verdict.RIGHT),
        (Lost("connection reset"), Verdict.ERROR),
        (Grads({}, {}), Verdict.WRONG),
    ],
)
def test_a_lost_step_is_lost_on_every_rank_and_names_the_culprit(
    on_rank_1: Lost | Grads, verdict: Verdict
) -> None:
    assert judge(CASE, [ExpectedLoss([0])], [[Lost("boom")], [on_rank_1]]).verdict is verdict


def test_an_error_in_a_good_step_is_an_error() -> None:
    expected = [Expected({}, [{}, {}])]
    assert judge(CASE, expected, [[Grads({}, {})], [Lost("rank 0")]]).verdict is Verdict.ERROR


def test_a_refusal_says_why() -> None:
    assert judge(REFUSED, [], [Refused("it is on meta")] * 2).verdict is Verdict.RIGHT
    assert judge(REFUSED, [], [Refused("no idea")] * 2).verdict is Verdict.ERROR
    assert judge(REFUSED, [], [[], []]).verdict is Verdict.WRONG
