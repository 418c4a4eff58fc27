"""One gradient's way through the code is short, and docs/how-it-works.md shows it as it is."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.testing import RankPool

PAGE = Path(__file__).parents[3] / "docs/how-it-works.md"
# Where something is done to gradients: copied, scaled, reduced, waited for, made .grad.
CALLS_INTO_TORCH = {"_foreach_copy_", "_foreach_mul_"}
CALLS = {"Group.all_reduce", "SharedMemoryPending.wait", "DenseBucket.set_grads"}

Functions = set[tuple[str, str]]


def functions_on_the_way(rank: int) -> Functions:
    """The functions of ddp/ on the call stack wherever something is done to the gradients of a step."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    ddp = DistributedDataParallel(net)
    for _ in range(3):  # the first steps teach the order
        ddp(torch.full((4, 8), float(rank))).sum().backward()
        net.zero_grad()
    found: Functions = set()

    def look(frame: FrameType | None, event: str, called: Any) -> None:
        is_into_torch = event == "c_call" and called.__name__ in CALLS_INTO_TORCH
        assert frame is not None
        if is_into_torch or (event == "call" and frame.f_code.co_qualname in CALLS):
            while frame is not None:
                _, is_ours, file = frame.f_code.co_filename.partition("/paceline/ddp/")
                if is_ours:
                    found.add((file, frame.f_code.co_qualname.rpartition("<locals>.")[2]))
                frame = frame.f_back

    loss = ddp(torch.full((4, 8), float(rank))).sum()
    sys.setprofile(look)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    return found


def functions_on_the_page() -> Functions:
    """What the table shows: a function of ours in the third column, its file in the fourth."""
    rows = re.findall(r"^\|[^|]*\|[^|]*\| `([^`]+)` \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
    return {(file, function) for function, file in rows}


def test_a_gradient_passes_the_functions_that_the_page_shows(pair: RankPool) -> None:
    traced = pair.run(functions_on_the_way)[0]
    assert traced == functions_on_the_page()
    assert len(traced) <= 15
    assert len({file for file, _ in traced}) <= 7
