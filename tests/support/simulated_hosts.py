"""Hosts of an outer loop and the wires between them, on a simulated clock, without tensors and sockets."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.outer.round_parts import Message
from paceline.outer.rounds import Rounds

GRACE = 2.0
TICK = 0.1
FRAGMENTS = 2


class SimulatedHost:
    """A host that offers a round every second, a few at a time, and notes what is decided.

    Attributes:
        pace: seconds from one round to the next.
        last_changes_take: how long it compresses at the end.
    """

    def __init__(
        self,
        number: int,
        others: Sequence[int],
        *,
        is_current: bool = True,
        life: str = "first",
        now: float = 0,
        grace: float = GRACE,
    ) -> None:
        self.rounds = Rounds(
            number, others, fragments=FRAGMENTS, grace=grace, now=now, is_current=is_current, life=life
        )
        self.life = life
        self.log: list[list[int]] = []
        self.contents: list[list[bytes]] = []
        self.states = 0
        self.next_round = 0
        self.is_stopped = False
        self.pace = 1.0
        self.last_changes_take = 0.0
        self.has_ended = False
        self._offered_at = 0.0
        self._ending: Iterator[bool] | None = None

    def run(self, now: float) -> None:
        if self.has_ended:
            return
        self.rounds.tick(now)
        self.rounds.greet()
        is_due = self.rounds.is_current and now - self._offered_at >= self.pace
        if self._ending is None and is_due and self.next_round < self.rounds.decided + FRAGMENTS:
            self._offered_at = now
            self._offer(self.next_round, now)
            self.next_round += 1
        self.end_if_due(now)

    def _offer(self, number: int, now: float) -> None:
        self.rounds.offer(number, f"{self.rounds.host}:{number}:{self.life}".encode(), now)

    def finish(self, now: float) -> None:
        """Have no more steps, as OuterLoop.finish."""
        self.rounds.finish(self.next_round, now)
        self._ending = self._end()

    def end_if_due(self, now: float) -> None:
        """Go on with the end of the training, as far as it can."""
        self._now = now
        while self._ending is not None and not self.has_ended and next(self._ending):
            pass

    def _end(self) -> Iterator[bool]:
        """What a host does at the end; yields whether it can go on at once."""
        rounds = self.rounds
        while not self._is_now(rounds.can_end):
            yield False
        first = rounds.first_last_round
        for number in range(self.next_round, first):
            rounds.skip(number, self._now)
        yield True
        while rounds.decided < first:
            yield False
        began = self._now
        while self._now - began < self.last_changes_take:
            yield False
        for number in range(max(first, rounds.decided), first + FRAGMENTS):
            self._offer(number, self._now)
        self.next_round = max(self.next_round, first + FRAGMENTS)
        while rounds.decided < first + FRAGMENTS or not self._is_now(rounds.all_decided):
            yield False
        self.has_ended = True
        yield True

    def _is_now(self, is_so: Callable[[float], bool]) -> bool:
        self.rounds.notice_pause(self._now)
        return is_so(self._now)

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

    def __init__(self, count: int, *, latency: float = 0.0, grace: float = GRACE) -> None:
        self.hosts: dict[int, SimulatedHost] = {}
        self.grace = grace
        self.latency = latency
        self.wires: dict[tuple[int, int], deque[tuple[Mapping[str, Any], bytes, float]]] = {}
        self.cut: set[frozenset[int]] = set()
        self.now = 0.0
        for number in range(count):
            self.add(number, [other for other in range(count) if other != number])

    def add(self, number: int, others: Sequence[int], *, is_current: bool = True) -> None:
        self.hosts[number] = SimulatedHost(
            number, others, is_current=is_current, now=self.now, grace=self.grace
        )
        for other in others:
            for pair in ((number, other), (other, number)):
                self.wires.setdefault(pair, deque())

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK
            for number, host in self.hosts.items():
                if not host.is_stopped and not host.has_ended:
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
            self.wires[number, to].append((fields, b"", self.now))
        host.rounds.state_for.clear()
        for message in host.rounds.outbox:
            self._send(number, message)
        host.rounds.outbox.clear()
        if host.has_ended:
            for (source, _), wire in self.wires.items():
                if source == number:
                    wire.append(({"kind": "goodbye"}, b"", self.now))

    def finish(self, *numbers: int) -> None:
        """These hosts have no more steps; all hosts by default."""
        for number in numbers or self.hosts:
            self.hosts[number].finish(self.now)
            self.settle(number)

    def _send(self, number: int, message: Message) -> None:
        targets = [other for other in self.hosts if other != number] if message.to is None else [message.to]
        for other in targets:
            self.wires[number, other].append((message.fields, message.payload, self.now))

    def _deliver(self) -> None:
        for (source, target), wire in self.wires.items():
            host = self.hosts[target]
            if host.is_stopped or frozenset((source, target)) in self.cut:
                continue
            while not host.has_ended and wire and wire[0][2] + self.latency <= self.now:
                fields, payload, _ = wire.popleft()
                if fields["kind"] == "goodbye":
                    host.rounds.left(source)
                    continue
                if source not in host.rounds.peers:
                    host.rounds.linked(source, self.now)
                host.rounds.heard(source, self.now)
                if fields["kind"] == "state":
                    host.take(source, fields, self.now)
                else:
                    host.rounds.receive(source, fields, payload, self.now)
                self.settle(target)
                host.end_if_due(self.now)
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
        self.hosts[number] = SimulatedHost(
            number, others, is_current=False, life="second", now=self.now, grace=self.grace
        )
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

    def ended_alike(self) -> bool:
        """Whether all have ended with one model, in which the last changes of all count."""
        hosts = [*self.hosts.values()]
        last = [[*self.hosts]] * FRAGMENTS
        return all(
            host.has_ended and host.contents == hosts[0].contents and host.log[-FRAGMENTS:] == last
            for host in hosts
        )
