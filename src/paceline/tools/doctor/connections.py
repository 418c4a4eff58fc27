"""Whether connections can be opened: to the rendezvous port, and from each rank to each other rank."""

import errno
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.tools.doctor.findings import Finding, fault, ok
from paceline.tools.doctor.requested_run import Endpoint
from paceline.tools.formatting import plural

PORT_CHECK, CONNECTIONS_CHECK = "rendezvous", "connections"
CONNECT_SECONDS = 3.0
# The host that listens may be started later than this one.
RETRY_SECONDS = 30.0
PARALLEL_CONNECTIONS = 32
TOKEN_BYTES = 8
WRONG_TOKEN = "another program answered"  # noqa: S105 - not a password
_TCP_LISTEN = "0A"  # in /proc/net/tcp

# The address and port at which a rank listens, and the token that it sends.
Listener = Mapping[str, Any]


@dataclass(frozen=True)
class PortAttempt:
    """The result of listening at a port, or of connecting to it.

    Attributes:
        problem: the error's text; None if it worked.
        number: the error's number.
        holder: the process that has the port, if it can be seen.
        free: another port, which is free.
    """

    problem: str | None = None
    number: int | None = None
    holder: str | None = None
    free: int | None = None


def try_rendezvous_port(endpoint: Endpoint) -> PortAttempt:
    """Listen at the endpoint for a moment if this host is the one that listens, else connect to it."""
    return _try_listening(endpoint.port) if endpoint.is_here else connect(endpoint.address, endpoint.port)


def _try_listening(port: int) -> PortAttempt:
    # IPv4 and IPv6, as torch's store does.
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen()
        except OSError as error:
            return PortAttempt(error.strerror, error.errno, _holder(port), _free_port())
    return PortAttempt()


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("", 0))
        port: int = trial.getsockname()[1]
    return port


def _holder(port: int) -> str | None:
    """The process that listens at a port, found by the inode of its socket."""
    inodes = {f"socket:[{row[9]}]" for row in _listening() if int(row[1].rpartition(":")[2], 16) == port}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and inodes & {
                str(file.readlink()) for file in (process / "fd").iterdir()
            }:
                return f"{(process / 'comm').read_text().strip()}, pid {process.name}"
        except OSError:  # it has ended, or belongs to another user
            continue
    return None


def _listening() -> list[list[str]]:
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return [row for row in rows if row[3] == _TCP_LISTEN]


def connect(address: str, port: int, *, retry_seconds: float = RETRY_SECONDS) -> PortAttempt:
    """Connect; try again while nothing listens there."""
    until = time.monotonic() + retry_seconds
    while (tried := _connect(address, port)).number == errno.ECONNREFUSED and time.monotonic() < until:
        time.sleep(0.2)
    return tried


def _connect(address: str, port: int) -> PortAttempt:
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except TimeoutError:
        return PortAttempt(f"no answer within {CONNECT_SECONDS:g} s", errno.ETIMEDOUT)
    except OSError as error:
        return PortAttempt(error.strerror or str(error), error.errno)
    return PortAttempt()


def judge_rendezvous_port(attempt: PortAttempt, endpoint: Endpoint, *, host: str) -> Finding:
    """Whether ranks can meet at the endpoint."""
    data = {**vars(attempt), "endpoint": str(endpoint), "is_here": endpoint.is_here}
    if endpoint.is_here and not endpoint.is_known:
        found = f"{endpoint} is on this host, but torch does not detect that: no host would listen"
        return fault(PORT_CHECK, found, "paceline run --rdzv-conf is_host=1 …    # on this host only", **data)
    if attempt.problem is None:
        return ok(PORT_CHECK, f"{endpoint} {'is free' if endpoint.is_here else 'can be reached'}", **data)
    explain = _cannot_listen if endpoint.is_here else _cannot_reach
    found, fix = explain(attempt, endpoint, host)
    return fault(PORT_CHECK, found, fix, **data)


def _cannot_listen(attempt: PortAttempt, endpoint: Endpoint, host: str) -> tuple[str, str]:
    fix = endpoint.option.format(port=attempt.free)
    if attempt.number == errno.EADDRINUSE:
        by = f", by: {attempt.holder}" if attempt.holder else ""
        return f"the port is in use (port: {endpoint.port}{by})", fix
    return f"{host} cannot listen there (port: {endpoint.port}, {attempt.problem})", fix


