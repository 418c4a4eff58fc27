"""Where hosts meet that are jobs of their own: the first one there listens, and the others join it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.comm.host_links import HostLinks, Place, ask, own_addresses
from paceline.errors import MeetingError, MismatchError, OptionError

_LOOK_SECONDS = 1.0
# Who does not answer in this time may be what is left of a job that was killed.
_ANSWER_SECONDS = 5.0
# In this time hosts connect again that were there before the one that listens was started again.
_JOINS_AFTER = 1.5

MakeLinks = Callable[[tuple[str, int]], HostLinks]


@dataclass(frozen=True)
class Met:
    """How a host has met the others.

    Attributes:
        links: for the connections to them.
        number: this host's.
        places: where the others listen.
        joins_after: after how many seconds hosts may join this one.
    """

    links: HostLinks
    number: int
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
        self, make_links: MakeLinks, fingerprint: str, *, number: int | None, seconds: float, grace: float
    ) -> Met:
        """Listen here, if this is an address of this host and nobody listens; else join the host that does.

        Args:
            make_links: listens at an address.
            fingerprint: what hosts must have in common.
            number: the one that this host has had; None if it is new.
            seconds: how long to try.
            grace: how long hosts that know this one may take to connect again.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                links = make_links((self.address, self.port))
            except OSError:  # it is another host's address, or another host on this machine listens there
                pass
            else:
                # Hosts that were there before have to connect before new ones come, which must not get their
                # numbers. A new job does not know whether there are any.
                return Met(links, 0, joins_after=_JOINS_AFTER if number is None else grace)
            try:
                return self._join(make_links(("", 0)), fingerprint, number)
            except OSError as error:
                if time.monotonic() > until:
                    raise MeetingError(
                        f"no host answers where hosts meet (meet: {self.address}:{self.port}, {error})"
                    ) from error
            time.sleep(_LOOK_SECONDS)

    def _join(self, links: HostLinks, fingerprint: str, number: int | None) -> Met:
        """Join the host that listens; raises OSError if none does."""
        hello = {
            "fingerprint": fingerprint,
            "place": (own_addresses(self.address), links.port),
            "met_at": [self.address],
            "again": number,
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
        return Met(links, answer["number"], {int(host): place for host, place in answer["places"]})
