"""Which hosts count in which round of outer steps: the same on every host. Pure: no tensors, no sockets.

Note [Rounds between hosts]. Each host sends its change of a fragment to all others. One host, the
coordinator, says whose changes count: those of all hosts that are there, or of those that came within the
grace period. The coordinator is the present host of the lowest number, so that another takes its place when
it is away; a host that knows of others that are ahead never decides. Rounds are decided one after the other.
A host that was away finds the decisions of the others, follows them, and goes on with them.

If hosts cannot reach each other, each side goes on by itself, and their histories differ afterwards. Each
host says how its history ends in every greeting. Of two hosts whose histories differ, the one of the lower
number judges: the history in which more changes count stays, and the other host takes over that state.

A decision names each change that counts by a digest, and histories are made of these digests. So a host that
has other bytes, such as those of a process that was started again, does not take them for the same change.

At the end each host sends one last change of every fragment, from the same round on. A host that has finished
names the latest round that this can be, as far as it knows, and the last rounds begin when all name the same
one. Whoever knows that first tells the others before it sends anything.

Anything may be lost with a connection. So what hosts have to know of each other is in every greeting, or is
sent again over a new connection; a question is asked until it is answered.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from paceline.outer.history import TAIL, History
from paceline.outer.round_parts import DecidedRound, Fields, Message, OpenRound, Peer, digest_of

# Rounds that are kept for hosts that missed a message.
_KEPT_TURNS = 2
_ASK_AGAIN_SECONDS = 1.0
# For how many grace periods a round waits for a message that is coming in.
_LONGEST_GRACES = 4


class Rounds:
    """One host's view of the rounds.

    Args:
        host: this host's number.
        others: the hosts that are expected from the start.
        fragments: the number of fragments.
        grace: seconds for which a round waits for a host, and after which a silent host counts as away. For a
            host whose message is coming in, over a slow link, it waits four times as long.
        now: the time.
        is_current: whether this host has the state of the others.
        beginning: what hosts say that began with the same state.
        life: what tells this process from an earlier one of the same host.
        state_bytes: the size of the state. Hosts that missed changes of more bytes get the state instead.

    Attributes:
        outbox: messages to be sent; whoever sends them clears it.
        ready: rounds whose results can be computed; whoever does so clears it.
        state_for: hosts that this one has to send its state to; whoever does so clears it.
        accepts_state_from: the host whose state was asked for, if any.
        has_finished: whether this host has no more steps.
        goes_on_alone: whether those that this host has joined had gone before they sent their state.
        passed_over: the last rounds, in a row, that had a change of this host and went without it.
    """

    def __init__(
        self,
        host: int,
        others: Sequence[int],
        *,
        fragments: int,
        grace: float,
        now: float,
        is_current: bool = True,
        beginning: str = "start",
        life: str = "",
        state_bytes: float = math.inf,
    ) -> None:
        self.host = host
        self._life = life
        self.grace = grace
        self.peers = {other: Peer(now) for other in others}
        self.outbox: list[Message] = []
        self.ready: list[DecidedRound] = []
        self.state_for: list[int] = []
        self.accepts_state_from: int | None = None
        self.is_current = is_current
        self.has_finished = self.goes_on_alone = False
        self.passed_over: deque[int] = deque(maxlen=TAIL)
        self._next_round = 0
        self._kept_rounds = _KEPT_TURNS * fragments
        self._state_bytes = state_bytes
        self._open: dict[int, OpenRound] = {}
        self._kept: dict[int, DecidedRound] = {}
        self._history = History(beginning)
        self._states_received = 0
        self._questions = 1  # one more after each pause, so that answers to earlier ones are told apart
        self._asked_at = self._moved_at = self._head_since = self._ticked = self._current_host_seen = now
        self._is_late = False  # as in Peer, for this host itself
        self._answers = {
            "change": self._on_change,
            "skip": self._on_skip,
            "decision": self._on_decision,
            "need": self._on_need,
            "greeting": self._on_greeting,
        }
        self._unheard: set[int] = set()  # after a pause of this host: who has not answered yet
        self._first_last: int | None = None  # the round with which the end begins, see can_end

    @property
    def decided(self) -> int:
        """How many rounds are decided, and their changes here."""
        return self._history.decided

    @property
    def history(self) -> Fields:
        """What another host needs to go on from this one's state."""
        return self._history.fields

    def present(self, now: float) -> list[int]:
        """The other hosts that are not away, and have the common state."""
        return sorted(
            host for host, peer in self.peers.items() if peer.is_current and self._is_here(peer, now)
        )

    def away(self, now: float) -> list[int]:
        """The other hosts from which nothing comes."""
        return sorted(host for host, peer in self.peers.items() if not self._is_here(peer, now))

    def _is_here(self, peer: Peer, now: float) -> bool:
        return now - peer.heard <= self.grace

    def missing(self, number: int, now: float) -> list[int]:
        """The hosts that a round still waits for."""
        opened = self._open.get(number)
        came = set() if opened is None else {*opened.changes, *opened.skipped}
        everyone = [host for host in self.present(now) if self._takes_part(host, now)]
        return [host for host in everyone if host not in came]

    def _takes_part(self, host: int, now: float) -> bool:
        """Whether a round waits for a host: at the end for all that have finished, before for the others."""
        peer = self.peers[host]
        return peer.has_finished if self._ends(now) else not (peer.is_late or peer.has_finished)

    def _ends(self, now: float) -> bool:
        return self._first_last is not None or self.all_finished(now)

    def all_finished(self, now: float) -> bool:
        """Whether no host that is present has any more steps; not while it is unknown who is present."""
        finished = [self.peers[host].has_finished for host in self.present(now)]
        return self.has_finished and self.is_current and not self._unheard and all(finished)

    def can_end(self, now: float) -> bool:
        """Whether the last rounds can begin: the present hosts have finished, and name the same first one.

        It is later than all that were decided, or sent before a host had finished. From then on it is fixed,
        and hosts that join now are not waited for.
        """
        present = [self.peers[host] for host in self.present(now)]
        all_name_it = all(peer.agrees and peer.next_round == self._next_round for peer in present)
        if self._first_last is None and self.all_finished(now) and all_name_it:
            self._first_last = self._next_round
            self.greet()
        return self._first_last is not None

    def _know_end(self, least: int) -> None:
        """If this host has finished: the last rounds cannot begin before this one."""
        if self.has_finished and self._first_last is None:
            self._next_round = max(self._next_round, least)

    def unfinished(self, now: float) -> dict[int, int]:
        """The present hosts that have not finished, and how many rounds they have decided."""
        present = {host: self.peers[host] for host in self.present(now)}
        return {host: peer.decided for host, peer in present.items() if not peer.has_finished}

    @property
    def first_last_round(self) -> int:
        """The round with which the end begins, the same on all hosts; see ``can_end``."""
        assert self._first_last is not None
        return self._first_last

    def all_decided(self, now: float) -> bool:
        """Whether the present hosts have decided what this one has."""
        if self._unheard:
            return False
        present = [self.peers[host] for host in self.present(now)]
        return all(peer.agrees and peer.decided >= self.decided for peer in present)

    # What this host does.

    def offer(self, number: int, change: bytes, now: float) -> None:
        """Send this host's change for a round."""
        self._is_late = False
        if number >= self.decided:
            self._opened(number, now).put(self.host, change)
        self._tell(self._change(number), change)
        self._decide(now)

    def skip(self, number: int, now: float) -> None:
        """Have no change for a round."""
        self._is_late = False
        if number >= self.decided:
            self._opened(number, now).skipped.add(self.host)
            self._tell({"kind": "skip", "round": number}, urgent=True)
            self._decide(now)

    def finish(self, next_round: int, now: float) -> None:
        """Have no more steps; ``next_round`` is the first for which this host has sent nothing."""
        self.has_finished = True
        self._know_end(max([next_round, self.decided, *(peer.next_round for peer in self.peers.values())]))
        self.greet()
        self._decide(now)

    def take_state(self, history: Fields, now: float) -> None:
        """Go on from another host's history."""
        self._history.take(history)
        self._kept.clear()
        self._open = {number: each for number, each in self._open.items() if number >= self.decided}
        for each in self._open.values():
            each.drop(self.host)  # it was made from another state
            each.skipped.add(self.host)
        self._states_received += 1
        self.is_current = True
        self.accepts_state_from = None
        self.greet()
        self._decide(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self.notice_pause(now)
        self._unheard = {host for host in self._unheard if self._is_here(self.peers[host], now)}
        self._go_on_alone(now)
        self._decide(now)
        self._ask_if_behind(now)

    def _go_on_alone(self, now: float) -> None:
        """If those that had the common state have gone before they have sent it, have a state of its own."""
        if self.is_current or self.present(now):
            self._current_host_seen = now
        elif now - self._current_host_seen > self.grace:
            self.is_current = self.goes_on_alone = True

    def notice_pause(self, now: float) -> None:
        """If this process was stopped, hear first what the others did, and decide nothing before."""
        pause, self._ticked = now - self._ticked, now
        if pause <= self.grace / 2:
            return
        for peer in self.peers.values():
            peer.heard = max(peer.heard, now)
        self._unheard = {*self.present(now)}
        self._questions += 1
        self._head_since = now
        self.greet()

    # What comes from other hosts.

    def linked(self, host: int, now: float) -> None:
        """There is a connection to a host."""
        peer = self.peers.setdefault(host, Peer(now, is_current=False))
        peer.heard = now
        peer.state_sent_at, peer.asked_at = -1, -math.inf
        peer.agrees, peer.is_linked_anew = False, True
        if self.accepts_state_from == host:
            self.accepts_state_from = None
        self.greet(to=host)
        for number, opened in sorted(self._open.items()):  # it may have missed what was sent before
            if self.host in opened.changes:
                self.outbox.append(Message(host, self._change(number), opened.changes[self.host]))
            elif self.host in opened.skipped:
                self.outbox.append(Message(host, {"kind": "skip", "round": number}, urgent=True))

    def heard(self, host: int, when: float) -> None:
        """Something came from a host at this time."""
        peer = self.peers[host]
        peer.heard = max(peer.heard, when)

    def coming_in(self, hosts: Collection[int]) -> None:
        """Messages of these hosts, and of no others, have come in part."""
        for host, peer in self.peers.items():
            peer.is_sending = host in hosts

    def left(self, host: int) -> None:
        """A host has said that it does not come back."""
        self.peers.pop(host, None)
        self._unheard.discard(host)

    def receive(self, host: int, fields: Fields, payload: bytes, now: float) -> None:
        """A message has come, other than a state."""
        self.notice_pause(now)
        self.heard(host, now)
        self._answers[fields["kind"]](host, fields, payload, now)
        self._decide(now)

    def _on_change(self, host: int, fields: Fields, payload: bytes, now: float) -> None:
        of = int(fields["host"])  # its sender may pass on another host's change
        if of == host:
            self.peers[host].is_late = False  # also if it is too late for this round
        if fields["round"] < self.decided:
            return
        opened = self._opened(fields["round"], now)
        is_decided_on = opened.members is not None and opened.members.get(of) == digest_of(payload)
        if is_decided_on or (not opened.counts(of) and (of == host or of not in opened.changes)):
            opened.put(of, payload)

    def _on_skip(self, host: int, fields: Fields, _: bytes, now: float) -> None:
        self.peers[host].is_late = False
        if fields["round"] >= self.decided:
            self._opened(fields["round"], now).skipped.add(host)

    def _on_decision(self, host: int, fields: Fields, _: bytes, now: float) -> None:
        peer = self.peers[host]
        peer.decided = max(peer.decided, fields["round"] + 1)
        if fields["round"] >= self.decided:
            opened = self._opened(fields["round"], now)
            if opened.members is None:
                opened.members = {int(member): str(digest) for member, digest in fields["members"]}
                opened.told_at = now

    def _on_need(self, host: int, fields: Fields, _: bytes, __: float) -> None:
        """Send what another host lacks to go on: the rounds since, or the whole state."""
        numbers = range(fields["decided"], self.decided)
        if fields["state"] or not all(number in self._kept for number in numbers):
            self._send_state(host)
            return
        for number in numbers:
            kept = self._kept[number]
            for of, change in kept.changes.items():
                self.outbox.append(Message(host, {"kind": "change", "round": number, "host": of}, change))
            self.outbox.append(Message(host, _decision(number, kept.digests), urgent=True))

    def _on_greeting(self, host: int, fields: Fields, _: bytes, now: float) -> None:
        peer = self.peers[host]
        peer.decided = fields["decided"]
        peer.is_current, peer.has_finished = fields["current"], fields["finished"]
        peer.next_round = fields["next"]
        self._know_end(peer.next_round)
        if self.has_finished and self.is_current and fields["first last"] is not None:
            self._first_last = fields["first last"]
        peer.states_received = fields["taken"]
        if fields["life"] != peer.life:
            self._forget_earlier_life(host)
            peer.life = fields["life"]
        if fields["asks"]:
            self.greet(to=host, answers=fields["asks"])
        if fields["answers"] == self._questions:
            self._unheard.discard(host)
        if peer.is_linked_anew and self.is_current and peer.decided > self.decided:
            self._need(host, now, state=False)  # what was on its way may be lost
        peer.is_linked_anew = False
        if self.is_current and peer.is_current:
            self._compare(host, fields, now)
        elif self.is_current and self._first_last is None and self._is_first(now):
            self._send_state(host)  # it is new here

    def _is_first(self, now: float) -> bool:
        """Whether this host has the lowest number of those that are present."""
        return self.host == min([self.host, *self.present(now)])

    def _forget_earlier_life(self, host: int) -> None:
        """A host was started again: what it has sent before, it sends anew, if it has not counted yet."""
        if self.peers[host].life:
            for opened in self._open.values():
                if opened.members is None:
                    opened.drop(host)

    def _compare(self, host: int, fields: Fields, now: float) -> None:
        """Judge between two histories that differ, if this host has the lower number."""
        peer = self.peers[host]
        peer.agrees = self._history.agrees_with(fields)
        if peer.agrees or self.host > host:
            return
        if not fields["answers"]:  # it may have waited on its way, so it need not be how things are now
            self._ask_how_it_is(host, now)
        elif fields["total"] > self._history.total:
            self._ask_for_state(host, now)
        else:
            self._send_state(host)

    def _ask_how_it_is(self, host: int, now: float) -> None:
        peer = self.peers[host]
        if now - peer.asked_at > self.grace:
            peer.asked_at = now
            self.greet(to=host, asks=True)

    def _send_state(self, host: int) -> None:
        peer = self.peers[host]
        if peer.state_sent_at < peer.states_received:  # not while one is under way
            peer.state_sent_at = peer.states_received
            self.state_for.append(host)

    def _ask_for_state(self, host: int, now: float) -> None:
        if self.accepts_state_from is None or now - self._asked_at > 4 * self.grace:
            self.accepts_state_from = host
            self._need(host, now, state=True)

    def _ask_if_behind(self, now: float) -> None:
        """Ask for what is missing if other hosts are ahead and nothing comes."""
        ahead = [host for host in self.present(now) if self.peers[host].decided > self.decided]
        if not ahead or not self.is_current or any(self.peers[host].is_sending for host in ahead):
            self._moved_at = now
        elif now - max(self._moved_at, self._asked_at) > _ASK_AGAIN_SECONDS:
            self._need(max(ahead, key=lambda host: self.peers[host].decided), now, state=False)

    def _need(self, host: int, now: float, *, state: bool) -> None:
        self._asked_at = now
        self.outbox.append(Message(host, {"kind": "need", "decided": self.decided, "state": state}))

    def may_take_state_from(self, host: int, history: Fields) -> bool:
        """Whether a state that has come is one to go on from: asked for, ahead, or sent by a judge.

        Not if this host has caught up with it meanwhile: its changes that are under way would be lost.
        """
        if self.is_current and self._history.includes(history):
            return False
        is_ahead = self.peers[host].decided > self.decided
        return host == self.accepts_state_from or host < self.host or is_ahead or not self.is_current

    def refuse_state(self, host: int) -> None:
        """Do not go on from a state that has come; its host may send another one."""
        if self.accepts_state_from == host:
            self.accepts_state_from = None
        self._states_received += 1
        self.greet(to=host)

    # Decisions.

    def _decide(self, now: float) -> None:
        self.notice_pause(now)
        while self.is_current:
            opened = self._open.get(self.decided)
            if opened is None:
                return
            self._withdraw_if_lost(opened, now)
            if not self._has_decision(opened, now) or not opened.is_whole():
                return  # a change may still be on its way here
            assert opened.members is not None
            changes = {host: opened.changes[host] for host in opened.members}
            self._close(DecidedRound(self.decided, changes, opened.members))
            self._moved_at = self._head_since = now

    def _withdraw_if_lost(self, opened: OpenRound, now: float) -> None:
        """Take back a decision on changes that no present host has: its host was lost just then."""
        if opened.members is None or opened.is_whole() or now - opened.told_at <= self.grace:
            return
        if not any(self.peers[host].decided > self.decided for host in self.present(now)):
            opened.members = None
            self._head_since = now

    def _has_decision(self, opened: OpenRound, now: float) -> bool:
        """Whether it is decided who counts; the coordinator decides."""
        if opened.members is None and self._may_decide(now) and self._is_complete(opened, now):
            opened.members = {host: str(opened.digest(host)) for host in sorted(opened.changes)}
            self.outbox.append(Message(None, _decision(self.decided, opened.members), urgent=True))
        return opened.members is not None

    def _may_decide(self, now: float) -> bool:
        if self._unheard:
            return False
        present = self.present(now)
        if any(self.peers[host].decided > self.decided for host in present):
            return False
        level = [host for host in present if self.peers[host].decided == self.decided]
        return self.host == min([self.host, *level])

    def _is_complete(self, opened: OpenRound, now: float) -> bool:
        """Whether a round has waited enough."""
        missing = self.missing(self.decided, now)
        graces = _LONGEST_GRACES if any(self.peers[host].is_sending for host in missing) else 1
        if now - max(opened.since, self._head_since) > graces * self.grace:
            for host in missing:
                self.peers[host].is_late = True
            self._is_late = self.host not in {*opened.changes, *opened.skipped}
            return True
        came = {*opened.changes, *opened.skipped}
        takes_part = self._ends(now) or not (self._is_late or self.has_finished)
        own_is_missing = takes_part and self.host not in came
        return not own_is_missing and not missing

    def _close(self, decided: DecidedRound) -> None:
        number = decided.number
        if self.host in decided.changes:
            self.passed_over.clear()
        elif self.host in self._open[number].changes:
            self.passed_over.append(number)
        self._open.pop(number)
        self._keep(decided)
        self._history.add(decided.digests)
        self._know_end(self.decided)
        self.ready.append(decided)

    def _keep(self, decided: DecidedRound) -> None:
        """Keep a round for hosts that missed it, unless the state would be shorter."""
        self._kept[decided.number] = decided
        self._kept.pop(decided.number - self._kept_rounds, None)
        while self._kept and sum(each.nbytes for each in self._kept.values()) > self._state_bytes:
            self._kept.pop(min(self._kept))

    def _opened(self, number: int, now: float) -> OpenRound:
        return self._open.setdefault(number, OpenRound(now))

    def _change(self, number: int) -> Fields:
        return {"kind": "change", "round": number, "host": self.host}

    def _tell(self, fields: Fields, payload: bytes = b"", *, urgent: bool = False) -> None:
        self.outbox.append(Message(None, fields, payload, urgent))

    def greet(self, *, to: int | None = None, asks: bool = False, answers: int = 0) -> None:
        """Tell hosts how far this one is; call this a few times per grace period.

        Args:
            to: the host; None for all.
            asks: whether they are to answer. They also are as long as not all have that this host has to hear
                after a pause, because a question is lost with its connection.
            answers: the question that this answers; 0 if none.
        """
        fields = {
            **self.history,
            "kind": "greeting",
            "current": self.is_current,
            "finished": self.has_finished,
            "next": self._next_round,
            "taken": self._states_received,
            "life": self._life,
            "first last": self._first_last,
            "asks": self._questions if asks or (self._unheard and not answers) else 0,
            "answers": answers,
        }
        # An answer comes after all that was sent before, so that its reader knows it.
        self.outbox.append(Message(to, fields, urgent=not answers))


def _decision(number: int, digests: Mapping[int, str]) -> Fields:
    return {"kind": "decision", "round": number, "members": [*digests.items()]}
