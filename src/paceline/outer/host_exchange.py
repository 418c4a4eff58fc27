"""What runs in a thread on one rank per host: messages to other hosts, compression, outer steps."""

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.host_connection import Fields, Place
from paceline.comm.host_links import HostLinks, is_host_number, is_place
from paceline.errors import OptionError, StepError
from paceline.outer.agreement import is_of_equal_loop
from paceline.outer.fragment import Fragment
from paceline.outer.moves import Move, Moves
from paceline.outer.round_parts import DecidedRound
from paceline.outer.rounds import Rounds
from paceline.outer.schedule import Schedule

_GREETINGS_PER_GRACE = 8
_KINDS = {
    "state",
    "goodbye",
    "newcomer",
    "place",
    "buffers",
    "has buffers",
    "change",
    "skip",
    "decision",
    "need",
    "greeting",
}
_MAX_GREETING_SECONDS = 0.25
# How many rounds may go without a change of this host, besides those that may have been under way.
_TOO_MANY = 2


def longest_wait(grace: float) -> float:
    """For how many seconds a step waits for other hosts."""
    return 2 * grace + 1.0


class HostExchange:
    """Exchanges changes with the other hosts, while the ranks of this host train.

    Args:
        fragments: the parameters.
        schedule: when fragments are exchanged.
        links: the connections to the other hosts.
        fingerprint: what hosts must have in common.
        joins_after: after how many seconds hosts may join.

    Attributes:
        step: how many steps this host has done; more, if it was left behind and goes on with the others.
        rounds: who counts in which round.
        moves: what training has not used yet.
        buffers: the module buffers that all hosts end with; None if they have not come.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        schedule: Schedule,
        links: HostLinks,
        fingerprint: str,
        *,
        joins_after: float = 0.0,
    ) -> None:
        self._fragments = fragments
        self._schedule = schedule
        self._links = links
        self._fingerprint = fingerprint
        self._token = ""
        self._highest_number = 0  # that a host has had; another host never gets the same
        self._joins_from = time.monotonic() + joins_after
        self._changed = threading.Condition(threading.RLock())
        self.rounds = Rounds(0, [], fragments=len(fragments), grace=1.0, now=time.monotonic())
        self.step = 0
        self.buffers: bytes | None = None
        self._sends_buffers = False
        self._have_buffers: set[int] = set()  # the hosts that have said that they have them
        self._joined: set[int] = set()  # the hosts that have told nobody else where they are
        self._has_left = False  # whether a host has said goodbye that may have sent its buffers
        self._next_round = 0
        self.moves = Moves()
        self._to_encode: list[tuple[int, Tensor]] = []
        self._greeted = 0.0
        self._failure: Exception | None = None
        self._has_warned = False

    def start(
        self, rounds: Rounds, places: Mapping[int, Place], *, token: str, may_join: bool = False
    ) -> None:
        """Connect to the other hosts."""
        self.rounds = rounds
        self._token = token
        self._links.start(rounds.host, places, self, token=token, may_join=may_join)

    # What the training calls.

    def after_step(self) -> dict[int, Move]:
        """A step is done: send what is due, and return what is to be used now, by fragment."""
        with self._changed:
            self._raise_failure()
            self.step += 1
            while self._schedule.send_step(self._next_round) <= self.step:
                self._send_next()
            self._warn_if_passed_over()
            self.warn_if_alone(stacklevel=6)
            return self.moves.due(self.step)

    def used(self, fragment: int) -> None:
        """This host has used what was due for a fragment; until then it stays due, if the step is lost."""
        with self._changed:
            self.moves.used(fragment)

    def _warn_if_passed_over(self) -> None:
        """Tell if the changes of this host come too late; those that were under way in a pause do not."""
        passed_over = self.rounds.passed_over
        if self._has_warned or len(passed_over) < len(self._fragments) + _TOO_MANY:
            return
        self._has_warned = True
        warnings.warn(
            "the changes of this host come too late for the others and do not count: let grace be longer "
            "than it takes to compress, send and decode a fragment, or have more and smaller fragments "
            f"(here: host {self.rounds.host}, rounds: {[*passed_over]}, grace: {self.rounds.grace:g} s)",
            stacklevel=6,
        )

    def warn_if_alone(self, *, stacklevel: int) -> None:
        """Tell once if those that this host has joined have gone before they sent their state."""
        if self.rounds.goes_on_alone:
            self.rounds.goes_on_alone = False
            warnings.warn(
                "the hosts that this one has joined have gone before they sent their state, so it goes on "
                f"from its own (here: host {self.rounds.host})",
                stacklevel=stacklevel,
            )

    def _send_next(self) -> None:
        number = self._next_round
        self._next_round += 1
        fragment = self._schedule.fragment(number)
        if self._schedule.send_step(number) < self.step or not self.rounds.is_current:
            self.rounds.skip(number, time.monotonic())  # this host was left behind, or joins
        elif self._has_room(fragment, number):
            self._to_encode.append((number, self._with_moves(fragment)))
            self._links.wake()
        else:
            self.rounds.skip(number, time.monotonic())
        self._flush()

    def _has_room(self, fragment: int, number: int) -> bool:
        """Whether a fragment's last change has been dealt with; waits for that, no longer than it takes."""
        last = number - self._schedule.fragments
        return self._changed.wait_for(
            lambda: self.rounds.decided > last and self._fragments[fragment].sent is None,
            longest_wait(self.rounds.grace),
        )

    def _with_moves(self, fragment: int) -> Tensor:
        """This host's parameters, as if it had already used what has come."""
        return self.moves.applied_to(self._fragments[fragment].parameters.read(), fragment)

    def present(self) -> list[int]:
        """The other hosts that are there, and have the common state."""
        with self._changed:
            return self.rounds.present(time.monotonic())

    def away(self) -> list[int]:
        """The other hosts from which nothing comes."""
        with self._changed:
            return self.rounds.away(time.monotonic())

    def unfinished(self) -> dict[int, int]:
        """The hosts that are there and have not finished, and how many rounds they have decided."""
        with self._changed:
            return self.rounds.unfinished(time.monotonic())

    def wait_for(self, is_so: Callable[[Rounds, float], bool], seconds: float) -> bool:
        """Wait until something is so."""
        with self._changed:
            self._raise_failure()
            return self._changed.wait_for(lambda: self._is_now(is_so), seconds)

    def _is_now(self, is_so: Callable[[Rounds, float], bool]) -> bool:
        """Whether something is so; if this process was stopped, what was heard before is no longer true."""
        now = time.monotonic()
        self.rounds.notice_pause(now)
        return is_so(self.rounds, now)

    def skip_to_last(self) -> int:
        """Skip the rounds before those that end the training; returns the first one that does."""
        now = time.monotonic()
        with self._changed:
            first = self.rounds.first_last_round
            for number in range(self._next_round, first):
                self.rounds.skip(number, now)
            self._next_round = max(self._next_round, first)
            self._flush()
            return first

    def send_last(self) -> int:
        """Send the last change of every fragment; returns the number of rounds when all are decided.

        All rounds before must be decided: a change that is under way would be lost.
        """
        with self._changed:
            first = self.rounds.first_last_round
            end = first + len(self._fragments)
            for number in range(first, end):
                self._to_encode.append((number, self._with_moves(self._schedule.fragment(number))))
            self._next_round = max(self._next_round, end)
            self._links.wake()
            return end

    def finish(self) -> None:
        """This host has no more steps."""
        with self._changed:
            self.rounds.finish(self._next_round, time.monotonic())
            self._flush()

    def share_buffers(self, own: bytes, seconds: float) -> bool:
        """Send module buffers, or wait for those of the present host of the lowest number.

        Returns:
            Whether they are there, or do not come; a slow link may take long.
        """
        with self._changed:
            self._raise_failure()
            if self.buffers is None and self._is_first(self.rounds.present(time.monotonic())):
                self.buffers, self._sends_buffers = own, True
                for host in self._links.linked:
                    self._send_buffers(host)
            return self._changed.wait_for(self._has_buffers, seconds)

    def _is_first(self, present: Sequence[int]) -> bool:
        has_lost_them = not present and self._has_left  # before the first one has sent them all
        return not has_lost_them and self.rounds.host < min(present, default=self.rounds.host + 1)

    def _send_buffers(self, host: int) -> None:
        if self._sends_buffers and self.buffers is not None and host not in self._have_buffers:
            self._links.send(host, {"kind": "buffers"}, self.buffers)

    def _has_buffers(self) -> bool:
        if self._sends_buffers:
            return self._have_buffers.issuperset(self.rounds.present(time.monotonic()))
        return self.buffers is not None or (self._has_left and not self.rounds.present(time.monotonic()))

    def common_values(self) -> dict[int, Move]:
        """Has this host's parameters become those that all hosts have in common, by fragment."""
        with self._changed:
            return {
                number: Move(number, fragment.common.clone(), 0, replaces=True)
                for number, fragment in enumerate(self._fragments)
            }

    def state_dict(self) -> dict[str, Any]:
        """All that another process needs to go on for this host."""
        with self._changed:
            fragments = [
                {name: value.clone() for name, value in _tensors_of(each).items()} for each in self._fragments
            ]
            history = {**self.rounds.history, "tail": [[*pair] for pair in self.rounds.history["tail"]]}
            return {
                "fragments": fragments,
                "moves": self.moves.state(),
                "step": self.step,
                "history": history,
                "schedule": str(self._schedule),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; changes that were under way are made anew in their next round."""
        saved = [{name: tuple(value.shape) for name, value in each.items()} for each in state["fragments"]]
        here = [
            {name: tuple(value.shape) for name, value in _tensors_of(each).items()}
            for each in self._fragments
        ]
        if saved != here:
            raise OptionError(
                f"the saved outer state is of other parameters or fragments (saved: {saved}, here: {here})"
            )
        if state["schedule"] != str(self._schedule):
            raise OptionError(
                "the saved outer state is of another schedule, and rounds are counted by it "
                f"(saved: {state['schedule']}, here: {self._schedule})"
            )
        with self._changed:
            for fragment, values in zip(self._fragments, state["fragments"], strict=True):
                for name, tensor in _tensors_of(fragment).items():
                    tensor.copy_(values[name])
                fragment.sent = None
            self.moves.take(state["moves"])
            self._to_encode.clear()
            self._take_history(state["history"], state["step"])
            self._flush()

    def close(self) -> None:
        """Say goodbye, and end."""
        with self._changed:
            for host in self._links.linked:
                self._links.send(host, {"kind": "goodbye"})
        self._links.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise StepError(
                f"the exchange between hosts has failed (here: host {self.rounds.host}): {self._failure!r}"
            ) from self._failure

    # What the thread of the links calls.

    def linked(self, host: int) -> None:
        """There is a connection to a host."""
        with self._changed:
            self.rounds.linked(host, time.monotonic())
            # Where hosts meet, the one that listens may be started again, and does not know where they are.
            for number, place in {**self._links.places, self.rounds.host: self._links.own_place}.items():
                if number != host:
                    kind = "newcomer" if number in self._joined else "place"
                    self._links.send(host, {"kind": kind, "number": number, "place": place})
            self._send_buffers(host)
            self._flush()

    def failed(self, error: Exception) -> None:
        """The thread ends: the training raises the error, because nothing would come any more."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def greeted(self, fields: Fields) -> Fields:
        """A host joins: give it a number, or the one that it had, and tell all others where it is."""
        with self._changed:
            if fields["fingerprint"] != self._fingerprint:
                return {"refused": self._fingerprint}
            number, place = fields["again"], fields["place"]
            if fields["token"] != self._token:
                number = None  # it had that number in another loop
            if not (number is None or is_host_number(number)) or not is_place(place):
                raise ValueError("a stranger asks")
            if not number:  # 0 is the number of this host, which listens now in place of the other
                if time.monotonic() < self._joins_from:
                    raise ValueError("hosts cannot join yet: they ask again")
                number = self._new_number()
            known = {**self._links.places, self.rounds.host: self._links.own_place}
            known.pop(number, None)
            self._links.add(number, place)
            self._joined.add(number)
            newcomer = {"kind": "newcomer", "number": number, "place": place}
            for host in self._links.linked:
                self._links.send(host, newcomer, urgent=True)
            return {"number": number, "token": self._token, "places": [*known.items()]}

    def goes_on_with(self, token: object) -> bool:
        """A host of another loop connects: go on with that loop if nobody has been in this one yet.

        It was told no goodbye, so the host that listened before was lost, and this one is in its place.
        """
        with self._changed:
            is_new_here = not self.rounds.peers and not self._highest_number
            goes_on = is_new_here and is_of_equal_loop(token, self._fingerprint)
            if goes_on:
                self._token = str(token)
            return goes_on

    def _new_number(self) -> int:
        numbers = [self._highest_number, self.rounds.host, *self.rounds.peers, *self._links.places]
        self._highest_number = max(numbers) + 1
        return self._highest_number

    def received(self, host: int, fields: Fields, payload: bytes) -> None:
        """A message has come; raises ValueError if no host of the same loop sends such a message."""
        if fields.get("kind") not in _KINDS or type(fields.get("round", 0)) is not int:
            raise ValueError("not a message of an outer loop")
        with self._working():
            if host in self.rounds.peers:
                self._receive(host, fields, payload)

    def tick(self) -> None:
        """A moment has passed."""
        with self._working():
            now = time.monotonic()
            for host in self._links.linked:
                if host in self.rounds.peers:
                    self.rounds.heard(host, self._links.heard(host))
            self.rounds.coming_in({*filter(self._links.is_receiving, self._links.linked)})
            self.rounds.tick(now)
            wait = min(_MAX_GREETING_SECONDS, self.rounds.grace / _GREETINGS_PER_GRACE)
            if now - self._greeted > wait:
                self._greeted = now
                self.rounds.greet()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Do afterwards what there is to do, and wake whoever waits for it."""
        with self._changed:
            try:
                yield
                self._encode()
                while self.rounds.ready:
                    self._use(self.rounds.ready.pop(0))
                self._flush()
            except Exception as error:  # the training raises it
                self._failure = error
            finally:
                self._changed.notify_all()

    def _receive(self, host: int, fields: Fields, payload: bytes) -> None:
        kind = fields["kind"]
        if kind == "state":
            self._receive_state(host, fields, payload)
        elif kind == "goodbye":
            self._has_left |= host < self.rounds.host and self.rounds.peers[host].has_finished
            self.rounds.left(host)
            self._links.forget(host)
            self._highest_number = max(self._highest_number, host)
        elif kind in {"newcomer", "place"}:
            if is_host_number(fields["number"]) and is_place(fields["place"]):
                self._receive_place(host, fields["number"], fields["place"], is_new=kind == "newcomer")
        elif kind == "buffers":
            self.buffers = payload
            self._links.send(host, {"kind": "has buffers"})
        elif kind == "has buffers":
            self._have_buffers.add(host)
        else:
            self.rounds.receive(host, fields, payload, time.monotonic())

    def _receive_place(self, host: int, number: int, place: Place, *, is_new: bool) -> None:
        """Another host says where one is; only that one, or the one that it has asked, can know it anew."""
        is_known = number in self._links.places
        if is_new or number == host or not is_known:
            self._links.add(number, place)
        if not is_known:
            for other in self._links.linked:
                if other not in {host, number}:
                    self._links.send(other, {"kind": "place", "number": number, "place": place})

    def _encode(self) -> None:
        waiting, self._to_encode = self._to_encode, []
        for number, own in waiting:
            if number < self.rounds.decided:
                self.rounds.passed_over.append(number)  # the others went on without this host
                continue
            change = self._fragments[self._schedule.fragment(number)].encode(number, own)
            self.rounds.offer(number, change, time.monotonic())

    def _use(self, decided: DecidedRound) -> None:
        number = decided.number
        fragment = self._schedule.fragment(number)
        by = self._fragments[fragment].step(number, decided.changes, self.rounds.host)
        if by is not None:
            self.moves.add(Move(fragment, by, self._schedule.use_step(number)), step=self.step)
        if number >= self._next_round:  # the others went on without this host
            self._go_to(self._schedule.send_step(number))

    def _go_to(self, step: int) -> None:
        self.step = max(self.step, step)
        self._next_round = max(self._next_round, self._schedule.first_round_after(self.step))

    def _receive_state(self, host: int, fields: Fields, payload: bytes) -> None:
        if not self.rounds.may_take_state_from(host, fields["history"]):
            self.rounds.refuse_state(host)
            return
        offset, joins = 0, not self.rounds.is_current
        for number, fragment in enumerate(self._fragments):
            values = []
            for like in (fragment.common, fragment.momentum):
                part = bytearray(payload[offset : offset + like.nbytes])
                values.append(torch.frombuffer(part, dtype=like.dtype))
                offset += like.nbytes
            move = fragment.take(*values, joins=joins)
            if joins:
                self.moves.put(Move(number, fragment.common.clone(), 0, replaces=True))
            else:
                self.moves.add(Move(number, move, 0), step=self.step)
        self._to_encode.clear()
        self._take_history(fields["history"], fields["step"])

    def _take_history(self, history: Fields, step: int) -> None:
        """Go on after another's rounds; those that are under way go without this host."""
        self._go_to(step)
        now = time.monotonic()
        self.rounds.take_state(history, now)
        for number in range(self.rounds.decided, self._next_round):
            self.rounds.skip(number, now)

    def _flush(self) -> None:
        """Send what the rounds have to say."""
        for host in self.rounds.state_for:
            self._send_state(host)
        self.rounds.state_for.clear()
        for message in self.rounds.outbox:
            for host in self._links.linked if message.to is None else [message.to]:
                self._links.send(host, message.fields, message.payload, urgent=message.urgent)
        self.rounds.outbox.clear()

    def _send_state(self, host: int) -> None:
        content = b"".join(
            tensor.numpy().tobytes()
            for fragment in self._fragments
            for tensor in (fragment.common, fragment.momentum)
        )
        fields = {"kind": "state", "step": self.step, "history": self.rounds.history}
        self._links.send(host, fields, content)


def _tensors_of(fragment: Fragment) -> dict[str, Tensor]:
    return {
        "common": fragment.common,
        "momentum": fragment.momentum,
        "residual": fragment.residual,
    }
