"""What a host keeps for its training, while training does not step."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from paceline.comm.host_links import HostLinks
from paceline.hooks.compressed import compressor_of
from paceline.hooks.compressors import Cast
from paceline.outer.fragment import FlatParameters, Fragment, OuterOptimizer
from paceline.outer.host_exchange import HostExchange
from paceline.outer.round_parts import DecidedRound, digest_of
from paceline.outer.rounds import Rounds
from paceline.outer.schedule import Schedule

PERIOD, OVERLAP, FRAGMENTS = 8, 3, 2


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)) for _ in range(FRAGMENTS)]


@pytest.fixture
def exchange(parameters: list[nn.Parameter]) -> Iterator[HostExchange]:
    """A host that has not connected to the others, and waits for none."""
    links = HostLinks(["127.0.0.1"], max_queued_bytes=1 << 20, silent_seconds=60.0)
    fragments = [
        Fragment(FlatParameters([each]), compressor_of(Cast(torch.float32)), OuterOptimizer(1.0, 0.0))
        for each in parameters
    ]
    made = HostExchange(fragments, Schedule(PERIOD, FRAGMENTS, OVERLAP), links, "same")
    made.rounds = Rounds(0, [], fragments=FRAGMENTS, grace=60.0, now=time.monotonic(), is_current=False)
    yield made
    links.close()


def test_a_host_is_told_once_that_its_changes_come_too_late(exchange: HostExchange) -> None:
    exchange.rounds.passed_over.extend(range(FRAGMENTS + 1))
    exchange.after_step()  # they may have been under way while it was stopped
    exchange.rounds.passed_over.append(FRAGMENTS + 1)
    with pytest.warns(UserWarning, match=r"do not count.*here: host 0, rounds: \[0, 1, 2, 3\]"):
        exchange.after_step()
    exchange.after_step()


def test_a_host_is_told_that_those_it_has_joined_have_gone(exchange: HostExchange) -> None:
    began = time.monotonic()
    exchange.rounds.tick(began)
    exchange.rounds._ticked = began + 61  # it was not stopped
    exchange.rounds.tick(began + 61)
    with pytest.warns(UserWarning, match=r"have gone before they sent their state.*here: host 0"):
        exchange.after_step()
    exchange.after_step()


def decide(exchange: HostExchange, first: int, last: int) -> None:
    """Other hosts decide rounds, in each of which parameters move by 1/8."""
    change = torch.full((3,), -0.125).numpy().tobytes()
    for number in range(first, last):
        exchange.rounds.ready.append(DecidedRound(number, {1: change}, {1: digest_of(change)}))
        exchange.tick()


def use_all(exchange: HostExchange, parameters: list[nn.Parameter]) -> None:
    for _ in range(PERIOD):
        for fragment, move in exchange.after_step().items():
            with torch.no_grad():
                parameters[fragment].add_(move.by)
            exchange.used(fragment)


def test_what_comes_while_training_does_not_step_takes_bounded_memory_and_is_all_used(
    exchange: HostExchange, parameters: list[nn.Parameter]
) -> None:
    decide(exchange, 0, 100)
    assert len(exchange.moves._waiting) <= 3 * FRAGMENTS
    use_all(exchange, parameters)
    assert exchange.moves._waiting == []
    for each in parameters:
        torch.testing.assert_close(each.detach(), torch.full((3,), 1 + 50 / 8), rtol=0, atol=0)


def test_what_a_lost_step_has_begun_to_use_is_not_made_one_with_what_came_since(
    exchange: HostExchange, parameters: list[nn.Parameter]
) -> None:
    decide(exchange, 0, 20)
    due = exchange.after_step()[0]
    decide(exchange, 20, 40)
    assert all(each in exchange.moves._waiting for each in exchange.moves._due)
    with torch.no_grad():
        parameters[0].add_(due.by)
    exchange.used(0)
    use_all(exchange, parameters)
    torch.testing.assert_close(parameters[0].detach(), torch.full((3,), 1 + 20 / 8), rtol=0, atol=0)
