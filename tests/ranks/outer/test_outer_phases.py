"""Outer loops one after the other on one wrapper, and what goes wrong on one rank of a host."""

import gc
import os
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from paceline import DistributedDataParallel, HostOptimizer, OuterLoop
from paceline.comm.shm.local_ranks import HOST_VARIABLE
from paceline.errors import StepError
from paceline.outer import other_hosts
from paceline.testing import run_ranks


def enter_host(rank: int, ranks_per_host: int = 2) -> int:
    """Have this rank take part of the ranks for those of another host; returns its host."""
    os.environ[HOST_VARIABLE] = f"host {rank // ranks_per_host}"
    torch.set_num_threads(1)
    return rank // ranks_per_host


def train(outer: OuterLoop, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(12):
        optimizer.zero_grad()
        (ddp(torch.randn(4, 8)) - 1).square().mean().backward()
        optimizer.step()
        outer.step()


def values(net: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]


def train_in_two_phases(rank: int, once_per_host: bool, by_group: bool) -> Any:
    host = enter_host(rank)
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    ddp = DistributedDataParallel(net)
    torch.manual_seed(rank)
    inner = distributed.new_subgroups(2)[0] if by_group else "host"
    optimizer: torch.optim.Optimizer | None = None
    phases = []
    for _ in range(2):
        outer = OuterLoop(ddp, period=4, inner=inner)
        make = HostOptimizer if once_per_host else lambda ddp, kind, lr: kind(ddp.parameters(), lr=lr)
        optimizer = optimizer or make(ddp, torch.optim.SGD, lr=0.05)
        assert outer.hosts == ([1 - host] if rank % 2 == 0 else [])
        train(outer, ddp, optimizer)
        apart = values(net)
        outer.finish()
        phases.append((apart, values(net)))
    assert ddp.process_group.size() == 2
    return phases


@pytest.mark.parametrize(("once_per_host", "by_group"), [(False, False), (True, False), (True, True)])
def test_a_second_loop_on_a_wrapper_exchanges_as_the_first_one_did(
    once_per_host: bool, by_group: bool
) -> None:
    ranks = run_ranks(train_in_two_phases, 4, args=(once_per_host, by_group))
    for phase in range(2):
        for apart, after in (rank[phase] for rank in ranks[1:]):
            assert all(map(torch.equal, after, ranks[0][phase][1]))
            assert not torch.equal(apart[0], after[0])
        assert not torch.equal(ranks[0][phase][0][0], ranks[2][phase][0][0]), "hosts train apart"


def leave_and_come_back(rank: int) -> str:
    enter_host(rank, 1)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    OuterLoop(ddp, period=4).close()
    with torch.no_grad():
        ddp.module.get_parameter("weight").add_(rank)
    with pytest.raises(RuntimeError) as raised:
        OuterLoop(ddp, period=4)
    return str(raised.value)


def test_a_second_loop_of_hosts_that_have_become_different_is_refused() -> None:
    assert all("their values differ" in words for words in run_ranks(leave_and_come_back, 2))


def fail_on_the_speaker(rank: int, when: str) -> str:
    enter_host(rank)
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    outer = OuterLoop(ddp, period=4, grace=1.0)
    if rank == 2:
        assert outer._exchange is not None
        outer._exchange.failed(ZeroDivisionError("on purpose"))
    began = time.monotonic()
    if rank < 2:
        outer.close()
        return ""
    with pytest.raises(StepError) as raised:
        getattr(outer, when)()
    outer.close()
    assert time.monotonic() - began < 20.0
    return str(raised.value)


@pytest.mark.parametrize("when", ["step", "finish"])
def test_a_failed_exchange_is_raised_on_every_rank_of_the_host(when: str) -> None:
    [_, _, speaker, other] = run_ranks(fail_on_the_speaker, 4, args=(when,))
    assert isinstance(speaker, str)
    assert isinstance(other, str)
    assert "ZeroDivisionError('on purpose')" in speaker
    assert "has failed on rank 0" in other


def wait_for_a_host_that_hangs(rank: int, told: Path) -> list[str]:
    enter_host(rank, 1)
    outer = OuterLoop(DistributedDataParallel(nn.Linear(8, 8)), period=4, grace=0.5)
    said: list[str] = []

    def note(message: Warning | str, *_: Any) -> None:
        said.append(str(message))
        if len(said) == 2:
            told.touch()

    until = time.monotonic() + 20.0
    while rank == 1 and not told.exists() and time.monotonic() < until:
        time.sleep(0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        outer.finish()
    return said


def test_finish_says_for_which_hosts_it_waits(tmp_path: Path) -> None:
    said, _ = run_ranks(wait_for_a_host_that_hangs, 2, args=(tmp_path / "told",))
    assert len(said) >= 2
    for words in said[:2]:
        assert words == (
            "host 0 waits in finish() for hosts [1], which have not finished "
            "(host 1: 0 rounds, here: 0 rounds)"
        )


def finish_when_those_it_has_joined_have_gone(rank: int) -> str:
    enter_host(rank, 1)
    outer = OuterLoop(DistributedDataParallel(nn.Linear(8, 8)), period=4, grace=0.5)
    if rank == 0:
        outer.close()
    distributed.barrier()
    if outer._exchange is None or rank == 0:
        return ""
    outer._exchange.rounds.is_current = False  # as a host is that joins
    with pytest.warns(UserWarning, match="goes on from its own") as told:
        outer.finish()
    return told[0].filename


def test_finish_tells_a_host_that_those_it_has_joined_have_gone() -> None:
    assert run_ranks(finish_when_those_it_has_joined_have_gone, 2) == ["", __file__]


class State(dict[str, Any]):
    """A state that a weak reference can follow."""


def load_on_the_other_rank(rank: int) -> None:
    enter_host(rank)
    outer = OuterLoop(DistributedDataParallel(nn.Linear(8, 8)), period=4)
    if rank % 2 == 1:
        state = State(fragments=[])
        known = weakref.ref(state)
        outer.load_state_dict(state)
        del state
        gc.collect()
        assert known() is None
    outer.close()


def test_a_rank_that_talks_to_no_host_keeps_no_copy_of_a_state() -> None:
    run_ranks(load_on_the_other_rank, 4)


def finish_with_buffers(rank: int) -> list[Tensor]:
    other_hosts._MIN_QUEUED_BYTES = 1 << 20  # less than the buffers
    enter_host(rank, 1)
    net = nn.Linear(2, 2)
    net.register_buffer("cache", torch.zeros(4_000_000))
    ddp = DistributedDataParallel(net, broadcast_buffers=False)
    outer = OuterLoop(ddp, grace=2.0)
    net.get_buffer("cache").fill_(rank + 1.0)
    outer.finish()
    return values(net)


def test_module_buffers_that_are_larger_than_the_parameters_have_room_on_their_way() -> None:
    first, second = run_ranks(finish_with_buffers, 2)
    assert all(map(torch.equal, first, second))
