"""Hosts that meet, under attack: other models, other states, ends at odd moments."""

import contextlib
import gc
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher_runs import free_port
from torch import Tensor, distributed, nn

from paceline import DistributedDataParallel, OuterLoop
from paceline.comm.shm.local_ranks import HOST_VARIABLE
from paceline.errors import MismatchError, OptionError, StepError
from paceline.outer import host_meeting, other_hosts
from paceline.testing import run_ranks

SECONDS = 20.0


@contextlib.contextmanager
def job(host: int) -> Iterator[None]:
    """A process group of this process alone, as a job on a host of its own has it."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", HOST_VARIABLE: f"host {host}"}
    store: Any = distributed
    distributed.init_process_group("gloo", store=store.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def wait_for_listener(port: int) -> None:
    """Wait until somebody listens; the first one who does is host 0."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)


def meeting(
    host: int, port: int, net: nn.Module, **options: Any
) -> tuple[OuterLoop, DistributedDataParallel]:
    """An outer loop that has met the other host; host 0 listens."""
    if host == 1:
        wait_for_listener(port)
    ddp = DistributedDataParallel(net)
    outer = OuterLoop(ddp, **{"meet": f"127.0.0.1:{port}", "grace": 2.0, "period": 4, **options})
    until = time.monotonic() + SECONDS
    while not outer.hosts or (outer._exchange and not outer._exchange.rounds.is_current):
        assert time.monotonic() < until, "hosts do not meet"
        time.sleep(0.01)
    return outer, ddp


def wait_for(file: Path) -> None:
    until = time.monotonic() + SECONDS
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.01)


def train(outer: OuterLoop, ddp: DistributedDataParallel, steps: int, *, lr: float = 0.05) -> None:
    optimizer = torch.optim.SGD([each for each in ddp.parameters() if each.requires_grad], lr=lr)
    for _ in range(steps):
        outer.step()
        optimizer.zero_grad()
        (ddp(torch.randn(4, 8)) - 1).square().mean().backward()
        optimizer.step()
        time.sleep(0.005)


def values(net: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]


def end_late(host: int, port: int) -> list[Tensor]:
    """One host is late when the buffers are to be shared: the other one has sent them, and has left."""
    with job(host):
        torch.manual_seed(host)
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        outer, ddp = meeting(host, port, net)
        train(outer, ddp, 20)
        if host == 1:
            share = outer._share_buffers

            def share_late() -> None:
                time.sleep(1.0)
                share()

            outer._share_buffers = share_late  # type: ignore[method-assign]
        outer.finish()
        return values(net)


def test_a_late_host_ends_with_the_buffers_of_the_one_that_has_left() -> None:
    first, second = run_ranks(end_late, 2, args=(free_port(),), backend=None)
    assert all(map(torch.equal, first, second))


def start_with(host: int, port: int, value: float) -> list[Tensor]:
    with job(host):
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        if host == 1:
            net.weight.data.fill_(value)
        outer, ddp = meeting(host, port, net)
        train(outer, ddp, 20, lr=0.0)
        outer.finish()
        return values(net)


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_a_host_that_joins_takes_the_parameters_of_the_others_whatever_its_own_are(value: float) -> None:
    first, second = run_ranks(start_with, 2, args=(free_port(), value), backend=None)
    torch.manual_seed(0)
    expected = values(nn.Linear(8, 8))
    assert all(map(torch.equal, first, second))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(first, expected, strict=True))


def join_with_bfloat16(host: int, port: int) -> list[Tensor]:
    other_hosts._MIN_QUEUED_BYTES = 0  # as if the model were large
    with job(host):
        torch.manual_seed(host)
        net = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 1)).bfloat16()
        outer, _ = meeting(host, port, net)
        outer.finish()
        return values(net)


def test_the_state_of_a_model_in_bfloat16_has_room_on_its_way() -> None:
    first, second = run_ranks(join_with_bfloat16, 2, args=(free_port(),), backend=None)
    assert all(map(torch.equal, first, second))


