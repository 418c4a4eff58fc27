"""Hosts of an outer loop that are slow, stop, join late, are cut off, or are lost."""

import os
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from outer_training import WIDTH, batch, equal, make_net, note_members, plain, rank_of, train_step, values
from torch import distributed, nn

from paceline import DistributedDataParallel, OuterLoop
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts

SECONDS = 30.0


def train_over_a_slow_link(rank: int, hosts: Hosts) -> Any:
    """A change is on its way for 1.5 seconds, and a fragment is due every 0.3 seconds.

    A decision comes behind the next change. A step waits for it for 3.6 seconds, so the machine may be busy.
    """
    with rank_of(hosts, rank, world=2):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(1700, 1700) for _ in range(2)))
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=16, fragments=2, overlap=15, grace=1.3)
        exchange = outer._exchange
        assert exchange is not None
        members = note_members(outer)
        distributed.barrier()  # the wrapper has sent all parameters
        if rank == 0:
            hosts.limit("8mbit")
        under_way = 0
        began = time.monotonic()
        while len(members) < 3 and time.monotonic() - began < SECONDS:
            outer.step()
            under_way = max(under_way, sum(each.sent is not None for each in exchange._fragments))
            time.sleep(0.035)
        distributed.barrier()
        outer.close()
        return under_way, members


def test_changes_count_that_are_on_their_way_for_longer_than_grace_several_at_once() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(train_over_a_slow_link, 2, args=(hosts,), backend=None)
    for under_way, members in ranks:
        assert under_way == 2
        assert members[:3] == [[0, 1]] * 3


def is_long_back(outer: OuterLoop, members: list[list[int]], before: int) -> bool:
    """Whether a host that was away has counted a few times since, so that the other one knows, too."""
    exchange = outer._exchange
    has_finished = exchange is not None and any(each.has_finished for each in exchange.rounds.peers.values())
    return before > 0 and (has_finished or members[before:].count([0, 1]) >= 8)


def stop_a_host(rank: int, hosts: Hosts, stopped: int) -> Any:
    with rank_of(hosts, rank) as generator:
        net = make_net()
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=8, grace=1.0)
        optimizer = plain(ddp)
        members = note_members(outer)
        if rank // 2 == stopped:
            stop_for(5.0, after=1.0)
        longest, lone, before = 0.0, 0, 0
        began = start = time.monotonic()
        while not over(ddp, is_long_back(outer, members, before) or time.monotonic() - began > SECONDS):
            train_step(ddp, optimizer, *batch(generator))
            outer.step()
            longest, start = max(longest, time.monotonic() - start), time.monotonic()
            lone += bool(members) and not outer.hosts
            if (lone or longest > 4.5) and not before:
                before = len(members)
            time.sleep(0.01)
        is_back = before > 0 and [0, 1] in members[before:]
        outer.finish()
        return longest, lone, is_back, values(net)


def stop_for(seconds: float, *, after: float) -> None:
    command = f"sleep {after}; kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", command])


def over(ddp: nn.Module, says: bool) -> bool:
    """Whether the first rank of this host says that training is over."""
    flag = torch.tensor([float(says and ddp.process_group.rank() == 0)])
    distributed.all_reduce(flag, group=ddp.process_group)
    return bool(flag)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_host_stalls_nobody_and_is_back_in_step(stopped: int) -> None:
    with Hosts() as hosts:
        ranks = run_ranks(stop_a_host, 4, args=(hosts, stopped), backend=None)
    other = 2 * (1 - stopped)
    longest, lone, _, after = ranks[other]
    assert lone > 20, "it trained alone for a while"
    assert longest < 4.0, "and did not wait for the other host until it was back"
    assert ranks[0][2], "a round counted both again"
    assert ranks[2][2]
    assert all(equal(rank[3], after) for rank in ranks)


def cut_the_wire(rank: int, hosts: Hosts) -> Any:
    with rank_of(hosts, rank) as generator:
        net = make_net()
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=8, grace=1.0)
        optimizer = plain(ddp)
        members = note_members(outer)
        lone, before, is_cut = 0, 0, False
        began = time.monotonic()
        while not over(ddp, is_long_back(outer, members, before) or time.monotonic() - began > SECONDS):
            train_step(ddp, optimizer, *batch(generator))
            outer.step()
            lone += bool(members) and not outer.hosts
            if lone and not before:
                before = len(members)
            want = len(members) > 4 and lone <= 20
            if rank == 0 and want != is_cut:
                set_wire(hosts, "down" if want else "up")
                is_cut = want
            time.sleep(0.01)
        is_back = before > 0 and [0, 1] in members[before:]
        outer.finish()
        return lone, is_back, values(net)


