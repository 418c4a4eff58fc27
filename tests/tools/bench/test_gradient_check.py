"""A side that does other work than it should is noticed, also if no rank has whole gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.testing import run_ranks
from paceline.tools.bench.gradient_check import compare_gradients
from paceline.tools.bench.models import ADAMW, Model, TrainingStep, default_loss
from paceline.tools.bench.sides import HOST, OPTIMIZER_SIDES
from paceline.tools.bench.step_times import make_steps


def net() -> nn.Module:
    # Parameters that are cut and some that are not, one of them with channels last in memory.
    conv = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(256, 300))


NET = Model("a net", net, (4, 64, 4, 4), 1)


def compared(rank: int, fault: str) -> str | None:
    """Compare all sides, after the second rank has made a mistake under the HostOptimizer."""
    alone = replace(NET.make(rank), make_optimizer=ADAMW.make)
    steps, refused = make_steps(rank, NET, alone, [*OPTIMIZER_SIDES.values()], ADAMW, has_unused=False)
    assert not refused
    sides = {side: steps[side] for side in OPTIMIZER_SIDES}
    if rank == 1:
        sides[str(HOST)] = with_fault(sides[str(HOST)], fault)
    warning = compare_gradients(rank, alone, sides)
    del steps, sides  # torch's wrapper can hang if it outlives the group
    return warning


def with_fault(step: TrainingStep, fault: str) -> TrainingStep:
    optimizer: Any = step.optimizer
    match fault:
        case "gradient":
            training = replace(step.training, loss=lambda out: 1.01 * default_loss(out))
            return replace(step, training=training)
        case "part":
            largest = max(optimizer.param_groups[0]["params"], key=Tensor.numel)
            kept = [each for each in optimizer.param_groups[0]["params"] if each is not largest]
            optimizer.param_groups[0]["params"] = kept
        case "step":
            optimizer._local.step = lambda: None
    return step


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("none", None),
        ("gradient", f"gradients are not the average over ranks under: {HOST} (parameter: "),
        ("part", f"gradients are not the average over ranks under: {HOST} (parameter: 2.weight, by: 0."),
        ("step", f"a step does not change all of the parameters under: {HOST} (parameter: "),
    ],
)
def test_what_one_rank_does_wrong_is_noticed(fault: str, words: str | None) -> None:
    found = run_ranks(compared, 2, args=(fault,))
    assert found[0] == found[1]
    assert found[0] is None if words is None else str(found[0]).startswith(words)
