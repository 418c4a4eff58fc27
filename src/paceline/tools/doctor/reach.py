"""Whether ranks can open connections to each other, tried with sockets of our own before gloo hangs in it."""

import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from paceline.tools.doctor.finding import Finding, fault, ok

CHECK = "connections"
SECONDS = 3.0
AT_ONCE = 32
TOKEN_BYTES = 8

Place = Mapping[str, Any]


@contextmanager
def listening(address: str) -> Iterator[Place]:
    """Listen at an address and tell whoever connects a token, by which they know that it is this rank."""
    token = secrets.token_hex(TOKEN_BYTES)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=1024) as server:
        threading.Thread(target=_answer, args=(server, token.encode()), daemon=True).start()
        try:
            yield {"address": address, "port": server.getsockname()[1], "token": token}
        finally:
            # Wakes the thread, which a mere close would leave where it is.
            server.shutdown(socket.SHUT_RDWR)


def _answer(server: socket.socket, token: bytes) -> None:
    while True:
        try:
            caller, _ = server.accept()
        except OSError:
            return
        with caller:
            caller.sendall(token)


def try_all(places: Sequence[Place | None]) -> list[str | None]:
    """Connect to each place; why it did not work, by rank. Where there is none, nothing is tried."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda place: None if place is None else _try(place), places))


def _try(place: Place) -> str | None:
    try:
        with socket.create_connection((place["address"], place["port"]), timeout=SECONDS) as connection:
            answer = connection.recv(2 * TOKEN_BYTES)
    except TimeoutError:
        return f"no answer within {SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None if answer == place["token"].encode() else "somebody else answered"


def judge(
    reached: Sequence[Sequence[str | None] | None],
    places: Sequence[Place | None],
    hosts: Sequence[str],
) -> list[Finding]:
    """Say which host cannot open connections to which.

    Args:
        reached: by rank, why it could not reach each other one.
        places: where each rank listened.
        hosts: the name of each rank's host.
    """
    ways: dict[tuple[str, str], tuple[str, Place, Place | None]] = {}
    for rank, problems in enumerate(reached):
        for other, problem in enumerate(problems or ()):
            place = places[other]
            if problem is not None and place is not None:
                ways.setdefault((hosts[rank], hosts[other]), (problem, place, places[rank]))
    if ways:
        return [_blocked(way, *rest) for way, rest in ways.items()]
    if None in reached:
        return []
    tried = sum(len(problems) for problems in reached if problems)
    return [ok(CHECK, f"every rank reaches every other ({tried} connections)", connections=tried)]


def _blocked(way: tuple[str, str], problem: str, place: Place, own: Place | None) -> Finding:
    source, target = way
    at = f"{place['address']}:{place['port']}"
    found = f"connections are blocked from {source} to {target} ({at}: {problem})"
    data = {"from": source, "to": target, "address": place["address"], "port": place["port"]}
    if problem == "somebody else answered":
        return fault(
            CHECK, found, f"export GLOO_SOCKET_IFNAME=INTERFACE    # on {target}: one of its own", **data
        )
    by = f"-s {own['address']} " if own is not None else ""
    return fault(CHECK, found, f"sudo iptables -I INPUT {by}-p tcp -j ACCEPT    # on {target}", **data)
