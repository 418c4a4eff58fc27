"""An outer loop under attack: strangers at its port, and calls in the wrong order."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from paceline import DistributedDataParallel, OuterLoop, ShardedOptimizer
from paceline.comm.host_connection import HEAD, MAGIC
from paceline.comm.host_links import HostLinks
from paceline.errors import StepError
from paceline.hooks.compressed import compressor_of, int8
from paceline.hooks.compressors import Cast
from paceline.outer.fragment import FlatParameters, Fragment, OuterOptimizer
from paceline.outer.host_exchange import HostExchange
from paceline.outer.rounds import Rounds
from paceline.outer.schedule import Schedule
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts

TOKEN = "known"
SECONDS = 10.0


@pytest.fixture
def exchange() -> Iterator[HostExchange]:
    links = HostLinks(["127.0.0.1"], max_queued_bytes=1 << 20, silent_seconds=60.0)
    made = HostExchange([], Schedule(period=1, fragments=1, overlap=0), links, "same")
    rounds = Rounds(0, [], fragments=1, grace=60.0, now=time.monotonic())
    made.start(rounds, {}, token=TOKEN, may_join=True)
    yield made
    links.close()


@pytest.fixture
def exchange_of_one() -> Iterator[HostExchange]:
    """A host with one parameter, and no others."""
    links = HostLinks(["127.0.0.1"], max_queued_bytes=1 << 20, silent_seconds=60.0)
    fragment = Fragment(
        FlatParameters([nn.Parameter(torch.ones(1))]), compressor_of(int8()), OuterOptimizer(1.0, 0.0)
    )
    made = HostExchange([fragment], Schedule(period=2, fragments=1, overlap=0), links, "same")
    made.start(Rounds(0, [], fragments=1, grace=60.0, now=time.monotonic()), {}, token=TOKEN)
    yield made
    links.close()


def frame(text: bytes, payload_bytes: int = 0) -> bytes:
    return HEAD.pack(MAGIC, len(text), payload_bytes) + text


def hello(host: Any, token: str = TOKEN) -> bytes:
    return frame(json.dumps({"kind": "hello", "token": token, "host": host}).encode())


def asks_to_join(**fields: Any) -> bytes:
    asked = {"fingerprint": "same", "place": [["127.0.0.1"], 1], "again": None}
    said = {"kind": "hello", "token": TOKEN, "host": None, **asked, **fields}
    return frame(json.dumps(said).encode())


def dial(exchange: HostExchange) -> socket.socket:
    return socket.create_connection(("127.0.0.1", exchange._links.port), timeout=SECONDS)


def is_hung_up(stranger: socket.socket) -> bool:
    try:
        return not stranger.recv(1)
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
        frame(b"[1]"),
        frame(b"[" * 900_000),
        frame(b"\xff\xfe"),
        frame(b"{}", payload_bytes=1 << 60),
        hello([1]),
        hello(float("inf")),
        hello(-1),
        hello(0),  # the number of the host that it talks to
        hello(None),
        hello(1, token="of another loop"),
        asks_to_join(again=[1]),
        asks_to_join(place=5),
        asks_to_join(place=[["127.0.0.1", 2], 1]),
        asks_to_join(place=[["127.0.0.1"], 1 << 16]),
    ],
)
def test_a_stranger_is_hung_up_on_and_others_can_still_connect(exchange: HostExchange, sent: bytes) -> None:
    with dial(exchange) as stranger:
        stranger.sendall(sent)
        assert is_hung_up(stranger)
    with dial(exchange) as host:
        host.sendall(hello(1))
        assert exchange.wait_for(lambda rounds, _: 1 in rounds.peers, SECONDS)


@pytest.mark.parametrize(
    "said", [{"kind": "unknown"}, {}, {"kind": "change", "round": "a"}, {"kind": "skip", "round": 1.5}]
)
def test_a_host_that_says_what_no_host_says_is_hung_up_on(exchange: HostExchange, said: Any) -> None:
    with dial(exchange) as stranger:
        stranger.sendall(hello(5) + frame(json.dumps(said).encode()))
        while stranger.recv(1 << 16):  # what hosts tell each other first
            pass
    assert exchange.wait_for(lambda *_: True, SECONDS), "training has not failed"


def test_a_place_that_is_none_is_not_connected_to(exchange: HostExchange) -> None:
    with dial(exchange) as host:
        host.sendall(hello(1) + frame(json.dumps({"kind": "newcomer", "number": 3, "place": 5}).encode()))
        assert exchange.wait_for(lambda rounds, _: 1 in rounds.peers, SECONDS)
        time.sleep(0.2)
    assert 3 not in exchange._links.places


def goodbye(exchange: HostExchange, host: int) -> None:
    """A host comes, and leaves for good."""
    with dial(exchange) as leaving:
        leaving.sendall(hello(host))
        assert exchange.wait_for(lambda rounds, _: host in rounds.peers, SECONDS)
        leaving.sendall(frame(json.dumps({"kind": "goodbye"}).encode()))
        assert exchange.wait_for(lambda rounds, _: host not in rounds.peers, SECONDS)


def answer(exchange: HostExchange, **fields: Any) -> Any:
    """What somebody is told who asks to join."""
    with dial(exchange) as newcomer:
        newcomer.sendall(asks_to_join(**fields))
        head = newcomer.recv(HEAD.size, socket.MSG_WAITALL)
        return json.loads(newcomer.recv(HEAD.unpack(head)[1], socket.MSG_WAITALL))


def test_after_a_goodbye_a_place_is_forgotten_and_the_number_is_not_given_again(
    exchange: HostExchange,
) -> None:
    exchange._links.add(3, (["127.0.0.1"], 1))
    goodbye(exchange, 3)
    assert 3 not in exchange._links.places
    assert answer(exchange)["number"] == 4
    assert answer(exchange)["number"] == 5


def test_a_host_keeps_its_number_in_its_own_loop_only(exchange: HostExchange) -> None:
    assert answer(exchange, again=3)["number"] == 3
    joined = answer(exchange, again=7, token="of another loop")
    assert joined["number"] == 4
    assert joined["token"] == TOKEN


def test_the_end_is_not_judged_by_what_was_heard_before_a_pause(exchange: HostExchange) -> None:
    with dial(exchange) as host:
        host.sendall(hello(1))
        assert exchange.wait_for(lambda rounds, _: 1 in rounds.peers, SECONDS)
        exchange.finish()
        with exchange._changed:
            rounds = exchange.rounds
            rounds.peers[1].is_current = True
            for clock in (rounds, rounds.peers[1]):
                name = "_ticked" if clock is rounds else "heard"
                setattr(clock, name, time.monotonic() - 2 * rounds.grace)
            assert not exchange.wait_for(lambda rounds, now: rounds.all_finished(now), 0.0)


def test_a_move_stays_due_until_it_was_used(exchange_of_one: HostExchange) -> None:
    """As after a step that was lost with a rank."""
    assert [*exchange_of_one.after_step(), *exchange_of_one.after_step()] == []
    assert exchange_of_one.wait_for(lambda rounds, _: rounds.decided == 1, SECONDS)
    first = exchange_of_one.after_step()[0]
    [again] = exchange_of_one.moves._waiting
    assert again is first
    exchange_of_one.used(0)
    assert exchange_of_one.moves._waiting == []


def test_training_raises_what_has_ended_the_thread_of_the_links(
    exchange: HostExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Mapping[str, Any]) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(exchange, "greeted", fail)
    with dial(exchange) as newcomer:
        newcomer.sendall(hello(None))
        ended: threading.Thread = exchange._links._thread
        ended.join(SECONDS)
    with pytest.raises(StepError, match="on purpose"):
        exchange.wait_for(lambda *_: True, SECONDS)


def close_and_finish(rank: int, hosts: Hosts) -> bool:
    with hosts.group(rank, world=2, host=rank):
        outer = OuterLoop(DistributedDataParallel(nn.Linear(2, 2)), grace=1.0)
        outer.close()
        outer.finish()
        return True


def test_finish_returns_on_a_host_that_has_left_the_others() -> None:
    with Hosts() as hosts:
        assert run_ranks(close_and_finish, 2, args=(hosts,), backend=None) == [True, True]


class ParametersOfManyKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.short = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.long = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.shared = self.long

    def forward(self, x: Tensor) -> Tensor:
        sums = [self.short.float().sum(), self.shared.square().sum(), self.empty.sum(), self.frozen.sum()]
        return x * sum(sums, self.wave.abs().sum())


def train_many_kinds(rank: int, hosts: Hosts) -> list[Tensor]:
    with hosts.group(rank, world=2, host=rank):
        net = ParametersOfManyKinds()
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=4)
        optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            ddp(torch.tensor(1.0 + rank)).backward()
            optimizer.step()
            outer.step()
        outer.finish()
        return [parameter.detach() for parameter in net.parameters()]


def test_parameters_may_be_complex_short_long_empty_frozen_and_shared() -> None:
    with Hosts() as hosts:
        first, second = run_ranks(train_many_kinds, 2, args=(hosts,), backend=None)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[2], torch.ones(7, dtype=torch.float64)), "they were trained"


def use_a_move_of_many_kinds(rank: int, hosts: Hosts) -> tuple[list[Tensor], list[Tensor]]:
    with hosts.group(rank, world=2, host=rank):
        net = ParametersOfManyKinds()
        outer = OuterLoop(
            DistributedDataParallel(net),
            period=1,
            fragments=1,
            compressor=Cast(torch.float64),
            lr=1.0,
            momentum=0.0,
        )
        with torch.no_grad():
            for each in net.parameters():
                if each.requires_grad:
                    each.add_(1.0 + rank)
        before = [each.detach().clone() for each in net.parameters()]
        outer.step()
        assert outer._exchange is not None
        assert outer._exchange.wait_for(lambda rounds, _: rounds.decided == 1, SECONDS)
        outer.step()
        after = [each.detach().clone() for each in net.parameters()]
        outer.close()
        return before, after


def test_one_move_brings_parameters_of_many_kinds_to_the_mean_of_the_hosts() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(use_a_move_of_many_kinds, 2, args=(hosts,), backend=None)
    for first, second, *after in zip(ranks[0][0], ranks[1][0], ranks[0][1], ranks[1][1], strict=True):
        for each in after:
            torch.testing.assert_close(each, (first + second) / 2)
    assert not torch.equal(ranks[0][0][2], ranks[0][1][2]), "they were moved"


def train_uneven_with_shared_state(rank: int, hosts: Hosts) -> list[Tensor]:
    with hosts.group(rank, world=4, host=rank // 2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=4)
        optimizer = ShardedOptimizer(ddp, torch.optim.AdamW, lr=0.01)
        with Join([ddp, optimizer, outer]):
            for _ in range(6 + 5 * rank):
                optimizer.zero_grad()
                ddp(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                outer.step()
        outer.finish()
        return [value.detach() for value in net.state_dict().values()]


def test_ranks_with_a_sharded_optimizer_may_have_different_numbers_of_inputs() -> None:
    with Hosts() as hosts:
        first, *others = run_ranks(train_uneven_with_shared_state, 4, args=(hosts,), backend=None)
    for other in others:
        assert all(map(torch.equal, first, other))


def finish_with_large_buffers(rank: int, hosts: Hosts) -> float:
    with hosts.group(rank, world=2, host=rank):
        net = nn.Linear(2, 2)
        net.register_buffer("cache", torch.full((1_500_000,), float(rank)))
        outer = OuterLoop(DistributedDataParallel(net, broadcast_buffers=False), grace=2.0)
        net.get_buffer("cache").fill_(rank)
        outer.finish()
        return float(net.get_buffer("cache").sum())


def test_buffers_come_over_a_link_that_takes_longer_than_any_limit() -> None:
    with Hosts() as hosts:
        hosts.limit("8mbit")
        assert run_ranks(finish_with_large_buffers, 2, args=(hosts,), backend=None) == [0.0, 0.0]
