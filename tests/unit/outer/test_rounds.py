"""Who counts in which round: hosts that are slow, stopped, cut off from each other, or new."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulated_hosts import FRAGMENTS, GRACE, TICK, Network

from paceline.outer.rounds import Rounds


def test_all_hosts_that_are_there_count_in_every_round() -> None:
    network = Network(3)
    network.run(10)
    assert network.all_agree()
    assert len(network.logs[0]) > 5
    assert all(members == [0, 1, 2] for members in network.logs[0])


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_host_is_left_out_and_comes_back_without_taking_a_state(stopped: int) -> None:
    network = Network(2)
    network.run(5)
    network.hosts[stopped].is_stopped = True
    network.run(20)
    other = network.hosts[1 - stopped]
    assert len(other.log) > 15, "nobody waits for it for longer than the grace period"
    assert other.log[-1] == [1 - stopped]
    network.hosts[stopped].is_stopped = False
    network.run(10)
    assert network.all_agree()
    assert other.log[-1] == [0, 1]
    assert network.hosts[stopped].states == 0, "it follows the decisions that it missed"


def test_a_host_that_missed_too_much_takes_the_state_of_the_others() -> None:
    network = Network(2)
    network.run(5)
    network.hosts[1].is_stopped = True
    network.run(40)
    network.hosts[1].is_stopped = False
    network.lose(0, 1)
    network.run(10)
    assert network.all_agree()
    assert network.hosts[1].states == 1
    assert network.hosts[0].states == 0
    assert network.hosts[0].log[-1] == [0, 1]


def test_a_host_that_lost_few_messages_gets_them_again() -> None:
    network = Network(2)
    network.run(5)
    network.hosts[1].is_stopped = True
    network.run(1.5)
    network.hosts[1].is_stopped = False
    network.lose(0, 1)
    network.run(10)
    assert network.all_agree()
    assert sum(host.states for host in network.hosts.values()) == 0
    assert network.hosts[0].log[-1] == [0, 1]


def test_hosts_that_could_not_reach_each_other_go_on_from_one_history() -> None:
    network = Network(3)
    network.run(5)
    network.cut_wire(0, 1)
    network.cut_wire(0, 2)
    network.run(20)
    assert network.hosts[0].log[-1] == [0]
    assert network.hosts[1].log[-1] == network.hosts[2].log[-1] == [1, 2]
    network.cut.clear()
    network.run(20)
    assert network.all_agree()
    assert network.hosts[1].log[-1] == [0, 1, 2]
    assert [1, 2] in network.hosts[0].log, "the history in which more changes count stays"


def test_a_slow_host_is_waited_for_within_the_grace_period() -> None:
    network = Network(2)
    network.hosts[1].pace = 1.5
    network.run(15)
    assert network.all_agree()
    assert all(members == [0, 1] for members in network.logs[0])


def test_a_host_that_joins_late_takes_the_state_and_counts_from_then_on() -> None:
    network = Network(2)
    network.run(10)
    network.add(2, [0, 1], is_current=False)
    for other in (0, 1):
        network.hosts[2].rounds.linked(other, network.now)
    network.run(10)
    assert network.all_agree()
    assert network.hosts[2].states == 1
    assert network.hosts[0].log[-1] == [0, 1, 2]


def test_a_first_host_that_begins_anew_takes_the_state_of_those_that_went_on() -> None:
    network = Network(3)
    network.run(20)
    for other in (1, 2):
        network.lose(0, other)
    network.add(0, [])
    network.hosts[0].rounds.tick(network.now)
    for other in (1, 2):
        network.hosts[0].rounds.linked(other, network.now)
    network.run(20)
    assert network.all_agree()
    assert len(network.hosts[0].log) > 25
    assert network.hosts[1].log[-1] == [0, 1, 2]


def test_a_host_that_has_finished_is_not_waited_for_until_all_have() -> None:
    network = Network(2)
    network.run(5)
    first, second = network.hosts[0], network.hosts[1]
    network.finish(1)
    network.run(5)
    assert first.log[-1] == [0]
    assert not second.has_ended
    assert network.all_agree()
    network.finish(0)
    network.run(1)
    assert network.ended_alike()


def test_a_round_that_all_hosts_skip_is_decided_with_nobody() -> None:
    network = Network(2)
    for host in network.hosts.values():
        host.next_round = 1
        host.rounds.skip(0, 0.0)
    network.run(5)
    assert network.all_agree()
    assert network.logs[0][:2] == [[], [0, 1]]


def test_a_change_that_another_host_passes_on_counts_for_its_own_host() -> None:
    network = Network(3)
    network.run(3)
    network.cut_wire(1, 2)
    network.run(20)
    assert network.all_agree()
    assert network.hosts[0].log[-1] == [0, 1, 2]


@pytest.mark.parametrize("restarted", [0, 1])
def test_changes_of_a_process_that_was_started_again_are_not_taken_for_those_of_the_first(
    restarted: int,
) -> None:
    network = Network(2)
    network.hosts[1 - restarted].pace = 1.9
    network.run(10.5)
    network.start_again(restarted)
    network.run(30)
    assert network.all_agree()
    assert any(b":second" in change for round_ in network.hosts[0].contents for change in round_)
    assert network.hosts[1 - restarted].log[-1] == [0, 1]


def test_histories_of_other_changes_differ() -> None:
    tails = []
    for change in (b"one", b"other"):
        rounds = Rounds(0, [], fragments=1, grace=GRACE, now=0.0)
        rounds.offer(0, change, 0.0)
        tails.append(rounds.history["tail"])
    assert tails[0] != tails[1]


def decision(number: int, change: bytes) -> Mapping[str, Any]:
    """Host 0's decision on a change of its own."""
    rounds = Rounds(0, [], fragments=1, grace=GRACE, now=0.0)
    for each in range(number):
        rounds.skip(each, 0.0)
    rounds.offer(number, change, 0.0)
    [told] = [message.fields for message in rounds.outbox if message.fields.get("members")]
    return told


