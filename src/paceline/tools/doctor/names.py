"""Whether the names that a run needs resolve to addresses."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from paceline.tools.doctor.finding import Finding, fault, notice, ok
from paceline.tools.doctor.probe import attempt

CHECK = "names"
SECONDS = 5.0
SLOW = 1.0


@dataclass(frozen=True)
class Resolved:
    """What became of a name: addresses, or a problem, after so many seconds."""

    addresses: tuple[str, ...]
    problem: str | None
    seconds: float


def resolve(name: str) -> Resolved:
    """Ask the resolver, which may take minutes where its server does not answer."""
    began = time.monotonic()
    outcome = attempt(lambda: _addresses(name), seconds=SECONDS)
    return Resolved(tuple(outcome.value or ()), outcome.problem, time.monotonic() - began)


def _addresses(name: str) -> list[str]:
    return list(dict.fromkeys(str(row[4][0]) for row in socket.getaddrinfo(name, None)))


def gather(endpoint: str | None) -> dict[str, Resolved]:
    """Look up this host's name, and that of the place where hosts meet."""
    wanted = [socket.gethostname(), *([endpoint] if endpoint and not _is_address(endpoint) else [])]
    return {name: resolve(name) for name in dict.fromkeys(wanted)}


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def judge(names: Mapping[str, Resolved], *, host: str, outward: Sequence[str]) -> list[Finding]:
    """Say which names do not resolve, or slowly.

    Args:
        names: what became of each.
        host: this host's name.
        outward: addresses at which others reach this host.
    """
    return [_judge(name, resolved, is_own=name == host, outward=outward) for name, resolved in names.items()]


def _judge(name: str, resolved: Resolved, *, is_own: bool, outward: Sequence[str]) -> Finding:
    data = {"name": name, **vars(resolved)}
    whose = "this host's name" if is_own else "the name of the host where ranks meet"
    if resolved.problem is not None or not resolved.addresses:
        address = ([*outward, "127.0.1.1"] if is_own else ["ITS_ADDRESS"])[0]
        return fault(
            CHECK,
            f"{whose} does not resolve ({name}: {resolved.problem})",
            f"echo '{address} {name}' | sudo tee -a /etc/hosts",
            **data,
        )
    addresses = ", ".join(resolved.addresses)
    if resolved.seconds > SLOW:
        found = f"{whose} resolves slowly ({name}: {resolved.seconds:.1f} s)"
        return notice(CHECK, found, f"echo '{resolved.addresses[0]} {name}' | sudo tee -a /etc/hosts", **data)
    return ok(CHECK, f"{whose} resolves ({name}: {addresses})", **data)
