"""How steps are timed: what ranks measured is merged, the floor averages, and busy processes end."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from left_processes import is_running
from torch import Tensor, nn

from paceline.testing import run_ranks
from paceline.tools.bench.floor import Floor
from paceline.tools.bench.measure import Turn, busy_processes, take_turns
from paceline.tools.bench.step_times import ALONE, Side, StepTimes

SOON_SECONDS = 20.0
KILLED = """
import time
from paceline.tools.bench.measure import busy_processes
with busy_processes(2) as pids:
    print(*pids, flush=True)
    time.sleep(99)
"""


def test_the_module_alone_takes_what_the_slower_rank_takes_in_each_step() -> None:
    alone, ddp = str(ALONE), str(Side("paceline"))
    first = {alone: [Turn([1.0, 4.0], 3.0)], ddp: [Turn([3.0, 5.0], 6.0)]}
    second = {alone: [Turn([3.0, 2.0], 4.0)], ddp: [Turn([3.0, 6.0], 8.0)]}
    times = StepTimes.of_ranks([first, second])
    assert times.of == {alone: [3.5], ddp: [4.5]}
    assert times.added(Side("paceline")) == [1.0]
    assert times.waiting == [1.0]  # the ranks' own steps take 2.5 on average
    assert times.cpu == {alone: [3.5], ddp: [7.0]}
    assert times.cpu_added(Side("paceline"), parts=2) == [1.75]


def test_a_turn_has_the_time_of_each_call_and_sides_take_turns() -> None:
    called: list[str] = []
    sides = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    turns = take_turns(sides, rounds=2, calls=2, warmups=0)
    assert [[len(turn.seconds) for turn in turns[side]] for side in "ab"] == [[2, 2], [2, 2]]
    assert called == ["a", "a", "b", "b", "b", "b", "a", "a"]


def test_the_floor_averages_gradients() -> None:
    for computed, expected in run_ranks(floor_gradients, 3):
        torch.testing.assert_close(computed, expected)


def floor_gradients(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of some steps under the floor, and the averages of what the module alone computes."""
    torch.manual_seed(0)
    # Small and large gradients, in two buckets.
    net = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400), nn.Linear(400, 3)).double()
    state = net.state_dict()
    torch.manual_seed(rank + 1)
    batches = torch.randn(3, 5, 400, dtype=torch.float64)
    expected = [grad for batch in batches[1:] for grad in averages(gradients(net, batch))]
    net.load_state_dict(state)
    Floor(net)
    gradients(net, batches[0])  # which only learns the order
    return [grad for batch in batches[1:] for grad in gradients(net, batch)], expected


def gradients(net: nn.Module, batch: Tensor) -> list[Tensor]:
    net.zero_grad(set_to_none=True)
    net(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def averages(own: list[Tensor]) -> list[Tensor]:
    for each in own:
        dist.all_reduce(each)
    return [each / dist.get_world_size() for each in own]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_busy_processes_end_with_the_block_also_if_it_raises(error: type[BaseException]) -> None:
    started: list[int] = []
    with pytest.raises(error):
        raise_among_busy_processes(error, started)
    assert [is_running(pid) for pid in started] == [False, False]


def raise_among_busy_processes(error: type[BaseException], started: list[int]) -> None:
    with busy_processes(2) as pids:
        started += pids
        assert [is_running(pid) for pid in pids] == [True, True]
        raise error


def test_busy_processes_end_if_who_started_them_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert [is_running(pid) for pid in pids] == [True, True]
        os.kill(program.pid, signal.SIGKILL)
    deadline = time.monotonic() + SOON_SECONDS
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [is_running(pid) for pid in pids] == [False, False]
