"""What an OuterLoop refuses, and what it does where there is nothing to do."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn

from paceline import DistributedDataParallel, HostOptimizer, OuterLoop, hooks
from paceline.errors import (
    HookTypeError,
    MeetingError,
    MismatchError,
    OptionError,
    PacelineError,
    UnsupportedError,
)
from paceline.outer import host_meeting, outer_loop
from paceline.testing import run_ranks


def refusals(_: int, given: list[dict[str, Any]]) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    found = []
    for options in given:
        try:
            OuterLoop(ddp, **options)
        except PacelineError as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("taken")
    return found


def test_bad_options_are_refused_with_what_is_allowed() -> None:
    cases = {
        "period must be a positive number of steps (period: 0)": {"period": 0},
        "a fragment needs a parameter of its own (fragments: 3": {"fragments": 3},
        "fragments must be at least 1": {"fragments": 0},
        "overlap must not be negative": {"overlap": -1},
        "less than the period": {"period": 4, "overlap": 4},
        "lr and grace must be positive": {"lr": 0.0},
        "(lr: 0.7, momentum: 1.0, grace: 10.0)": {"momentum": 1.0},
        "grace: nan": {"grace": float("nan")},
        'meet must be "host:port"': {"meet": "somewhere"},
        "(meet: 'host:99999')": {"meet": "host:99999"},
    }
    for ranks in run_ranks(refusals, 2, args=([*cases.values()],)):
        for words, found in zip(cases, ranks, strict=True):
            assert words in found


def refuse_others(_: int) -> None:
    with pytest.raises(OptionError, match=r"needs paceline's wrapper: OuterLoop\(ddp\) \(given: Linear\)"):
        OuterLoop(nn.Linear(2, 2))  # type: ignore[arg-type]
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(HookTypeError, match="needs a compressor"):
        OuterLoop(ddp, compressor=hooks.power_sgd())
    alone, _ = distributed.new_subgroups(1)
    HostOptimizer(ddp, torch.optim.SGD, lr=0.1)
    with pytest.raises(UnsupportedError, match="make the OuterLoop before the HostOptimizer"):
        OuterLoop(ddp, inner=alone)


def refuse_one_job_whose_ranks_are_replaced(_: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    outer_loop.own_membership = lambda: SimpleNamespace(lost_after=30.0)  # type: ignore[assignment, return-value]
    with pytest.raises(UnsupportedError, match=r'run a job on each host, .*meet="host:port"'):
        OuterLoop(ddp)
    with pytest.raises(OptionError, match=r"smaller grace.*\(grace: 14\.5, --lost-after: 30\.0\)"):
        OuterLoop(ddp, meet="127.0.0.1:1", grace=14.5)
    OuterLoop(ddp, meet="127.0.0.1:1", grace=14.4)


def test_one_job_of_all_hosts_and_a_long_grace_are_refused_if_ranks_are_replaced() -> None:
    run_ranks(refuse_one_job_whose_ranks_are_replaced, 1)


def meet_nobody(_: int, port: int) -> str:
    outer_loop._MEET_SECONDS = host_meeting._ANSWER_SECONDS = 0.2
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(MeetingError) as raised:
        OuterLoop(ddp, meet=f"127.0.0.1:{port}")
    return str(raised.value)


def test_all_ranks_of_a_host_are_told_at_once_that_it_has_met_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        first, second = run_ranks(meet_nobody, 2, args=(stranger.getsockname()[1],))
    assert isinstance(second, str)
    assert str(first).startswith("no host answers where hosts meet")
    assert second.startswith("rank 0 could not meet the other hosts")


def test_what_is_no_wrapper_no_compressor_or_comes_too_late_is_refused() -> None:
    run_ranks(refuse_others, 2)


def different(rank: int) -> str:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(MismatchError) as raised:
        OuterLoop(ddp, period=8 + rank)
    return str(raised.value)


def test_ranks_with_different_settings_all_raise() -> None:
    for words in run_ranks(different, 2):
        assert "period=8" in words
        assert "period=9" in words
        assert "rank 1" in words


def begin_apart(rank: int) -> str:
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.Linear(2, 2), init_sync=False)
    with pytest.raises(MismatchError) as raised:
        OuterLoop(ddp)
    return str(raised.value)


def test_hosts_that_would_begin_with_different_parameters_are_told() -> None:
    assert all("their values differ" in words for words in run_ranks(begin_apart, 2))


def on_one_host(rank: int) -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    ddp = DistributedDataParallel(net)
    with OuterLoop(ddp, period=1) as outer:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            ddp(torch.full((1, 2), float(rank + step))).sum().backward()
            optimizer.step()
            outer.step()
        assert ddp.process_group.size() == 2
        assert outer.state_dict() == {}
    return net.weight.flatten().tolist()


def test_on_one_host_training_is_that_of_the_wrapper_alone() -> None:
    torch.manual_seed(0)
    alone = nn.Linear(2, 2)
    for step in range(3):
        alone.zero_grad()
        (sum(alone(torch.full((1, 2), float(rank + step))).sum() for rank in range(2)) / 2).backward()
        with torch.no_grad():
            for parameter in alone.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
    for ranks in run_ranks(on_one_host, 2):
        torch.testing.assert_close(torch.tensor(ranks), alone.weight.flatten().detach())
