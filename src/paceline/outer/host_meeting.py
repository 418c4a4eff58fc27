"""Where hosts meet that are jobs of their own: the first one there listens, and the others join it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.comm.host_addresses import own_addresses
from paceline.comm.host_connection import Place, ask
from paceline.comm.host_links import HostLinks
from paceline.errors import MeetingError, MismatchError, OptionError
from paceline.outer.agreement import new_token

_LOOK_SECONDS = 1.0
# Who does not answer in this time may be what is left of a job that was killed.
_ANSWER_SECONDS = 5.0
# In this time hosts connect again that were there before the one that listens was started again.
_JOINS_AFTER = 1.5

# Makes links to other hosts, from the addresses of this one and from where it listens.
MakeLinks = Callable[[Sequence[str], tuple[str, int]], HostLinks]


@dataclass(frozen=True)
class KnownAs:
    """What the other hosts of a loop know this one by.

    Attributes:
        number: this host's.
        token: what only hosts of this loop have. An address and equal settings do not tell one loop from the
            next: a host of the last one may still run.
    """

    number: int
    token: str


@dataclass(frozen=True)
class Met:
    """How a host has met the others.

    Attributes:
        links: for the connections to them.
        known_as: what they know it by.
        places: where the others listen.
        joins_after: after how many seconds hosts may join this one.
    """

    links: HostLinks
    known_as: KnownAs
    places: Mapping[int, Place] = field(default_factory=dict)
    joins_after: float = 0.0


@dataclass(frozen=True)
class HostMeeting:
    """An address that all hosts name."""

    address: str
    port: int

    @classmethod
    def parse(cls, meet: str) -> "HostMeeting":
        """From "host:port"."""
        address, _, port = meet.rpartition(":")
        if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise OptionError(f'meet must be "host:port", with a port from 1 to 65535 (meet: {meet!r})')
        return cls(address, int(port))

    def meet(
        self,
        make_links: MakeLinks,
        fingerprint: str,
        *,
        known_as: KnownAs | None,
        seconds: float,
        grace: float,
    ) -> Met:
        """Listen here, if this is an address of this host and nobody listens; else join the host that does.

        Args:
            make_links: listens at an address.
            fingerprint: what hosts must have in common.
            known_as: what other hosts know this one by; None if it is new.
            seconds: how long to try.
            grace: how long hosts that know this one may take to connect again.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                links = make_links([self.address], (self.address, self.port))
            except OSError:  # it is another host's address, or another host on this machine listens there
                pass
            else:
                # Hosts that were there before have to connect before new ones come, which must not get their
                # numbers. A new job does not know whether there are any.
                if known_as is None:
                    return Met(links, KnownAs(0, new_token(fingerprint)), joins_after=_JOINS_AFTER)
                return Met(links, KnownAs(0, known_as.token), joins_after=grace)
            try:
                return self._join(make_links(own_addresses(self.address), ("", 0)), fingerprint, known_as)
            except OSError as error:
                if time.monotonic() > until:
                    raise MeetingError(
                        f"no host answers where hosts meet (meet: {self.address}:{self.port}, {error})"
                    ) from error
            time.sleep(_LOOK_SECONDS)

    def _join(self, links: HostLinks, fingerprint: str, known_as: KnownAs | None) -> Met:
        """Join the host that listens; raises OSError if none does."""
        hello = {
            "fingerprint": fingerprint,
            "place": links.own_place,
            "again": None if known_as is None else known_as.number,
            "token": None if known_as is None else known_as.token,
        }
        try:
            answer = ask(([self.address], self.port), hello, seconds=_ANSWER_SECONDS)
            if "refused" in answer:
                raise MismatchError(
                    "this host has another outer loop than the others "
                    f"(here: {fingerprint}, there: {answer['refused']})"
                )
        except Exception:
            links.close()
            raise
        places = {int(host): place for host, place in answer["places"]}
        return Met(links, KnownAs(answer["number"], answer["token"]), places)
