"""How often autograd calls Python code in a step: once per bucket, not once per parameter."""

import math
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.ddp.reducer.step import MOST_SMALL
from paceline.testing import RankPool


class Calls:
    """Notes our Python functions that autograd calls while backward runs."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        caller = frame.f_back
        from_autograd = caller is not None and caller.f_code.co_name == "_engine_run_backward"
        if event == "call" and from_autograd and "paceline" in frame.f_code.co_filename:
            self.names.append(frame.f_code.co_qualname)


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def count_calls(rank: int, count: int, cap_mb: float, way: str) -> list[str]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(layers(count), bucket_cap_mb=cap_mb)
    net = ddp.module if way == "not the wrapper's forward" else ddp
    for _ in range(3):
        net(torch.full((2, 4), rank + 1.0)).sum().backward()
    calls = Calls()
    loss = net(torch.full((2, 4), rank + 1.0)).sum()
    sys.setprofile(calls)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    buckets = len(ddp._reducer.context.bucket_set.buckets)
    return [str(buckets), *calls.names]


@pytest.mark.parametrize("way", ["forward", "not the wrapper's forward"])
def test_one_call_per_bucket_one_at_the_start_and_one_at_the_end(pair: RankPool, way: str) -> None:
    for buckets, first, *ready, last, deleted in pair.run(count_calls, 20, 0.0005, way):
        assert int(buckets) > 1
        assert first in ("_StartOfBackward.__call__", "_Arrived.__call__")
        assert ready == ["GradHooks._make_hook.<locals>.on_grad"] * int(buckets)
        assert (last, deleted) == ("_EndOfBackward.__call__", "_EndOfBackward.__del__")


def test_gradients_are_copied_while_they_are_in_the_cache(pair: RankPool) -> None:
    parameters = 4 * MOST_SMALL
    for buckets, *names in pair.run(count_calls, parameters // 2, 25.0, "forward"):
        assert buckets == "1"
        assert len(names) == math.ceil(parameters / MOST_SMALL) + 3, names
