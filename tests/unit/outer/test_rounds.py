"""Who counts in which round: hosts that are slow, stopped, cut off from each other, or new."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from paceline.outer.round_parts import Message
from paceline.outer.rounds import Rounds

GRACE = 2.0
TICK = 0.1
FRAGMENTS = 2


class SimulatedHost:
    """A host that offers a round every second, a few at a time, and notes what is decided."""

    def __init__(
        self,
        number: int,
        others: Sequence[int],
        *,
        is_current: bool = True,
        life: str = "first",
        now: float = 0,
    ) -> None:
        self.rounds = Rounds(
            number, others, fragments=FRAGMENTS, grace=GRACE, now=now, is_current=is_current, life=life
        )
        self.life = life
        self.log: list[list[int]] = []
        self.contents: list[list[bytes]] = []
        self.states = 0
        self.next_round = 0
        self.is_stopped = False
        self.pace = 1.0
        self._offered_at = 0.0

    def run(self, now: float) -> None:
        self.rounds.tick(now)
        self.rounds.greet()
        is_due = self.rounds.is_current and now - self._offered_at >= self.pace
        if is_due and self.next_round < self.rounds.decided + FRAGMENTS:
            self._offered_at = now
            change = f"{self.rounds.host}:{self.next_round}:{self.life}".encode()
            self.rounds.offer(self.next_round, change, now)
            self.next_round += 1

    def note(self) -> None:
        while self.rounds.ready:
            decided = self.rounds.ready.pop(0)
            assert decided.number == len(self.log)
            for host, change in decided.changes.items():
                assert change.startswith(f"{host}:{decided.number}:".encode())
            self.log.append([*decided.changes])
            self.contents.append([*decided.changes.values()])
            self.next_round = max(self.next_round, decided.number + 1)

    def take(self, host: int, fields: Mapping[str, Any], now: float) -> None:
        if not self.rounds.may_take_state_from(host, fields["history"]):
            self.rounds.refuse_state(host)
        else:
            self.states += 1
            self.log = [[*members] for members in fields["log"]]
            self.contents = [*fields["contents"]]
            self.next_round = max(self.next_round, fields["next"])
            self.rounds.take_state(fields["history"], now)
            for number in range(self.rounds.decided, self.next_round):
                self.rounds.skip(number, now)


class Network:
    """Hosts and the wires between them; what is on a wire that is cut waits."""

    def __init__(self, count: int) -> None:
        self.hosts: dict[int, SimulatedHost] = {}
        self.wires: dict[tuple[int, int], deque[tuple[Mapping[str, Any], bytes]]] = {}
        self.cut: set[frozenset[int]] = set()
        self.now = 0.0
        for number in range(count):
            self.add(number, [other for other in range(count) if other != number])

    def add(self, number: int, others: Sequence[int], *, is_current: bool = True) -> None:
        self.hosts[number] = SimulatedHost(number, others, is_current=is_current)
        for other in others:
            for pair in ((number, other), (other, number)):
                self.wires.setdefault(pair, deque())

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK
            for number, host in self.hosts.items():
                if not host.is_stopped:
                    host.run(self.now)
                    self.settle(number)
            self._deliver()

    def settle(self, number: int) -> None:
        """Do what a host's driver does after each event."""
        host = self.hosts[number]
        host.note()
        for to in host.rounds.state_for:
            history = {**host.rounds.history, "tail": [[*pair] for pair in host.rounds.history["tail"]]}
            fields = {
                "kind": "state", "history": history, "log": [*host.log], "next": host.next_round,
                "contents": [*host.contents],
            }  # fmt: skip
            self.wires[number, to].append((fields, b""))
        host.rounds.state_for.clear()
        for message in host.rounds.outbox:
            self._send(number, message)
        host.rounds.outbox.clear()

    def _send(self, number: int, message: Message) -> None:
        targets = [other for other in self.hosts if other != number] if message.to is None else [message.to]
        for other in targets:
            self.wires[number, other].append((message.fields, message.payload))

    def _deliver(self) -> None:
        for (source, target), wire in self.wires.items():
            host = self.hosts[target]
            if host.is_stopped or frozenset((source, target)) in self.cut:
                continue
            while wire:
                fields, payload = wire.popleft()
                if source not in host.rounds.peers:
                    host.rounds.linked(source, self.now)
                host.rounds.heard(source, self.now)
                if fields["kind"] == "state":
                    host.take(source, fields, self.now)
                else:
                    host.rounds.receive(source, fields, payload, self.now)
                self.settle(target)

    def cut_wire(self, one: int, other: int) -> None:
        self.cut.add(frozenset((one, other)))

    def lose(self, one: int, other: int) -> None:
        """Lose all that is on the wire, as a connection that breaks does, and connect again."""
        for pair in ((one, other), (other, one)):
            self.wires[pair].clear()
            self.hosts[pair[0]].rounds.linked(pair[1], self.now)

    def start_again(self, number: int) -> None:
        """Lose a host's process, and have another one take its place at once."""
        others = [other for other in self.hosts if other != number]
        self.hosts[number] = SimulatedHost(number, others, is_current=False, life="second", now=self.now)
        for other in others:
            self.lose(number, other)

    @property
    def logs(self) -> list[list[list[int]]]:
        """What each host has decided, as far as all have."""
        shortest = min(len(host.log) for host in self.hosts.values())
        return [host.log[:shortest] for host in self.hosts.values()]

    def all_agree(self) -> bool:
        shortest = len(self.logs[0])
        contents = [host.contents[:shortest] for host in self.hosts.values()]
        return all(log == self.logs[0] for log in self.logs) and all(each == contents[0] for each in contents)


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
    second.pace = float("inf")
    second.rounds.finish(second.next_round, network.now)
    network.run(5)
    assert first.log[-1] == [0]
    assert network.all_agree()
    first.pace = float("inf")
    first.rounds.finish(first.next_round, network.now)
    network.run(1)
    assert first.rounds.all_finished(network.now)
    assert second.rounds.all_finished(network.now)
    last = [host.rounds.first_last_round(network.now) for host in (first, second)]
    assert last == [first.next_round] * 2, "hosts agree on the rounds that end the training"


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
    for host in network.hosts.values():
        host.pace = float("inf")
        host.rounds.finish(host.next_round, network.now)
    network.run(1)
    assert all(host.rounds.all_finished(network.now) for host in network.hosts.values())


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
    greeting = {**rounds.history, "kind": "greeting", "current": True, "finished": False, "next": 0}
    greeting |= {"taken": 0, "life": "", "echo": False, "answer": False}
    rounds.receive(1, {**greeting, "decided": 1}, b"", 0.0)
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
