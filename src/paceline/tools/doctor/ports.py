"""The port where ranks meet: free on the host that listens, reachable from the others."""

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.tools.doctor.asked import Asked, Endpoint
from paceline.tools.doctor.finding import Finding, fault, ok

CHECK = "rendezvous"
CONNECT_SECONDS = 3.0
# The host that listens may be started later than this one.
PATIENCE_SECONDS = 30.0
_LISTENING = "0A"


@dataclass(frozen=True)
class Port:
    """What became of the attempt to listen at the endpoint, or to connect to it.

    Attributes:
        problem: what the system said; None if it worked.
        number: the error's number.
        holder: who has the port, if that can be seen.
        free: another port, which is free.
    """

    problem: str | None = None
    number: int | None = None
    holder: str | None = None
    free: int | None = None


def gather(endpoint: Endpoint) -> Port:
    """Listen at the endpoint for a moment, or connect to it."""
    return _listen(endpoint.port) if endpoint.is_here else connect(endpoint.address, endpoint.port)


def _listen(port: int) -> Port:
    # Both kinds of address, as torch's store does.
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen()
        except OSError as error:
            return Port(error.strerror, error.errno, _holder(port), _free())
    return Port()


def _free() -> int:
    with socket.socket() as trial:
        trial.bind(("", 0))
        port: int = trial.getsockname()[1]
    return port


def _holder(port: int) -> str | None:
    """The process that listens at a port, by the inode of its socket."""
    inodes = {f"socket:[{row[9]}]" for row in _listeners() if int(row[1].rpartition(":")[2], 16) == port}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and inodes & {
                str(file.readlink()) for file in (process / "fd").iterdir()
            }:
                return f"{(process / 'comm').read_text().strip()}, pid {process.name}"
        except OSError:  # it has ended, or is somebody else's
            continue
    return None


def _listeners() -> list[list[str]]:
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return [row for row in rows if row[3] == _LISTENING]


def connect(address: str, port: int, *, patience: float = PATIENCE_SECONDS) -> Port:
    """Connect; again while nobody listens there."""
    until = time.monotonic() + patience
    while (tried := _connect(address, port)).number == errno.ECONNREFUSED and time.monotonic() < until:
        time.sleep(0.2)
    return tried


def _connect(address: str, port: int) -> Port:
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except TimeoutError:
        return Port(f"no answer within {CONNECT_SECONDS:g} s", errno.ETIMEDOUT)
    except OSError as error:
        return Port(error.strerror or str(error), error.errno)
    return Port()


def judge(port: Port, asked: Asked, *, host: str) -> Finding:
    """Say whether ranks can meet at the endpoint."""
    endpoint = asked.endpoint
    assert endpoint is not None
    data = {**vars(port), "endpoint": str(endpoint), "is_here": endpoint.is_here}
    if endpoint.is_here and not endpoint.is_known:
        found = f"{endpoint} is this host's, and torch does not see it: no host would listen"
        return fault(CHECK, found, "paceline run --rdzv-conf is_host=1 …    # on this host alone", **data)
    if port.problem is None:
        verb = "can be listened at" if endpoint.is_here else "is reached"
        return ok(CHECK, f"{endpoint} {verb}", **data)
    find_fault: Callable[..., tuple[str, str]] = _not_free if endpoint.is_here else _not_reached
    found, fix = find_fault(port, endpoint, host)
    return fault(CHECK, found, fix, **data)


def _not_free(port: Port, endpoint: Endpoint, host: str) -> tuple[str, str]:
    fix = endpoint.option.format(port=port.free)
    if port.number == errno.EADDRINUSE:
        by = f", by: {port.holder}" if port.holder else ""
        return f"the port is in use (port: {endpoint.port}{by})", fix
    return f"{host} cannot listen there (port: {endpoint.port}, {port.problem})", fix


def _not_reached(port: Port, endpoint: Endpoint, host: str) -> tuple[str, str]:
    way = f"from {host} to {endpoint}"
    if port.number == errno.ECONNREFUSED:
        found = f"nobody listens at the rendezvous, or a firewall refuses ({way}: {port.problem})"
        return found, "paceline doctor --node-rank 0 …    # on the first host, with the same options"
    if port.number in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"no way leads to the rendezvous ({way}: {port.problem})", f"ip route get {endpoint.address}"
    allow = f"sudo iptables -I INPUT -p tcp --dport {endpoint.port} -j ACCEPT    # on {endpoint.address}"
    return f"the rendezvous is blocked ({way}: {port.problem})", allow
