"""This host's network interfaces, which of them gloo uses, and whether host names resolve."""

import fcntl
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from paceline.comm.probing import make_gloo_devices
from paceline.tools.doctor.findings import Finding, fault, notice, ok
from paceline.tools.doctor.requested_run import RequestedRun

INTERFACES_CHECK, NAMES_CHECK = "interfaces", "names"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
# How long the resolver and gloo may take.
SECONDS = 5.0
SLOW_SECONDS = 1.0
# linux/sockios.h, linux/if.h
_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913
_IFF_UP = 0x1
_ROUTES = Path("/proc/net/route")
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class ForkResult:
    """What a call in a fork returned, or why it returned nothing."""

    value: Any = None
    problem: str | None = None


def call_in_fork(call: Callable[[], Any], *, seconds: float) -> ForkResult:
    """Make a call that may hang or crash in a fork of this process; its result must be a JSON value."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _send_result(call, writer)
    os.close(writer)
    try:
        return _receive_result(reader, seconds)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _send_result(call: Callable[[], Any], writer: int) -> None:
    """Never returns: the fork must not go on as this process."""
    try:
        try:
            result = {"value": call()}
        except Exception as error:
            result = {"problem": str(error) or type(error).__name__}
        os.write(writer, json.dumps(result).encode())
    finally:
        os._exit(0)


def _receive_result(reader: int, seconds: float) -> ForkResult:
    if not select.select([reader], [], [], seconds)[0]:
        return ForkResult(problem=f"no answer within {seconds:g} s")
    # A result fits into a pipe's buffer, so one read gets all of it.
    if not (received := os.read(reader, 2**16)):
        return ForkResult(problem="the process that tried it was killed")
    return ForkResult(**json.loads(received))


@dataclass(frozen=True)
class Interface:
    """A network interface with its addresses."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool

    @property
    def is_loopback(self) -> bool:
        """Whether all of its addresses are reachable from this host only."""
        return bool(self.addresses) and all(ip_address(address).is_loopback for address in self.addresses)

    @property
    def is_outward(self) -> bool:
        """Whether other hosts may reach it."""
        return self.is_up and bool(self.addresses) and not self.is_loopback


@dataclass(frozen=True)
class GlooAddress:
    """The interface and the address that gloo uses, and why."""

    interface: str
    address: str
    why: str


@dataclass(frozen=True)
class NetworkFacts:
    """Everything that gloo's choice of an interface depends on.

    Attributes:
        interfaces: all interfaces of this host.
        configured: the interfaces that GLOO_SOCKET_IFNAME names; None if it is not set.
        host: this host's name.
        resolved: the addresses that the name resolves to.
        default: the interface of the default route.
        gloo_problem: the error with which gloo fails to create its devices; None if it succeeds.
    """

    interfaces: tuple[Interface, ...]
    configured: tuple[str, ...] | None
    host: str
    resolved: tuple[str, ...]
    default: str | None = None
    gloo_problem: str | None = None

    def named(self, name: str) -> Interface | None:
        """The interface of that name."""
        return next((each for each in self.interfaces if each.name == name), None)

    @property
    def gloo_address(self) -> GlooAddress | None:
        """What gloo would use; None if the configured interface does not exist."""
        if self.configured is not None:
            first = self.named(self.configured[0]) if self.configured else None
            if first is None or not first.addresses:
                return None
            return GlooAddress(first.name, first.addresses[0], f"as set by {GLOO_VARIABLE}")
        for address in self.resolved:
            if (owner := self._owner(address)) is not None:
                return GlooAddress(owner, address, f"to which the host name {self.host} resolves")
        # As ProcessGroupGloo does, with a warning.
        why = "because the host name does not resolve to an address of this host"
        return GlooAddress(self._owner("127.0.0.1") or "lo", "127.0.0.1", why)

    @property
    def best_interface(self) -> str:
        """The interface that other hosts most likely reach."""
        outward = [each.name for each in self.interfaces if each.is_outward]
        if self.default in outward:
            return str(self.default)
        return outward[0] if outward else "lo"

    @property
    def outward_addresses(self) -> list[str]:
        """The addresses at which other hosts most likely reach this one."""
        best = self.named(self.best_interface)
        return [] if best is None else [each for each in best.addresses if not ip_address(each).is_loopback]

    def _owner(self, address: str) -> str | None:
        return next((each.name for each in self.interfaces if address in each.addresses), None)


def gather_network() -> NetworkFacts:
    """List the interfaces, and let gloo create its devices."""
    # An empty variable counts as not set.
    setting = os.environ.get(GLOO_VARIABLE)
    configured = tuple(setting.split(",")) if setting else None
    host = socket.gethostname()
    created = call_in_fork(lambda: make_gloo_devices(configured or ()), seconds=SECONDS)
    resolved = resolve(host).addresses
    return NetworkFacts(list_interfaces(), configured, host, resolved, _default_route(), created.problem)


