"""What one host knows of a round between hosts, and of the other hosts. Pure, as rounds.py is."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """What is to be sent.

    Attributes:
        to: the host; None for all.
        fields: what it says; the key ``kind`` says what it is.
        payload: the change of a fragment, compressed.
        urgent: whether it goes before messages that wait.
    """

    to: int | None
    fields: Fields
    payload: bytes = b""
    urgent: bool = False


@dataclass(frozen=True)
class DecidedRound:
    """A round whose changes are all here.

    Attributes:
        number: the round.
        changes: each host's change that counts, in the order of the hosts.
        digests: those of the changes.
    """

    number: int
    changes: Mapping[int, bytes]
    digests: Mapping[int, str]

    @property
    def nbytes(self) -> int:
        """The size of its changes."""
        return sum(map(len, self.changes.values()))


@dataclass
class Peer:
    """What is known of another host.

    Attributes:
        heard: when something came from it last.
        decided: how many rounds it has decided.
        is_current: whether it has the state of the others; not before a host that joins late has taken it.
        has_finished: whether it has no more steps.
        next_round: if it has finished, the first round that it has sent nothing for.
        states_received: how many states of other hosts it has received.
        state_sent_at: ``states_received`` when a state was sent to it last.
        asked_at: when it was asked last how far it is.
        is_late: whether a round went on without it, and it has sent nothing since; it is not waited for.
        is_sending: whether a message of it is coming in.
        agrees: whether its history is known to be this host's, as far as both go.
        is_linked_anew: whether there is a new connection to it, and no greeting has come there.
        life: what tells this process from an earlier one of the same host; empty until it has said so.
    """

    heard: float
    decided: int = 0
    is_current: bool = True
    has_finished: bool = False
    next_round: int = 0
    states_received: int = 0
    state_sent_at: int = -1
    asked_at: float = -math.inf
    is_late: bool = False
    is_sending: bool = False
    agrees: bool = True
    is_linked_anew: bool = False
    life: str = ""


@dataclass
class OpenRound:
    """What has come for a round that is not decided.

    Attributes:
        changes: by host.
        skipped: hosts that have none.
        since: when the first of it came.
        members: the coordinator's decision, if it was told: the digest of each change that counts, by host.
        told_at: when it was told.
    """

    since: float
    changes: dict[int, bytes] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    members: Mapping[int, str] | None = None
    told_at: float = 0.0
    _digests: dict[int, str] = field(default_factory=dict)

    def put(self, host: int, change: bytes) -> None:
        """Have a host's change."""
        self.changes[host] = change
        self._digests.pop(host, None)

    def drop(self, host: int) -> None:
        """Forget what a host has sent."""
        self.changes.pop(host, None)
        self.skipped.discard(host)
        self._digests.pop(host, None)

    def digest(self, host: int) -> str | None:
        """The digest of a host's change; None without one."""
        if host not in self.changes:
            return None
        if host not in self._digests:
            self._digests[host] = digest_of(self.changes[host])
        return self._digests[host]

    def counts(self, host: int) -> bool:
        """Whether the change of a host that is here is the one that was decided on."""
        return self.members is not None and self.members.get(host) == self.digest(host) is not None

    def is_whole(self) -> bool:
        """Whether all changes that were decided on are here."""
        return self.members is not None and all(map(self.counts, self.members))


def digest_of(change: bytes) -> str:
    """What tells one change from others."""
    return hashlib.blake2b(change, digest_size=8).hexdigest()