def test_a_decision_on_a_change_that_was_lost_with_its_host_is_withdrawn() -> None:
    rounds = Rounds(1, [0], fragments=FRAGMENTS, grace=GRACE, now=0.0)
    rounds.offer(0, b"own", 0.0)
    rounds.receive(0, decision(0, b"never comes"), b"", 0.1)
    for tick in range(int(GRACE / TICK)):
        rounds.tick(tick * TICK)
    assert rounds.decided == 0, "it may still come"
    for tick in range(int(GRACE / TICK), int(4 * GRACE / TICK)):
        rounds.tick(tick * TICK)
    assert [[*decided.changes] for decided in rounds.ready] == [[1]]


def test_a_host_that_joins_goes_on_by_itself_if_the_others_are_lost_before_it_has_their_state() -> None:
    network = Network(1)
    network.add(1, [0], is_current=False)
    network.hosts[1].rounds.linked(0, network.now)
    network.cut_wire(0, 1)
    network.run(5 * GRACE)
    assert network.hosts[1].log[-1] == [1]
    network.cut.clear()
    network.run(10)
    assert network.all_agree()
    assert network.hosts[0].log[-1] == [0, 1]


def test_a_host_that_was_stopped_while_it_waits_for_the_end_hears_the_others_first() -> None:
    network = Network(2)
    network.run(5)
    first = network.hosts[0]
    first.pace = float("inf")
    first.rounds.finish(first.next_round, network.now)
    network.run(1)
    later = network.now + 3 * GRACE
    assert first.rounds.all_finished(later), "as if the other one had gone"
    first.rounds.notice_pause(later)
    assert not first.rounds.all_finished(later)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_was_stopped_asks_again_if_its_question_was_lost(stopped: int) -> None:
    network = Network(2)
    network.run(5)
    network.hosts[stopped].is_stopped = True
    network.run(20)
    network.hosts[stopped].is_stopped = False
    network.cut_wire(0, 1)
    network.run(TICK)
    network.cut.clear()
    network.lose(0, 1)
    network.run(10)
    assert network.all_agree()
    assert network.hosts[0].log[-1] == [0, 1]
    network.finish()
    network.run(1)
    assert network.ended_alike()


def test_the_others_go_on_while_the_host_that_decides_does_something_else() -> None:
    network = Network(2)
    network.run(5)
    network.hosts[0].pace = float("inf")
    network.run(30)
    assert len(network.hosts[1].log) > 25
    network.hosts[0].pace = 1.0
    network.run(10)
    assert network.all_agree()
    assert network.hosts[0].log[-1] == [0, 1]


def test_a_state_that_this_host_has_caught_up_with_is_refused_and_a_later_one_is_taken() -> None:
    def history(*changes: bytes) -> Mapping[str, Any]:
        rounds = Rounds(0, [], fragments=1, grace=GRACE, now=0.0)
        for number, change in enumerate(changes):
            rounds.offer(number, change, 0.0)
        return rounds.history

    rounds = Rounds(1, [0], fragments=1, grace=GRACE, now=0.0)
    rounds.take_state(history(b"first", b"second"), 0.0)
    assert not rounds.may_take_state_from(0, history(b"first", b"second"))
    assert not rounds.may_take_state_from(0, history(b"first"))
    assert rounds.may_take_state_from(0, history(b"first", b"other"))
    before = rounds.outbox[-1].fields["taken"]
    rounds.refuse_state(0)
    assert rounds.outbox[-1].fields["taken"] > before, "so that the other host sends its next one"


