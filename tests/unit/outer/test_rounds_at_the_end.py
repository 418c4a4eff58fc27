"""The end of a training on several hosts: all end with one model, in which the last changes of all count."""

import pytest
from simulated_hosts import FRAGMENTS, GRACE, TICK, Network

from paceline.outer.round_parts import digest_of
from paceline.outer.rounds import Rounds


@pytest.mark.parametrize("grace", [1.0, 2.0])
@pytest.mark.parametrize("when", [0.1 * tick for tick in range(1, 10)])
def test_a_connection_may_be_lost(when: float, grace: float) -> None:
    network = Network(2, latency=grace / 10, grace=grace)
    network.run(5.35)
    network.finish()
    network.run(when)
    network.lose(0, 1)
    network.run(30)
    assert network.ended_alike()


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("take", [0.0, 0.5])
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_last_changes_count_of_a_host_that_has_sent_nothing_for_long(
    late: int, take: float, latency: float
) -> None:
    network = Network(2, latency=latency)
    network.run(5)
    network.hosts[late].pace = float("inf")
    network.run(3 * GRACE)
    network.finish(1 - late)
    network.run(1)
    network.hosts[late].last_changes_take = take
    network.finish(late)
    network.run(20)
    assert network.ended_alike()


@pytest.mark.parametrize("after", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("latency", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("slower", [0, 1])
def test_hosts_that_have_just_been_cut_off_from_each_other_end_with_one_model(
    after: float, latency: float, slower: int
) -> None:
    network = Network(2, latency=latency)
    network.run(5)
    network.cut_wire(0, 1)
    network.run(10)
    network.cut.clear()
    network.lose(0, 1)
    network.hosts[slower].pace = float("inf")
    network.run(after)
    network.finish()
    network.run(30)
    assert all(host.has_ended for host in network.hosts.values())
    assert network.hosts[0].contents == network.hosts[1].contents


def test_last_changes_count_if_the_host_with_the_most_steps_is_lost() -> None:
    network = Network(3)
    network.run(5)
    network.finish(1, 2)
    network.run(10)
    network.hosts[0].is_stopped = True
    network.run(30)
    one, other = network.hosts[1], network.hosts[2]
    assert one.has_ended
    assert other.has_ended
    assert one.contents == other.contents
    assert one.log[-FRAGMENTS:] == [[1, 2]] * FRAGMENTS


def test_a_host_that_joins_then_does_not_keep_the_others_from_ending_alike() -> None:
    network = Network(2)
    network.run(5)
    network.hosts[1].last_changes_take = 0.5
    network.finish()
    network.run(2 * TICK)
    network.add(2, [0, 1], is_current=False)
    for other in (0, 1):
        network.hosts[2].rounds.linked(other, network.now)
    network.run(30)
    one, other = network.hosts[0], network.hosts[1]
    assert one.has_ended
    assert other.has_ended
    assert one.contents == other.contents
    assert one.log[-FRAGMENTS:] == [[0, 1]] * FRAGMENTS


@pytest.mark.parametrize("when", [0.1 * tick for tick in range(9)])
def test_all_hosts_may_be_stopped(when: float) -> None:
    network = Network(2, latency=0.3)
    network.run(5)
    network.hosts[1].last_changes_take = 0.5
    network.finish()
    network.run(when)
    for host in network.hosts.values():
        host.is_stopped = True
    network.run(20)
    for host in network.hosts.values():
        host.is_stopped = False
    network.run(30)
    assert network.ended_alike()


def test_the_last_rounds_are_later_than_those_that_are_decided() -> None:
    rounds = Rounds(1, [0], fragments=FRAGMENTS, grace=GRACE, now=0.0)
    rounds.finish(0, 0.0)
    for number in range(5):
        rounds.receive(0, {"kind": "change", "round": number, "host": 0}, b"theirs", 0.1)
        members = [[0, digest_of(b"theirs")]]
        rounds.receive(0, {"kind": "decision", "round": number, "members": members}, b"", 0.1)
    rounds.left(0)
    assert rounds.can_end(0.2)
    assert rounds.first_last_round == 5


def test_an_answer_to_a_question_before_the_last_pause_does_not_count() -> None:
    network = Network(2, latency=0.2)
    network.run(5)
    host = network.hosts[0]
    for between in (0.5, 20):
        host.is_stopped = True
        network.run(20)
        host.is_stopped = False
        network.run(between)
    assert network.all_agree()
    assert [each.states for each in network.hosts.values()] == [0, 0], "nobody has decided on old knowledge"


def test_a_host_that_was_stopped_decides_nothing_before_it_has_heard_the_others() -> None:
    rounds = Rounds(0, [1], fragments=FRAGMENTS, grace=GRACE, now=0.0)
    rounds.offer(0, b"own", 0.0)
    rounds.skip(1, 20.0)
    assert rounds.decided == 0


@pytest.mark.parametrize(("beginning", "ends"), [("start", True), ("another", False)])
def test_the_end_begins_only_when_hosts_have_one_history(beginning: str, ends: bool) -> None:
    rounds = Rounds(0, [1], fragments=FRAGMENTS, grace=GRACE, now=0.0)
    rounds.finish(0, 0.0)
    other = Rounds(1, [0], fragments=FRAGMENTS, grace=GRACE, now=0.0, beginning=beginning)
    other.finish(0, 0.0)
    rounds.receive(1, other.outbox[-1].fields, b"", 0.1)
    assert rounds.can_end(0.1) == ends
