"""Writes the rosters of a run that is healed: what each host says of its members, put together.

See Note [Generations] in comm/roster.py.

Note [Several hosts]. The launcher of each host says which members its host has, each second. The launcher of
the first host, which has the store, writes the rosters from that. If a host is silent for too long, its
members are lost, and its launcher ends when it finds out.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.comm.roster import FAILED_KEY, ROSTER_KEY, LostRank, Roster, again_key, host_key, opened_key

_WORD_SECONDS = 1.0
_LEAVE_SECONDS = 0.1


class HostError(Exception):
    """The run has to end on this host; the message says why."""


@dataclass
class _Word:
    """What a host has said last: its members, why it has lost others, and whether it has ended."""

    number: int = -1
    members: Sequence[str] = ()
    why: Mapping[str, str] = field(default_factory=dict)
    heard: float = 0.0
    is_silent: bool = False
    has_left: bool = False


def next_roster(
    roster: Roster | None,
    members: Sequence[str],
    why: Mapping[str, str],
    *,
    at: float,
    again: bool = False,
    was_opened: bool = True,
) -> Roster | None:
    """The roster of the next generation; None if the members are the same, and did not ask for one.

    Args:
        roster: the last one; None before the first.
        members: who is there now, in the order of ranks.
        why: why members were lost.
        at: the time, in seconds since the epoch.
        again: whether the members could not open a group.
        was_opened: whether the members of the last roster have trained.
    """
    if roster is None:
        return Roster(0, tuple(members), at=at)
    if (tuple(members) == roster.members and not again) or roster.is_over or not members:
        return None
    lost = tuple(
        LostRank(rank, why.get(member, "lost"))
        for rank, member in enumerate(roster.members)
        if member not in members
    )
    if roster.lost and not was_opened:
        lost, at = (*roster.lost, *lost), roster.at
    return Roster(roster.generation + 1, tuple(members), lost, at)


class Rosters:
    """The rosters in the store, as the launcher of one host sees and writes them.

    Args:
        store: the store of the run.
        host: the number of this host.
        hosts: how many there are.
        silent_after: for how many seconds a host may say nothing.

    Attributes:
        roster: the last one; None before the first.
        since: when it was first seen, in the time of ``time.monotonic``.
    """

    def __init__(self, store: Any, host: int, hosts: int, *, silent_after: float) -> None:
        self.roster: Roster | None = None
        self.since = 0.0
        self._store = store
        self._host = host
        self._words = [_Word() for _ in range(hosts)]
        self._silent_after = silent_after
        self._said_at = 0.0
        self._has_begun = False

    @property
    def members(self) -> Sequence[str]:
        """The members of the last roster."""
        return () if self.roster is None else self.roster.members

    @property
    def is_training(self) -> bool:
        """Whether members have begun to train, and have not ended the training."""
        return self._has_begun and not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the members have ended the training."""
        return self.roster is not None and self.roster.is_over

    def say(self, members: Sequence[str], why: Mapping[str, str]) -> None:
        """Tell which members this host has, and write or read the roster.

        Raises:
            HostError: the others have gone on without this host, or the run has failed on another one.
        """
        own, now = self._words[self._host], time.monotonic()
        if list(members) != own.members or now > self._said_at + _WORD_SECONDS:
            own.members, own.why = list(members), dict(why)
            self._tell()
        if self._host == 0:
            self._listen(now)
            self._write()
        self._read()
        self._has_begun = self._has_begun or self._is_set(opened_key)
        if self._store.check([FAILED_KEY]):
            raise HostError(self._store.get(FAILED_KEY).decode())

    def fail(self, words: str) -> None:
        """End the run on all hosts."""
        self._store.set(FAILED_KEY, words)

    def leave(self) -> None:
        """Wait until the ranks of all hosts have ended, because this host has the store."""
        self._words[self._host].has_left = True
        self._tell()
        while self._host == 0 and not all(word.has_left or word.is_silent for word in self._words):
            time.sleep(_LEAVE_SECONDS)
            self._listen(time.monotonic())

    def _tell(self) -> None:
        own = self._words[self._host]
        self._said_at = own.heard = time.monotonic()
        own.number += 1
        if len(self._words) > 1:
            self._store.set(host_key(self._host), json.dumps(asdict(own)))

    def _listen(self, now: float) -> None:
        for host, word in enumerate(self._words):
            if host == self._host or word.is_silent:
                continue
            if self._store.check([host_key(host)]):
                said = _Word(**json.loads(self._store.get(host_key(host))))
                if said.number != word.number:
                    self._words[host] = word = replace(said, heard=now)
            if self.roster is not None and not word.has_left and now > word.heard + self._silent_after:
                word.is_silent = True
                word.why = dict.fromkeys(word.members, f"its host was silent for {self._silent_after:g} s")
                word.members = ()

    def _write(self) -> None:
        if any(word.number < 0 for word in self._words):
            return  # not every host has said something
        members = [member for word in self._words for member in word.members]
        why = {member: reason for word in self._words for member, reason in word.why.items()}
        new = next_roster(
            self.roster,
            members,
            why,
            at=time.time(),
            again=self._is_set(again_key),
            was_opened=self._is_set(opened_key),
        )
        if new is not None:
            # The members may have ended the training meanwhile, and then that stays.
            before = "" if self.roster is None else self.roster.to_json()
            self._store.compare_set(ROSTER_KEY, before, new.to_json())

    def _is_set(self, key: Callable[[int], str]) -> bool:
        return self.roster is not None and bool(self._store.check([key(self.roster.generation)]))

    def _read(self) -> None:
        if not self._store.check([ROSTER_KEY]):
            return
        roster = Roster.from_json(self._store.get(ROSTER_KEY))
        if self.roster is None or roster.generation > self.roster.generation:
            self.since = time.monotonic()
        self.roster = roster
        is_out = not any(member.startswith(f"{self._host}.") for member in roster.members)
        if is_out and self._words[self._host].members and self._host:
            raise HostError("the other hosts have gone on without this one, which was silent for too long")