def list_interfaces() -> tuple[Interface, ...]:
    """This host's interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        return tuple(_interface(control.fileno(), name) for _, name in socket.if_nameindex())


def _interface(control: int, name: str) -> Interface:
    request = struct.pack("256s", name.encode())
    flags = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)[0]
    addresses = _ipv6_addresses(name)
    with suppress(OSError):  # it may have no IPv4 address
        addresses.insert(0, socket.inet_ntoa(fcntl.ioctl(control, _SIOCGIFADDR, request)[20:24]))
    return Interface(name, tuple(addresses), bool(flags & _IFF_UP))


def _ipv6_addresses(name: str) -> list[str]:
    if not _IPV6_ADDRESSES.exists():
        return []
    rows = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
    found = [ip_address(bytes.fromhex(row[0])) for row in rows if row[5] == name]
    # Link-local addresses last: they cannot be used without the name of the link.
    return [str(address) for address in sorted(found, key=lambda address: address.is_link_local)]


def _default_route() -> str | None:
    """The interface of the default route."""
    rows = [line.split() for line in _ROUTES.read_text().splitlines()[1:]] if _ROUTES.exists() else []
    return next((row[0] for row in rows if row[1] == "00000000"), None)


def judge_network(network: NetworkFacts, run: RequestedRun) -> Finding:
    """Which interface gloo uses, and whether other hosts can reach it."""
    used = network.gloo_address
    data = {
        "interfaces": {each.name: list(each.addresses) for each in network.interfaces},
        "taken": None if used is None else vars(used),
    }
    fix = f"export {GLOO_VARIABLE}={network.best_interface}"
    if network.configured is not None and (missing := _unusable(network, network.configured)):
        names = f"{GLOO_VARIABLE}: {', '.join(missing)}"
        found = f"gloo is told to use an interface that is missing or down ({names})"
        return fault(INTERFACES_CHECK, found, fix, **data)
    if network.gloo_problem is not None or used is None:
        return fault(INTERFACES_CHECK, f"gloo cannot create its device ({network.gloo_problem})", fix, **data)
    choice = f"gloo uses {used.interface} ({used.address}), {used.why}"
    if ip_address(used.address).is_loopback and run.hosts > 1:
        if network.best_interface == "lo":
            found = f"{choice}: this host has no interface to other hosts"
            return fault(INTERFACES_CHECK, found, "ip -brief address", **data)
        return fault(INTERFACES_CHECK, f"{choice}: other hosts cannot reach it", fix, **data)
    if network.configured is None and not network.resolved:
        return notice(INTERFACES_CHECK, choice, fix, **data)
    return ok(INTERFACES_CHECK, choice, **data)


def _unusable(network: NetworkFacts, configured: Sequence[str]) -> list[str]:
    found = {name: network.named(name) for name in configured}
    return [
        name or "''"
        for name, interface in found.items()
        if interface is None or not interface.is_up or not interface.addresses
    ]


@dataclass(frozen=True)
class ResolvedName:
    """The addresses of a host name or the reason why there are none, and how long the resolver took."""

    addresses: tuple[str, ...]
    problem: str | None
    seconds: float


def resolve(name: str) -> ResolvedName:
    """Ask the resolver, with a deadline: it may take minutes if its server does not answer."""
    began = time.monotonic()
    result = call_in_fork(lambda: _addresses(name), seconds=SECONDS)
    return ResolvedName(tuple(result.value or ()), result.problem, time.monotonic() - began)


def _addresses(name: str) -> list[str]:
    return list(dict.fromkeys(str(row[4][0]) for row in socket.getaddrinfo(name, None)))


def resolve_host_names(endpoint: str | None) -> dict[str, ResolvedName]:
    """Resolve this host's name, and the rendezvous host's if it was given as a name."""
    names = [socket.gethostname(), *([endpoint] if endpoint and not _is_address(endpoint) else [])]
    return {name: resolve(name) for name in dict.fromkeys(names)}


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def judge_host_names(
    names: Mapping[str, ResolvedName], *, host: str, own_addresses: Sequence[str]
) -> list[Finding]:
    """Which names do not resolve, or resolve slowly.

    Args:
        names: what each name resolved to.
        host: this host's name.
        own_addresses: addresses at which others reach this host.
    """
    return [
        _judge_name(name, resolved, own_addresses if name == host else None)
        for name, resolved in names.items()
    ]


def _judge_name(name: str, resolved: ResolvedName, own_addresses: Sequence[str] | None) -> Finding:
    """Judge this host's name, or that of the rendezvous host if ``own_addresses`` is None."""
    data = {"name": name, **vars(resolved)}
    whose = "this host's name" if own_addresses is not None else "the name of the rendezvous host"
    if resolved.problem is not None or not resolved.addresses:
        address = "ITS_ADDRESS" if own_addresses is None else [*own_addresses, "127.0.1.1"][0]
        found = f"{whose} does not resolve ({name}: {resolved.problem})"
        return fault(NAMES_CHECK, found, _add_to_hosts(address, name), **data)
    if resolved.seconds > SLOW_SECONDS:
        found = f"{whose} resolves slowly ({name}: {resolved.seconds:.1f} s)"
        return notice(NAMES_CHECK, found, _add_to_hosts(resolved.addresses[0], name), **data)
    return ok(NAMES_CHECK, f"{whose} resolves ({name}: {', '.join(resolved.addresses)})", **data)


def _add_to_hosts(address: str, name: str) -> str:
    return f"echo '{address} {name}' | sudo tee -a /etc/hosts"
