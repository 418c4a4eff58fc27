"""This host's connection to the others of an outer loop, on the rank that talks to them."""

import os
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.host_addresses import own_addresses
from paceline.comm.host_connection import Place
from paceline.comm.host_links import HostLinks
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.hooks.compressors import Compressor
from paceline.outer.agreement import check_equal, digest_of_frozen, digest_of_shapes, digest_of_values
from paceline.outer.fragment import FlatParameters, Fragment, OuterOptimizer
from paceline.outer.host_exchange import HostExchange
from paceline.outer.host_meeting import HostMeeting, KnownAs
from paceline.outer.rounds import Rounds
from paceline.outer.schedule import Schedule

# What may wait for a host that is away, in sizes of all parameters, besides the module buffers.
_QUEUED_MODELS = 4
_MIN_QUEUED_BYTES = 64 << 20
_SILENT_GRACES = 4


class OtherHosts:
    """Gets this host's speaker connected to the others; on other ranks there is no exchange.

    Args:
        wrapper: the wrapper.
        parameters: those that hosts exchange, by fragment.
        schedule: when fragments are exchanged.
        compressor: what changes are sent as.
        optimizer: what makes outer steps.
        grace: seconds after which a silent host is left out.
        meeting: where hosts meet that are jobs of their own; None if one process group has all of them.

    Attributes:
        flat: the parameters of each fragment.
        exchange: what talks to the other hosts; None on ranks that do not.
        known_as: what the other hosts know this one by, once it has met them.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel,
        parameters: Sequence[Sequence[Parameter]],
        *,
        schedule: Schedule,
        compressor: Compressor,
        optimizer: OuterOptimizer,
        grace: float,
        meeting: HostMeeting | None,
    ) -> None:
        self._wrapper = wrapper
        self._parameters = parameters
        self._schedule = schedule
        self._compressor = compressor
        self._optimizer = optimizer
        self._grace = grace
        self._meeting = meeting
        self.flat = [FlatParameters(part) for part in parameters]
        self._nbytes = sum(flat.numel * flat.dtype.itemsize for flat in self.flat)
        self.exchange: HostExchange | None = None
        self.known_as: KnownAs | None = None
        self._saved: Mapping[str, Any] = {}  # a state that was loaded before hosts have met
        self._abandon: weakref.finalize[..., Any] | None = None

    def open_among(self, group: Group, hosts: Sequence[Sequence[int]]) -> None:
        """Connect to the hosts of a process group; every rank calls this at once.

        Args:
            group: the group.
            hosts: the ranks of each host, of which the first one talks.
        """
        number = next(number for number, ranks in enumerate(hosts) if group.rank in ranks)
        links: HostLinks | None = None
        if len(hosts) > 1 and group.rank == hosts[number][0]:
            links = self._make_links(own_addresses(os.environ.get("MASTER_ADDR")), ("", 0))
        try:
            everyone = self._compare(group, links)
        except BaseException:
            if links is not None:
                links.close()
            raise
        if links is not None:
            places = {host: everyone[ranks[0]]["place"] for host, ranks in enumerate(hosts)}
            del places[number]
            self._start(links, KnownAs(number, everyone[0]["token"]), places, is_current=True)

    def _compare(self, group: Group, links: HostLinks | None) -> list[dict[str, Any]]:
        """What every rank says; raises if ranks have different loops, or begin with different parameters."""
        own = {
            "settings": self._fingerprint(),
            "values": digest_of_values(self._parameters),
            "place": None if links is None else links.own_place,
            "token": secrets.token_hex(16),
        }
        everyone = [own] if group.size == 1 else group.gather_objects(own, self._wrapper.join_device)
        check_equal(everyone)
        return everyone

    def meet(self, *, seconds: float) -> None:
        """Meet the hosts that are jobs of their own; the rank that talks to them calls this."""
        assert self._meeting is not None
        met = self._meeting.meet(
            self._make_links,
            self._fingerprint(),
            known_as=self.known_as,
            seconds=seconds,
            grace=self._grace,
        )
        is_first = met.known_as.number == 0
        self._start(met.links, met.known_as, met.places, is_current=is_first, joins_after=met.joins_after)

    def _make_links(self, addresses: Sequence[str], bind: tuple[str, int]) -> HostLinks:
        buffers = sum(buffer.nbytes for buffer in self._wrapper.module.buffers())
        return HostLinks(
            addresses,
            max_queued_bytes=max(_MIN_QUEUED_BYTES, _QUEUED_MODELS * self._nbytes) + buffers,
            silent_seconds=_SILENT_GRACES * self._grace,
            bind=bind,
        )

    def _start(
        self,
        links: HostLinks,
        known_as: KnownAs,
        places: Mapping[int, Place],
        *,
        is_current: bool,
        joins_after: float = 0.0,
    ) -> None:
        fragments = [Fragment(part, self._compressor, self._optimizer) for part in self.flat]
        rounds = Rounds(
            known_as.number,
            [*places],
            fragments=len(fragments),
            grace=self._grace,
            now=time.monotonic(),
            is_current=is_current,
            # Where hosts meet, they need not have begun with equal parameters.
            beginning="start" if self._meeting is None else secrets.token_hex(8),
            life=secrets.token_hex(8),
            state_bytes=2 * self._nbytes,  # the common parameters, and their momentum
        )
        self.known_as = known_as
        self.exchange = HostExchange(
            fragments, self._schedule, links, self._fingerprint(), joins_after=joins_after
        )
        self.exchange.start(rounds, places, token=known_as.token, may_join=self._meeting is not None)
        # Its thread does not know of this object. If nobody uses this any more, such as after an error in
        # training, the other hosts must not wait for it.
        self._abandon = weakref.finalize(self, links.abandon)
        if self._saved:
            self.exchange.load_state_dict(self._saved)

    def _fingerprint(self) -> str:
        """What all hosts must have in common."""
        shapes = digest_of_shapes(self._parameters)
        own = f"{self._schedule}, {self._optimizer}, {self._compressor.name}, parameters {shapes}"
        if self._meeting is None:  # those of one process group are equal already, or were ignored on purpose
            return own
        ddp = self._wrapper
        return f"{own}, frozen parameters {digest_of_frozen(ddp.module, ddp.parameters_to_ignore)}"

    def close(self) -> None:
        """Leave the other hosts."""
        if self.exchange is not None:
            self.exchange.close()
        if self._abandon is not None:
            self._abandon.detach()  # it keeps the state of the exchange
        self.exchange = None

    def state_dict(self) -> dict[str, Any]:
        """This host's outer state; empty on ranks that do not talk to other hosts."""
        return {} if self.exchange is None else self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; ranks that do not talk to other hosts, and never will, ignore it."""
        if self.exchange is not None and state:
            self.exchange.load_state_dict(state)
        elif self._wrapper._group.awaits_others:
            self._saved = state  # for the rank that will talk to other hosts

    def forget_saved(self) -> None:
        """From here on hosts have a newer state than the one that was loaded before they have met."""
        self._saved = {}
