"""Messages of an outer loop that are lost with a connection, and ranks that come late to the end."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from outer_training import batch, equal, make_net, note_members, plain, rank_of, train_step, values
from torch import nn

from paceline import DistributedDataParallel, OuterLoop
from paceline.comm.host_links import HostLinks
from paceline.hooks.compressed import compressor_of, int8
from paceline.outer.fragment import FlatParameters, Fragment, OuterOptimizer
from paceline.outer.host_exchange import HostExchange
from paceline.outer.rounds import Rounds
from paceline.outer.schedule import Schedule
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts

GRACE = 2.0
SECONDS = 20.0
TOKEN = "known"

Start = Callable[..., HostExchange]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts hosts of one loop in this process."""
    made: list[HostExchange] = []

    def start_one(
        number: int, places: dict[int, Any], *, life: str = "first", is_current: bool = True
    ) -> HostExchange:
        exchange = of_one_parameter()
        made.append(exchange)
        rounds = Rounds(
            number,
            [*places],
            fragments=1,
            grace=GRACE,
            now=time.monotonic(),
            life=life,
            is_current=is_current,
        )
        exchange.start(rounds, places, token=TOKEN, may_join=number == 0)
        return exchange

    yield start_one
    for each in made:
        each._links.close()


def of_one_parameter() -> HostExchange:
    links = HostLinks(["127.0.0.1"], max_queued_bytes=1 << 20, silent_seconds=4 * GRACE)
    flat = FlatParameters([nn.Parameter(torch.ones(1))])
    fragment = Fragment(flat, compressor_of(int8()), OuterOptimizer(1.0, 0.0))
    return HostExchange([fragment], Schedule(period=2, fragments=1, overlap=0), links, "same")


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)


def start_two(start: Start) -> tuple[HostExchange, HostExchange]:
    first = start(0, {})
    second = start(1, {0: first._links.own_place})
    until(lambda: first._links.linked == [1] and second._links.linked == [0])
    for each in (first, second):
        each.finish()
    until(
        lambda: all(each.wait_for(lambda rounds, now: rounds.can_end(now), 0.1) for each in (first, second))
    )
    return first, second


def lose_connection(one: HostExchange, other: HostExchange) -> None:
    for each, host in ((one, other.rounds.host), (other, one.rounds.host)):
        with contextlib.suppress(KeyError, OSError):
            each._links._connections[host].socket.shutdown(socket.SHUT_RDWR)
    until(lambda: other.rounds.host not in one._links.linked)


def test_module_buffers_come_although_their_connection_was_lost_when_they_were_sent(start: Start) -> None:
    first, second = start_two(start)
    lose_connection(first, second)
    shared: list[bool] = []
    sending = threading.Thread(target=lambda: shared.append(first.share_buffers(b"of host 0", SECONDS)))
    sending.start()
    assert second.share_buffers(b"own", SECONDS)
    assert second.buffers == b"of host 0"
    sending.join()
    assert shared == [True], "the first host knows that they have come, and may leave"


def test_a_host_hears_where_another_one_is_now_that_joined_again_meanwhile(start: Start) -> None:
    first = start(0, {})
    second = start(1, {0: first._links.own_place})
    third = start(2, {0: first._links.own_place, 1: second._links.own_place})
    until(lambda: all(len(each._links.linked) == 2 for each in (first, second, third)))
    own_retry = third._links._retry
    third._links._retry = lambda host: third._links._retry_at.update({host: time.monotonic() + 1.0})  # type: ignore[method-assign]
    lose_connection(first, third)
    second._links.abandon()
    until(lambda: not first._links.linked and not third._links.linked)
    again = start(1, {0: first._links.own_place}, life="second", is_current=False)
    asked = {"fingerprint": "same", "place": again._links.own_place, "again": 1, "token": TOKEN}
    assert first.greeted(asked)["number"] == 1
    third._links._retry = own_retry  # type: ignore[method-assign]
    until(lambda: third._links.linked == [0, 1])


def come_late_to_the_end(rank: int, hosts: Hosts) -> Any:
    """A rank of host 1 comes to ``finish`` later than the grace period after the others."""
    with rank_of(hosts, rank) as generator:
        net = make_net()
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=4, grace=1.0)
        optimizer = plain(ddp)
        members = note_members(outer)
        for _ in range(8):
            train_step(ddp, optimizer, *batch(generator))
            outer.step()
        if rank == 3:
            time.sleep(3.0)
        outer.finish()
        return members, values(net)


def test_last_changes_count_of_a_host_whose_ranks_come_to_the_end_one_by_one() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(come_late_to_the_end, 4, args=(hosts,), backend=None)
    assert ranks[0][0][-4:] == ranks[2][0][-4:] == [[0, 1]] * 4
    assert all(equal(rank[1], ranks[0][1]) for rank in ranks)