def set_wire(hosts: Hosts, state: str) -> None:
    command = ["ip", "-n", hosts.names[0], "link", "set", "wire", state]
    subprocess.run(command, check=True, timeout=10)


def test_hosts_that_cannot_reach_each_other_go_on_and_end_with_one_model() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(cut_the_wire, 4, args=(hosts,), backend=None)
    for lone, is_back, _ in (ranks[0], ranks[2]):
        assert lone > 0
        assert is_back, "a round counted both again"
    assert all(equal(rank[2], ranks[0][2]) for rank in ranks)


def meet(rank: int, hosts: Hosts, folder: Path) -> Any:
    """Each host is a job of its own; the second comes when the first one has trained for a while."""
    host = rank // 2
    has_learned = folder / "has learned"
    began = time.monotonic()
    while host == 1 and not has_learned.exists() and time.monotonic() - began < SECONDS:
        time.sleep(0.01)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from paceline.comm.rendezvous import file_store_group
    from paceline.comm.shm.local_ranks import HOST_VARIABLE
    from paceline.testing.hosts import enter

    enter(hosts.names[host])
    os.environ[HOST_VARIABLE] = hosts.names[host]
    with file_store_group(folder / str(host), rank=rank % 2, world=2, backend="gloo"):
        torch.set_num_threads(1)
        torch.manual_seed(host)  # the latecomer's own start does not matter
        net = nn.Linear(WIDTH, 4)
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=8, grace=2.0, meet=f"{hosts.addresses[0]}:29777")
        optimizer = plain(ddp)
        generator = torch.Generator().manual_seed(rank)
        losses: list[float] = []
        steps_alone = 0  # the latecomer's, before it has the state
        members = note_members(outer)
        while not over(ddp, members.count([0, 1]) >= 8 or time.monotonic() - began > SECONDS):
            x = torch.randn(16, WIDTH, generator=generator)
            losses.append(train_step(ddp, optimizer, x, x[:, :4].argmax(1)))
            outer.step()
            if len(losses) == 100:
                has_learned.touch()
            if outer._exchange is not None and not outer._exchange.rounds.is_current:
                steps_alone = len(losses)
            time.sleep(0.01)
        outer.finish()
        return losses, steps_alone, members.count([0, 1]) >= 4, values(net)


def test_a_host_that_joins_late_takes_the_current_state(tmp_path: Path) -> None:
    with Hosts() as hosts:
        ranks = run_ranks(meet, 4, args=(hosts, tmp_path), backend=None)
    (first, _, counts, after), (late, steps_alone, counts_too, _) = ranks[0], ranks[2]
    assert counts
    assert counts_too
    assert all(equal(rank[3], after) for rank in ranks)
    taught = late[steps_alone + 2 :][:8]
    assert len(taught) == 8
    assert sum(taught) < 0.8 * sum(first[:8]), "it goes on from what the other host has learned"


def lose_a_host(rank: int, hosts: Hosts) -> Any:
    with rank_of(hosts, rank) as generator:
        net = nn.Linear(WIDTH, 4)
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=4, grace=1.0)
        optimizer = plain(ddp)
        members = note_members(outer)
        steps = 0
        began = time.monotonic()
        while not over(ddp, members.count([0]) > 5 or time.monotonic() - began > SECONDS):
            if rank >= 2 and steps == 10:
                if outer._exchange is not None:
                    outer._exchange._links.close()  # without a goodbye, as when its processes are killed
                distributed.barrier()
                return None
            x = torch.randn(8, WIDTH, generator=generator)
            train_step(ddp, optimizer, x, x[:, :4].argmax(1))
            outer.step()
            steps += 1
            time.sleep(0.01)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            outer.finish()
        distributed.barrier()
        return members, [str(each.message) for each in told]


def test_the_others_end_their_training_when_a_host_is_lost_and_say_so() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(lose_a_host, 4, args=(hosts,), backend=None)
    members, told = ranks[0]
    assert members.count([0]) > 5
    assert any("hosts are away at the end of training" in each and "hosts: [1]" in each for each in told)