def _cannot_reach(attempt: PortAttempt, endpoint: Endpoint, host: str) -> tuple[str, str]:
    path = f"from {host} to {endpoint}: {attempt.problem}"
    if attempt.number == errno.ECONNREFUSED:
        found = f"nothing listens at the rendezvous endpoint, or a firewall refuses connections ({path})"
        return found, "paceline doctor --node-rank 0 …    # on the first host, with the same options"
    if attempt.number in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"there is no route to the rendezvous endpoint ({path})", f"ip route get {endpoint.address}"
    allow = f"sudo iptables -I INPUT -p tcp --dport {endpoint.port} -j ACCEPT    # on {endpoint.address}"
    return f"the rendezvous endpoint is blocked ({path})", allow


@contextmanager
def listening(address: str) -> Iterator[Listener]:
    """Listen at an address, and send a token to whoever connects, so that they know that it is this rank."""
    token = secrets.token_hex(TOKEN_BYTES)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=1024) as server:
        threading.Thread(target=_send_token, args=(server, token.encode()), daemon=True).start()
        try:
            yield {"address": address, "port": server.getsockname()[1], "token": token}
        finally:
            # Wakes the thread, which close alone would leave waiting.
            server.shutdown(socket.SHUT_RDWR)


def _send_token(server: socket.socket, token: bytes) -> None:
    while True:
        try:
            caller, _ = server.accept()
        except OSError:
            return
        with caller:
            caller.sendall(token)


def connect_to_all(listeners: Sequence[Listener | None]) -> list[str | None]:
    """Connect to each listener; the errors by rank, None where it worked or there is no listener."""
    with ThreadPoolExecutor(PARALLEL_CONNECTIONS) as threads:
        return list(threads.map(lambda each: None if each is None else _receive_token(each), listeners))


def _receive_token(listener: Listener) -> str | None:
    try:
        with socket.create_connection(
            (listener["address"], listener["port"]), timeout=CONNECT_SECONDS
        ) as connection:
            answer = connection.recv(2 * TOKEN_BYTES)
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None if answer == listener["token"].encode() else WRONG_TOKEN


def judge_connections(
    errors: Sequence[Sequence[str | None] | None],
    listeners: Sequence[Listener | None],
    hosts: Sequence[str],
) -> list[Finding]:
    """Which host cannot open connections to which; one finding per direction between two hosts.

    Args:
        errors: by rank, its error with each other rank.
        listeners: where each rank listened.
        hosts: the name of each rank's host.
    """
    blocked: dict[tuple[str, str], tuple[str, Listener, Listener | None]] = {}
    for rank, by_rank in enumerate(errors):
        for other, error in enumerate(by_rank or ()):
            listener = listeners[other]
            if error is not None and listener is not None:
                blocked.setdefault((hosts[rank], hosts[other]), (error, listener, listeners[rank]))
    if blocked:
        return [_blocked(source, target, *details) for (source, target), details in blocked.items()]
    if None in errors:
        return []
    tried = sum(len(by_rank) for by_rank in errors if by_rank)
    return [
        ok(
            CONNECTIONS_CHECK,
            f"every rank reaches every other rank ({plural(tried, 'connection')})",
            connections=tried,
        )
    ]


def _blocked(source: str, target: str, error: str, listener: Listener, own: Listener | None) -> Finding:
    at = f"{listener['address']}:{listener['port']}"
    found = f"connections are blocked from {source} to {target} ({at}: {error})"
    data = {"from": source, "to": target, "address": listener["address"], "port": listener["port"]}
    if error == WRONG_TOKEN:
        fix = f"export GLOO_SOCKET_IFNAME=INTERFACE    # on {target}: an interface that only it has"
    else:
        by = f"-s {own['address']} " if own is not None else ""
        fix = f"sudo iptables -I INPUT {by}-p tcp -j ACCEPT    # on {target}"
    return fault(CONNECTIONS_CHECK, found, fix, **data)