def be_refused(host: int, port: int, what: str, folder: Path) -> str:
    with job(host):
        torch.manual_seed(host if what == "frozen" else 0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        net[0].requires_grad_(requires_grad=what != "frozen")
        if what == "type" and host == 1:
            net.double()
        if host == 0:
            with OuterLoop(DistributedDataParallel(net), meet=f"127.0.0.1:{port}", grace=2.0):
                wait_for(folder / "refused")
            return ""
        wait_for_listener(port)
        with pytest.raises(MismatchError, match="this host has another outer loop") as refused:
            OuterLoop(DistributedDataParallel(net), meet=f"127.0.0.1:{port}", grace=2.0)
        (folder / "refused").touch()
        return str(refused.value)


@pytest.mark.parametrize("what", ["frozen", "type"])
def test_a_host_with_other_frozen_values_or_types_is_refused(what: str, tmp_path: Path) -> None:
    [_, words] = run_ranks(be_refused, 2, args=(free_port(), what, tmp_path), backend=None)
    assert isinstance(words, str)
    assert "frozen parameters" in words


def use_alone(_: int, port: int) -> None:
    meet = f"127.0.0.1:{port}"
    with job(0):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        net[0].requires_grad_(requires_grad=False)
        ddp = DistributedDataParallel(net)
        with pytest.raises(OptionError, match="leave inner out"):
            OuterLoop(ddp, meet=meet, inner=distributed.group.WORLD)
        outer = OuterLoop(ddp, meet=meet, period=4)
        train(outer, ddp, 8)
        state = outer.state_dict()
        net[0].requires_grad_(requires_grad=True)
        with pytest.raises(StepError, match=r"parameters are trained that hosts do not exchange.*0\.weight"):
            train(outer, ddp, 4)
        outer.close()
        with pytest.raises(StepError, match="it was closed"):
            outer.step()
        longer = OuterLoop(ddp, meet=meet, period=64, fragments=2)
        with pytest.raises(OptionError, match=r"other parameters or fragments|another schedule"):
            longer.load_state_dict(state)
        longer.finish()
        with pytest.raises(StepError, match="it has finished"):
            longer.step()
        longer.finish()


def test_wrong_calls_are_told() -> None:
    run_ranks(use_alone, 1, args=(free_port(),), backend=None)


def resume_with_another_period(_: int, port: int) -> None:
    with job(0):
        ddp = DistributedDataParallel(nn.Linear(8, 8))
        outer = OuterLoop(ddp, meet=f"127.0.0.1:{port}", period=4)
        train(outer, ddp, 8)
        state = outer.state_dict()
        outer.close()
        with (
            OuterLoop(ddp, meet=f"127.0.0.1:{port}", period=64) as other,
            pytest.raises(OptionError, match="schedule"),
        ):
            other.load_state_dict(state)


def test_a_state_of_another_period_is_refused() -> None:
    run_ranks(resume_with_another_period, 1, args=(free_port(),), backend=None)


def interrupt_finish(_: int, port: int) -> None:
    with job(0):
        outer = OuterLoop(DistributedDataParallel(nn.Linear(8, 8)), meet=f"127.0.0.1:{port}")
        exchange = outer._exchange
        assert exchange is not None

        def interrupt() -> None:
            raise KeyboardInterrupt

        exchange.finish = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            outer.finish()
        assert not exchange._links._thread.is_alive()
        with pytest.raises(StepError, match="was interrupted"):
            outer.finish()


def test_a_finish_that_was_interrupted_is_not_taken_for_one_that_was_not() -> None:
    run_ranks(interrupt_finish, 1, args=(free_port(),), backend=None)


def listen_late(_: int, port: int) -> None:
    """What is left of a killed job holds the port for a while, and answers nobody."""
    host_meeting._ANSWER_SECONDS = 0.3
    left = socket.create_server(("127.0.0.1", port))
    threading.Timer(1.5, left.close).start()
    with job(0):
        outer = OuterLoop(DistributedDataParallel(nn.Linear(8, 8)), meet=f"127.0.0.1:{port}")
        assert outer._number == 0
        outer.finish()


def test_a_host_listens_as_soon_as_its_port_is_free() -> None:
    run_ranks(listen_late, 1, args=(free_port(),), backend=None)


def make_two_loops(_: int, port: int) -> None:
    with job(0):
        first, second = (DistributedDataParallel(nn.Linear(8, 8)) for _ in range(2))
        outer = OuterLoop(first, meet=f"127.0.0.1:{port}")
        with pytest.raises(OptionError, match=rf"another outer loop of this process meets there.*{port}"):
            OuterLoop(second, meet=f"127.0.0.1:{port}")
        outer.finish()
        OuterLoop(second, meet=f"127.0.0.1:{port}").finish()


def test_two_modules_that_would_meet_at_one_address_are_refused() -> None:
    run_ranks(make_two_loops, 1, args=(free_port(),), backend=None)


def lose_a_loop(_: int, port: int) -> None:
    meet = f"127.0.0.1:{port}"
    with job(0):
        ddp = DistributedDataParallel(nn.Linear(8, 8))
        outer = OuterLoop(ddp, meet=meet)
        assert outer._exchange is not None
        thread = outer._exchange._links._thread
        del outer  # such as after an error in training
        gc.collect()
        thread.join(SECONDS)
        assert not thread.is_alive()
        with OuterLoop(ddp, meet=meet) as another:
            assert another._number == 0


def test_a_loop_that_nothing_refers_to_leaves_its_place_to_another() -> None:
    run_ranks(lose_a_loop, 1, args=(free_port(),), backend=None)


def run_two_loops_at_one_address(host: int, port: int) -> Any:
    """The first host closes its first loop, and begins another; the second host stays."""
    with job(host):
        torch.manual_seed(host)
        outer, ddp = meeting(host, port, nn.Linear(8, 8), grace=0.5)
        if host == 1:
            train(outer, ddp, 400)
            assert outer._exchange is not None
            before = outer._exchange.rounds.decided
            train(outer, ddp, 100)
            decided = outer._exchange.rounds.decided - before
            seen = outer.hosts
            outer.close()
            return decided, seen
        train(outer, ddp, 20)
        outer.close()
        net = nn.Linear(8, 8)
        start = values(net)
        ddp = DistributedDataParallel(net)
        another = OuterLoop(ddp, meet=f"127.0.0.1:{port}", grace=0.5, period=4)
        train(another, ddp, 300, lr=0.0)
        seen = another.hosts
        another.close()
        return all(map(torch.equal, start, values(net))), seen


def test_a_host_of_an_earlier_loop_neither_takes_over_a_later_one_nor_waits_for_it() -> None:
    later, earlier = run_ranks(run_two_loops_at_one_address, 2, args=(free_port(),), backend=None)
    assert later == (True, [])
    decided, seen = earlier
    assert 45 <= decided <= 55, "two fragments every four steps"
    assert seen == []


def listen_again(rank: int, port: int, noted: Path) -> tuple[int, list[float]]:
    """The first host is lost without a goodbye, and its job is started again with other parameters."""
    with job(rank):
        torch.manual_seed(rank)
        outer, ddp = meeting(rank, port, nn.Linear(8, 8))
        train(outer, ddp, 12)
        assert outer._exchange is not None
        if rank == 0:
            wait_for(noted)
            outer._exchange._links.abandon()
            outer.close()
            torch.manual_seed(2)
            outer, ddp = meeting(0, port, nn.Linear(8, 8))
            until = time.monotonic() + SECONDS
            while outer._exchange is not None and outer._exchange.step < 12 and time.monotonic() < until:
                time.sleep(0.01)
            train(outer, ddp, 12)
        else:
            rounds = outer._exchange.rounds
            life = rounds.peers[0].life
            assert life
            noted.touch()
            until = time.monotonic() + SECONDS
            while rounds.peers[0].life == life and time.monotonic() < until:
                time.sleep(0.01)
            train(outer, ddp, 12)
        assert outer._exchange is not None
        steps = outer._exchange.step
        outer.finish()
        return steps, [*map(float, ddp.module.weight.flatten().tolist())]


def test_the_first_host_goes_on_with_the_others_when_its_job_is_started_again(tmp_path: Path) -> None:
    args = (free_port(), tmp_path / "noted")
    (first, ours), (second, theirs) = run_ranks(listen_again, args=args, backend=None)
    assert ours == theirs
    assert min(first, second) >= 24
