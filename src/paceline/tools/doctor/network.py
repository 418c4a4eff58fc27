"""Interfaces, and which of them gloo would take."""

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from paceline.comm.probing import make_gloo_devices
from paceline.tools.doctor.asked import Asked
from paceline.tools.doctor.finding import Finding, fault, notice, ok
from paceline.tools.doctor.names import resolve
from paceline.tools.doctor.probe import attempt

CHECK = "interfaces"
VARIABLE = "GLOO_SOCKET_IFNAME"
SECONDS = 5.0
# linux/sockios.h, linux/if.h
_GET_ADDRESS, _GET_FLAGS = 0x8915, 0x8913
_UP = 0x1
_ROUTES = Path("/proc/net/route")
_ADDRESSES_6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class Interface:
    """A network interface with its addresses."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool

    @property
    def is_loopback(self) -> bool:
        """Whether it leads to this host alone."""
        return bool(self.addresses) and all(ip_address(address).is_loopback for address in self.addresses)


@dataclass(frozen=True)
class Network:
    """What gloo's choice depends on.

    Attributes:
        interfaces: all of them.
        chosen: the interfaces that the variable names, or None if it is not set.
        host: this host's name.
        resolved: the addresses that the name resolves to.
        default: the interface that leads out of here.
        problem: what gloo says when it is to make its devices; None if it can.
    """

    interfaces: tuple[Interface, ...]
    chosen: tuple[str, ...] | None
    host: str
    resolved: tuple[str, ...]
    default: str | None = None
    problem: str | None = None

    def named(self, name: str) -> Interface | None:
        """An interface by its name."""
        return next((each for each in self.interfaces if each.name == name), None)

    @property
    def taken(self) -> "Taken | None":
        """What gloo would take; None if what it was told to take is not there."""
        if self.chosen is not None:
            first = self.named(self.chosen[0]) if self.chosen else None
            if first is None or not first.addresses:
                return None
            return Taken(first.name, first.addresses[0], f"as {VARIABLE} says")
        for address in self.resolved:
            if (holder := self._holder(address)) is not None:
                return Taken(holder, address, f"to which the host name {self.host} resolves")
        # As ProcessGroupGloo does, with a warning.
        return Taken(
            self._holder("127.0.0.1") or "lo", "127.0.0.1", "for want of an address of the host name"
        )

    @property
    def best(self) -> str:
        """The interface that other hosts most likely reach."""
        outward = [
            each.name for each in self.interfaces if each.is_up and each.addresses and not each.is_loopback
        ]
        if self.default in outward:
            return str(self.default)
        return outward[0] if outward else "lo"

    def _holder(self, address: str) -> str | None:
        return next((each.name for each in self.interfaces if address in each.addresses), None)


@dataclass(frozen=True)
class Taken:
    """The interface and the address that gloo takes, and why."""

    interface: str
    address: str
    why: str


def gather() -> Network:
    """Look at the interfaces, and have gloo make its devices."""
    told = os.environ.get(VARIABLE)
    # An empty one is taken for none.
    chosen = tuple(told.split(",")) if told else None
    host = socket.gethostname()
    made = attempt(lambda: make_gloo_devices(chosen or ()), seconds=SECONDS)
    return Network(interfaces(), chosen, host, resolve(host).addresses, _default(), made.problem)


def interfaces() -> tuple[Interface, ...]:
    """This host's interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        return tuple(_interface(asker.fileno(), name) for _, name in socket.if_nameindex())


def _interface(asker: int, name: str) -> Interface:
    request = struct.pack("256s", name.encode())
    flags = struct.unpack_from("H", fcntl.ioctl(asker, _GET_FLAGS, request), 16)[0]
    addresses = _addresses_6(name)
    with suppress(OSError):  # it may have none of the old kind
        addresses.insert(0, socket.inet_ntoa(fcntl.ioctl(asker, _GET_ADDRESS, request)[20:24]))
    return Interface(name, tuple(addresses), bool(flags & _UP))


def _addresses_6(name: str) -> list[str]:
    if not _ADDRESSES_6.exists():
        return []
    rows = [line.split() for line in _ADDRESSES_6.read_text().splitlines()]
    found = [ip_address(bytes.fromhex(row[0])) for row in rows if row[5] == name]
    # An address of the link alone is of no use without the link's name.
    return [str(address) for address in sorted(found, key=lambda address: address.is_link_local)]


def _default() -> str | None:
    """The interface of the route that leads anywhere."""
    rows = [line.split() for line in _ROUTES.read_text().splitlines()[1:]] if _ROUTES.exists() else []
    return next((row[0] for row in rows if row[1] == "00000000"), None)


def judge(network: Network, asked: Asked) -> Finding:
    """Say which interface gloo takes, and whether other ranks can reach it."""
    data = {
        "interfaces": {each.name: list(each.addresses) for each in network.interfaces},
        "taken": None if network.taken is None else vars(network.taken),
    }
    fix = f"export {VARIABLE}={network.best}"
    if network.chosen is not None and (wrong := _wrong(network, network.chosen)):
        found = f"gloo is told to take what is not there ({VARIABLE}: {', '.join(wrong)})"
        return fault(CHECK, found, fix, **data)
    if network.problem is not None or network.taken is None:
        return fault(CHECK, f"gloo cannot make its device ({network.problem})", fix, **data)
    taken = network.taken
    words = f"gloo takes {taken.interface} ({taken.address}), {taken.why}"
    if ip_address(taken.address).is_loopback and asked.hosts > 1:
        if network.best == "lo":
            return fault(CHECK, f"{words}: there is no interface to other hosts", "ip -brief address", **data)
        return fault(CHECK, f"{words}: other hosts cannot reach it", fix, **data)
    if network.chosen is None and not network.resolved:
        return notice(CHECK, words, fix, **data)
    return ok(CHECK, words, **data)


def _wrong(network: Network, chosen: Sequence[str]) -> list[str]:
    found = {name: network.named(name) for name in chosen}
    return [
        name or "''"
        for name, interface in found.items()
        if interface is None or not interface.is_up or not interface.addresses
    ]
