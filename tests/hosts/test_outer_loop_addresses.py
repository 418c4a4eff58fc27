"""Hosts whose own name leads to the loopback interface, as on Debian: how they find each other."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from paceline import DistributedDataParallel, OuterLoop
from paceline.comm.shm.local_ranks import HOST_VARIABLE
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts, enter

SECONDS = 15.0


def forget_the_interface() -> None:
    """Have this process know of its addresses no more than its own name."""
    del os.environ["GLOO_SOCKET_IFNAME"]
    socket.gethostname = lambda: "localhost"


def has_come(outer: OuterLoop, hosts: list[int]) -> bool:
    until = time.monotonic() + SECONDS
    while outer.hosts != hosts and time.monotonic() < until:
        time.sleep(0.01)
    return outer.hosts == hosts


def meet_two_others(rank: int, hosts: Hosts, folder: Path) -> bool:
    enter(hosts.names[rank])
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", HOST_VARIABLE: hosts.names[rank]}
    store: Any = distributed
    distributed.init_process_group("gloo", store=store.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    forget_the_interface()
    outer = OuterLoop(ddp, meet=f"{hosts.addresses[0]}:29777", grace=2.0)
    found = has_come(outer, [host for host in range(3) if host != outer._number])
    (folder / str(rank)).touch()
    until = time.monotonic() + SECONDS
    while len([*folder.iterdir()]) < 3 and time.monotonic() < until:  # the others may still wait
        time.sleep(0.01)
    outer.close()
    return found


def test_three_hosts_that_meet_are_all_connected(tmp_path: Path) -> None:
    with Hosts(count=3) as hosts:
        assert run_ranks(meet_two_others, 3, args=(hosts, tmp_path), backend=None) == [True] * 3


def break_the_connection(rank: int, hosts: Hosts) -> bool:
    with hosts.group(rank, world=2, host=rank):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(8, 8))
        os.environ["MASTER_ADDR"] = hosts.addresses[0]
        forget_the_interface()
        outer = OuterLoop(ddp, grace=0.5)
        exchange = outer._exchange
        assert exchange is not None
        assert has_come(outer, [1 - rank])
        time.sleep(0.5)  # the hosts have told each other where they are
        links = exchange._links
        first = links._connections[1 - rank]
        distributed.barrier()
        if rank == 0:
            first.socket.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + SECONDS
        while links._connections.get(1 - rank) in {None, first} and time.monotonic() < until:
            time.sleep(0.01)
        is_back = has_come(outer, [1 - rank])
        distributed.barrier()
        outer.close()
        return is_back


def test_hosts_connect_again_after_their_connection_broke() -> None:
    with Hosts() as hosts:
        assert run_ranks(break_the_connection, 2, args=(hosts,), backend=None) == [True, True]