@pytest.mark.parametrize(("state_bytes", "gets_state"), [(40, False), (39, True)])
def test_a_host_that_missed_more_bytes_than_the_state_has_gets_the_state(
    state_bytes: int, gets_state: bool
) -> None:
    rounds = Rounds(0, [1], fragments=FRAGMENTS, grace=GRACE, now=0.0, state_bytes=state_bytes)
    for number in range(2):
        rounds.offer(number, b"0123456789", 0.0)
        rounds.receive(1, {"kind": "change", "round": number, "host": 1}, b"9876543210", 0.0)
    assert rounds.decided == 2
    rounds.outbox.clear()
    rounds.receive(1, {"kind": "need", "decided": 0, "state": False}, b"", 0.0)
    assert rounds.state_for == ([1] if gets_state else [])
    assert len([message for message in rounds.outbox if message.payload]) == (0 if gets_state else 4)


def wait_with_a_message_coming_in(rounds: Rounds, first: float, last: float) -> None:
    for tick in range(int(first / TICK), int(last / TICK)):
        rounds.heard(1, tick * TICK)
        rounds.coming_in([1])
        rounds.tick(tick * TICK)


def test_a_change_counts_that_takes_longer_than_the_grace_period_to_come_in() -> None:
    rounds = Rounds(0, [1], fragments=FRAGMENTS, grace=GRACE, now=0.0)
    rounds.offer(0, b"own", 0.0)
    wait_with_a_message_coming_in(rounds, 0.0, 3 * GRACE)
    rounds.receive(1, {"kind": "change", "round": 0, "host": 1}, b"slow", 3 * GRACE)
    assert [[*decided.changes] for decided in rounds.ready] == [[0, 1]]


def test_a_message_that_never_ends_is_not_waited_for_without_limit() -> None:
    rounds = Rounds(0, [1], fragments=FRAGMENTS, grace=GRACE, now=0.0)
    rounds.offer(0, b"own", 0.0)
    wait_with_a_message_coming_in(rounds, 0.0, 5 * GRACE)
    assert [[*decided.changes] for decided in rounds.ready] == [[0]]


def test_a_host_asks_for_nothing_while_a_message_is_coming_in() -> None:
    rounds = Rounds(0, [1], fragments=FRAGMENTS, grace=GRACE, now=0.0)
    rounds.greet()
    rounds.receive(1, {**rounds.outbox.pop().fields, "decided": 1}, b"", 0.0)
    wait_with_a_message_coming_in(rounds, 0.0, GRACE)
    assert not any(message.fields["kind"] == "need" for message in rounds.outbox)
    for tick in range(int(GRACE / TICK), int(2 * GRACE / TICK)):
        rounds.coming_in([])
        rounds.tick(tick * TICK)
    assert any(message.fields["kind"] == "need" for message in rounds.outbox)


def test_a_host_knows_how_many_rounds_went_without_its_change() -> None:
    rounds = Rounds(1, [0], fragments=FRAGMENTS, grace=GRACE, now=0.0)
    for number in range(3):
        rounds.offer(number, b"own", 0.1)
        rounds.receive(0, {"kind": "change", "round": number, "host": 0}, b"theirs", 0.1)
        rounds.receive(0, decision(number, b"theirs"), b"", 0.1)
    assert [*rounds.passed_over] == [0, 1, 2]
    for tick in range(2, int(4 * GRACE / TICK)):
        rounds.tick(tick * TICK)
    rounds.offer(3, b"own", 4 * GRACE)
    assert not rounds.passed_over


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["stop", "cut", "lose", "slow", "start again"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.floats(0.1, 9),
    ),
    max_size=6,
)


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.integers(2, 4), FAULTS)
def test_whatever_happens_hosts_agree_when_it_is_over(
    count: int, faults: list[tuple[str, int, int, float]]
) -> None:
    network = Network(count)
    network.run(2)
    for what, one, other, seconds in faults:
        one, other = one % count, other % count
        host = network.hosts[one]
        if what == "stop":
            host.is_stopped = True
        elif what == "slow":
            host.pace = 3.0
        elif what == "start again":
            network.start_again(one)
        elif one != other and what == "cut":
            network.cut_wire(one, other)
        elif one != other:
            network.lose(one, other)
        network.run(seconds)
        host.is_stopped = False
        host.pace = 1.0
        network.cut.clear()
        network.run(seconds / 3)
    network.run(30)
    assert network.all_agree(), network.logs
    everyone = [*range(count)]
    assert all(host.log[-1] == everyone for host in network.hosts.values())
